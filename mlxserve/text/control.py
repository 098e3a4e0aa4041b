"""Keeps text that people wrote from becoming control tokens in a rendered chat.

Knows: which characters of a render people wrote (text/user_text.py tells), and where control tokens may
therefore not be. Knows nothing of templates or of how ids are made.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from mlxserve.text.user_text import plain, user_runs

Span = tuple[int, int]  # half-open, in characters


class Protected:
    """The spans of a text in which no control token may lie, in order and apart."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self.spans = list(spans)
        self._ends = [end for _, end in self.spans]

    def touches(self, start: int, end: int) -> bool:
        """True if any character from `start` to `end` is in a span."""
        first = bisect_right(self._ends, start)
        return first < len(self.spans) and self.spans[first][0] < end

    def gaps(self, start: int, end: int) -> list[Span]:
        """What of the characters from `start` to `end` is in no span, in order."""
        found = []
        for begin, stop in self.spans[bisect_right(self._ends, start) :]:
            if begin >= end:
                break
            found.append((start, begin))
            start = stop
        found.append((start, end))
        return [gap for gap in found if gap[0] < gap[1]]


def told_apart(rendered: str) -> tuple[str, Protected]:
    """A render's text, and the spans of it that people wrote."""
    return plain(rendered), Protected(user_runs(rendered))
