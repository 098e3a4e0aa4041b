"""How many prompt tokens a step may take while streams are running.

Knows: how long recent steps took, with prompts and without. Does not know what they computed or for whom.

The budget follows what is measured: after a step that used it up, it is scaled by goal over time taken, both
less what the streams alone take if that is known, within bounds, so that it settles where a step takes the
goal, whatever the machine's costs are and however they change. One slow step costs little, and a budget that
became small by accident grows back in a few steps.

The goal is a little below the target. Where the streams alone take more than half of the target it is
`STRETCH` times what they take: as long as they leave room for prompts, up to the target, and beyond it once no
budget could keep the target, so that prompts do not trickle in beside half-empty batches. What streams take is
seen whenever no prompt is waiting; where one always is, one step goes without, to see it.
"""

from __future__ import annotations

from dataclasses import dataclass

# Aim a little below the target: steps vary, and a step is not interrupted.
MARGIN = 0.8
SLOWEST_CHANGE, FASTEST_CHANGE = 0.6, 2.0
STRETCH = 2.0


@dataclass(slots=True)
class _Bare:
    """A step without prompts: how many streams, how long."""

    streams: int
    elapsed_s: float

    def tells_of(self, streams: int) -> bool:
        return self.streams <= 2 * streams and streams <= 2 * self.streams


class Pace:
    """The prompt budget beside running streams; all times in seconds."""

    def __init__(self, target_s: float, smallest: int, largest: int) -> None:
        self.target_s = target_s
        self.smallest = smallest
        self.largest = largest
        self._budget: float | None = None
        self._bare: _Bare | None = None
        self._looking = False  # a step without prompts is on its way

    def record(self, prompt_tokens: int, streams: int, elapsed_s: float) -> None:
        """A step with that many prompt tokens beside that many decoding rows took that long."""
        if elapsed_s <= 0:
            return
        if prompt_tokens == 0:
            self._record_bare(streams, elapsed_s)
            return
        ratio = self._ratio(streams, elapsed_s)
        if self._budget is None or streams == 0:
            # Nobody waited; it only tells where to begin when somebody will.
            self._budget = self._bounded(prompt_tokens * ratio)
            return
        change = min(max(ratio, SLOWEST_CHANGE), FASTEST_CHANGE)
        used_up = prompt_tokens >= int(self._budget) - 1
        if used_up or change < 1:
            self._budget = self._bounded(min(prompt_tokens, self._budget) * change)

    def budget(self, streams: int) -> int:
        """Prompt tokens for the next step, beside `streams` running streams; 0 to see how long these take."""
        if streams == 0:
            return self.largest
        if self._should_look(streams):
            self._looking = True
            return 0
        return self.smallest if self._budget is None else int(self._budget)

    def _record_bare(self, streams: int, elapsed_s: float) -> None:
        self._looking = False
        if self._bare is not None and self._bare.tells_of(streams):
            elapsed_s = (self._bare.elapsed_s + elapsed_s) / 2
        self._bare = _Bare(streams, elapsed_s)

    def _ratio(self, streams: int, elapsed_s: float) -> float:
        """What the budget is to be scaled by: the time that prompts may take over the time they took."""
        goal_s, fixed_s = self._goal_s(streams), 0.0
        if streams and self._bare is not None and self._bare.tells_of(streams):
            fixed_s = min(self._bare.elapsed_s, elapsed_s / 2, goal_s / 2)
        return (goal_s - fixed_s) / (elapsed_s - fixed_s)

    def _goal_s(self, streams: int) -> float:
        """How long a step with prompts may take."""
        goal_s = self.target_s * MARGIN
        if self._bare is None or not self._bare.tells_of(streams):
            return goal_s
        stretched_s = self._bare.elapsed_s * STRETCH
        if self._bare.elapsed_s < goal_s:  # the target can be kept
            stretched_s = min(stretched_s, self.target_s)
        return max(goal_s, stretched_s)

    def _should_look(self, streams: int) -> bool:
        """Whether the budget is as small as can be and it is not known if the streams are the reason."""
        if self._looking or self._budget is None or self._budget > self.smallest:
            return False
        return self._bare is None or not self._bare.tells_of(streams)

    def _bounded(self, tokens: float) -> float:
        return max(float(self.smallest), min(float(self.largest), tokens))
