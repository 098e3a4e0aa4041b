"""How many prompt tokens a step may take while streams are running.

Knows: how long recent steps took. Does not know what they computed or for whom.

A step's time is modelled as base + per_token * prompt tokens, a straight line fitted to recent steps, older
ones counting less. The budget is what fits into the target, so that no running stream waits longer than that
for its next token.
"""

from __future__ import annotations

# What an older step counts, compared with the one after it.
FORGETTING = 0.85
# Plan for a little less than the target: estimates err, and a step is not interrupted.
MARGIN = 0.8
# A slope is read off only where token counts differ by this share of their mean.
SPREAD = 0.1


class Pace:
    """Estimates from finished steps; all times in seconds."""

    def __init__(self, target_s: float, smallest: int, largest: int) -> None:
        self.target_s = target_s
        self.smallest = smallest
        self.largest = largest
        self.base_s = 0.0
        self.per_token_s: float | None = None
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def record(self, prompt_tokens: int, elapsed_s: float) -> None:
        """A step with that many prompt tokens beside its decoding rows took that long."""
        self._weight = self._weight * FORGETTING + 1.0
        self._x = self._x * FORGETTING + prompt_tokens
        self._y = self._y * FORGETTING + elapsed_s
        self._xx = self._xx * FORGETTING + prompt_tokens**2
        self._xy = self._xy * FORGETTING + prompt_tokens * elapsed_s
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        variance = self._xx / self._weight - mean_x**2
        if mean_x and variance > (SPREAD * mean_x) ** 2:
            slope = (self._xy / self._weight - mean_x * mean_y) / variance
            self.per_token_s = min(max(slope, 0.1 * mean_y / mean_x), mean_y / mean_x)
        elif mean_x and self.per_token_s is None:
            self.per_token_s = mean_y / mean_x
        self.base_s = max(mean_y - (self.per_token_s or 0.0) * mean_x, 0.0)

    def budget(self, decoding: int) -> int:
        """Prompt tokens for the next step, beside `decoding` running streams."""
        if decoding == 0:
            return self.largest
        if self.per_token_s is None:
            return self.smallest
        room_s = self.target_s * MARGIN - self.base_s
        fitting = int(room_s / self.per_token_s) if self.per_token_s > 0 else self.largest
        return max(self.smallest, min(self.largest, fitting))
