"""How many prompt tokens a step may take while streams are running.

Knows: how long recent steps took. Does not know what they computed or for whom.

A step's time is modelled as base + per_token * prompt tokens; both are running estimates. The budget is
what fits into the target, so that no running stream waits longer than that for its next token.
"""

from __future__ import annotations

SMOOTHING = 0.3
# Plan for a little less than the target: estimates err, and a step is not interrupted.
MARGIN = 0.8


class Pace:
    """Estimates from finished steps; all times in seconds."""

    def __init__(self, target_s: float, smallest: int, largest: int) -> None:
        self.target_s = target_s
        self.smallest = smallest
        self.largest = largest
        self.base_s: float | None = None
        self.per_token_s: float | None = None

    def record(self, prompt_tokens: int, elapsed_s: float) -> None:
        """A step with that many prompt tokens beside its decoding rows took that long."""
        if prompt_tokens == 0:
            self.base_s = _blend(self.base_s, elapsed_s)
            return
        per_token_s = max(elapsed_s - (self.base_s or 0.0), 0.0) / prompt_tokens
        known = self.per_token_s
        # A slower step counts at once, a faster one gradually: the target is a promise.
        self.per_token_s = per_token_s if known is None or per_token_s > known else _blend(known, per_token_s)

    def budget(self, decoding: int) -> int:
        """Prompt tokens for the next step, beside `decoding` running streams."""
        if decoding == 0:
            return self.largest
        if self.per_token_s is None:
            return self.smallest
        room_s = self.target_s * MARGIN - (self.base_s or 0.0)
        fitting = int(room_s / self.per_token_s) if self.per_token_s > 0 else self.largest
        return max(self.smallest, min(self.largest, fitting))


def _blend(known: float | None, new: float) -> float:
    return new if known is None else known + SMOOTHING * (new - known)
