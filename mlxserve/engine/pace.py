"""How many prompt tokens a step may take while streams are running.

Knows: how long recent steps took. Does not know what they computed or for whom.

The budget follows what is measured: after a step that used it up, it is scaled by target over time taken,
within bounds, so that it settles where a step takes the target, whatever the machine's costs are and however
they change. One slow step costs little, and a budget that became small by accident grows back in a few steps.
"""

from __future__ import annotations

# Aim a little below the target: steps vary, and a step is not interrupted.
MARGIN = 0.8
SLOWEST_CHANGE, FASTEST_CHANGE = 0.6, 1.5


class Pace:
    """The prompt budget beside running streams; all times in seconds."""

    def __init__(self, target_s: float, smallest: int, largest: int) -> None:
        self.target_s = target_s
        self.smallest = smallest
        self.largest = largest
        self._budget: float | None = None

    def record(self, prompt_tokens: int, streams: int, elapsed_s: float) -> None:
        """A step with that many prompt tokens beside that many decoding rows took that long."""
        if prompt_tokens == 0 or elapsed_s <= 0:
            return
        ratio = self.target_s * MARGIN / elapsed_s
        if self._budget is None or streams == 0:
            # Nobody waited; it only tells where to begin when somebody will.
            self._budget = self._bounded(prompt_tokens * ratio)
            return
        change = min(max(ratio, SLOWEST_CHANGE), FASTEST_CHANGE)
        used_up = prompt_tokens >= int(self._budget) - 1
        if used_up or change < 1:
            self._budget = self._bounded(min(prompt_tokens, self._budget) * change)

    def budget(self, streams: int) -> int:
        """Prompt tokens for the next step, beside `streams` running streams."""
        if streams == 0:
            return self.largest
        return self.smallest if self._budget is None else int(self._budget)

    def _bounded(self, tokens: float) -> float:
        return max(float(self.smallest), min(float(self.largest), tokens))
