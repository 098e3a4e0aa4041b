"""Marks in text that comes in pieces: stop strings, and what else must be found before it is shown.

Knows: text, and that a mark may be cut anywhere. Knows nothing of tokens or requests.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence


class Markers:
    """A set of strings to look for. The earliest is the one that starts first, and of two the shorter.

    Looking costs about 1 µs a piece; without strings nothing.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        wanted = sorted({text for text in texts if text}, key=len)
        self._any = re.compile("|".join(map(re.escape, wanted))) if wanted else None
        self._longest = len(wanted[-1]) if wanted else 0
        self._beginnings = {text[:i] for text in wanted for i in range(1, len(text))}
        self._first = {text[0] for text in wanted}

    def find(self, text: str, *, final: bool = False) -> tuple[int, str | None]:
        """How much of `text` certainly comes before any mark, and the mark that starts there, once certain.

        The rest may be the beginning of a mark. Where the text is `final`, nothing is held back for that.
        """
        if self._any is None:
            return len(text), None
        match = self._any.search(text)
        hold = len(text) if final else self._unfinished(text)
        if match and match.start() <= hold:
            return match.start(), match.group()
        return hold, None

    def _unfinished(self, text: str) -> int:
        """Where the longest unfinished mark at the end of `text` starts; its length if there is none."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[start] in self._first and text[start:] in self._beginnings:
                return start
        return len(text)


class StopMatcher:
    """Passes text on until the earliest stop string; holds back what may be the beginning of one.

    The answer does not depend on how the text is cut into pieces.

        >>> matcher = StopMatcher(["beta gamma"])
        >>> matcher.feed("alpha be"), matcher.feed("ta gamma delta")
        (('alpha ', None), ('', 'beta gamma'))
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = Markers(stops)
        self._held = ""

    def feed(self, text: str, *, final: bool = False) -> tuple[str, str | None]:
        """The text that certainly comes before any stop, and the stop string once it is certain.

        After a stop nothing more is to be fed: the rest of the text is dropped.
        """
        text = self._held + text
        certain, stop = self._stops.find(text, final=final)
        self._held = "" if stop else text[certain:]
        return text[:certain], stop

    def flush(self) -> tuple[str, str | None]:
        """What was held back, at the end of the text; a stop may lie in it."""
        return self.feed("", final=True)
