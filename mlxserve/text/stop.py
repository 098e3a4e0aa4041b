"""Stop strings, matched over text and not over tokens.

Knows: text as it comes in pieces. Knows nothing of tokens or requests.
"""

from __future__ import annotations

import re
from collections.abc import Sequence


class StopMatcher:
    """Passes text on until the earliest stop string; holds back what may be the beginning of one.

    The earliest is the one that starts first; where two start together, the shorter. The answer does not
    depend on how the text is cut into pieces. Costs nothing without stops.

        >>> matcher = StopMatcher(["beta gamma"])
        >>> matcher.feed("alpha be"), matcher.feed("ta gamma delta")
        (('alpha ', None), ('', 'beta gamma'))
    """

    def __init__(self, stops: Sequence[str]) -> None:
        wanted = sorted({stop for stop in stops if stop}, key=len)
        self._any = re.compile("|".join(map(re.escape, wanted))) if wanted else None
        self._longest = len(wanted[-1]) if wanted else 0
        self._beginnings = {stop[:i] for stop in wanted for i in range(1, len(stop))}
        self._held = ""

    def feed(self, text: str) -> tuple[str, str | None]:
        """The text that certainly comes before any stop, and the stop string once it is certain.

        After a stop nothing more is to be fed: the rest of the text is dropped.
        """
        if self._any is None:
            return text, None
        text = self._held + text
        hold = self._unfinished(text)
        match = self._any.search(text)
        if match and match.start() <= hold:
            self._held = ""
            return text[: match.start()], match.group()
        self._held = text[hold:]
        return text[:hold], None

    def flush(self) -> tuple[str, str | None]:
        """What was held back, at the end of the text; a stop may lie in it."""
        held, self._held = self._held, ""
        match = self._any.search(held) if self._any else None
        return (held[: match.start()], match.group()) if match else (held, None)

    def _unfinished(self, text: str) -> int:
        """Where the longest unfinished stop at the end of `text` starts; its length if there is none."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[start:] in self._beginnings:
                return start
        return len(text)
