"""Keeps text that people wrote from becoming control tokens in a rendered chat.

Knows: the texts of all added tokens, and where in a render a person's text may spell one. Knows nothing of
templates or of how ids are made.

How: before rendering, each place in a person's strings that holds an added token, or could complete one
across the string's edge, is enclosed in two marks: private-use characters that none of the strings holds.
They survive what templates do to text (trimming, slicing, JSON, joining, changing case). After rendering the
marks are taken out again and tell which characters may be no control token. Where no string holds such a
place, nothing is marked.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

Span = tuple[int, int]  # half-open, in characters
_PRIVATE_USE = range(0xF0000, 0xFFFFE)
# A private-use character, also as JSON or Python write it where they keep to ASCII.
_MARK = re.compile(r"[\U000F0000-\U000FFFFD]|\\ud[b][89a-f][0-9a-f]\\ud[c-f][0-9a-f]{2}|\\U000f[0-9a-f]{4}")


class Marks:
    """The marks of one render, a character each, in pairs that are used in turn.

    A template may cut a text between two marks; by its turn a lone mark does not take another's partner.
    Equal texts are marked alike, since templates compare them (a result's id with its call's).
    """

    def __init__(self, characters: Sequence[str]) -> None:
        self._pairs = list(zip(characters[::2], characters[1::2]))
        self._used = 0
        self._enclosed: dict[str, str] = {}
        self.meaning = {
            mark: (number, closes)
            for number, pair in enumerate(self._pairs)
            for closes, mark in enumerate(pair)
        }

    @classmethod
    def absent_from(cls, *values: Any, pairs: int = 256) -> Marks:
        """Marks that stand in no string of `values`."""
        used = set().union(*(set(text) for value in values for text in _strings(value)))
        return cls(list(islice((char for char in map(chr, _PRIVATE_USE) if char not in used), 2 * pairs)))

    def enclose(self, text: str, spans: Sequence[Span]) -> str:
        """`text` with a pair of marks around each span."""
        if not spans:
            return text
        if text not in self._enclosed:
            pieces, done = [], 0
            for start, end in spans:
                opening, closing = self._pairs[self._used % len(self._pairs)]
                pieces += [text[done:start], opening, text[start:end], closing]
                self._used, done = self._used + 1, end
            self._enclosed[text] = "".join([*pieces, text[done:]])
        return self._enclosed[text]


def _strings(value: Any) -> Iterator[str]:
    """All strings in lists and objects, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in (*value.keys(), *value.values()):
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)


class ControlText:
    """Finds added tokens' texts in strings. `tokens` that are only white space are ordinary text to it.

    `normalize` is what the tokenizer does to text before it looks for added tokens, where it does so.
    """

    def __init__(self, tokens: Collection[str], normalize: Callable[[str], str] | None = None) -> None:
        self.tokens = frozenset(token for token in tokens if token.strip())
        self._normalize = normalize
        self._lengths = sorted({len(token) for token in self.tokens}, reverse=True)
        starts = {token[:3] for token in self.tokens}
        self._start = re.compile("|".join(map(re.escape, sorted(starts, key=len, reverse=True))) or "(?!)")
        self._heads = {token[:i] for token in self.tokens for i in range(1, len(token))}
        self._tails = {token[i:] for token in self.tokens for i in range(1, len(token))}

    def spans(self, text: str) -> list[Span]:
        """Where `text` spells added tokens, or begins or ends with a part of one; in order, merged."""
        found = self._inside(text)
        if not found and self._normalize is not None and self._inside(self._normalize(text)):
            return [(0, len(text))]
        return _merged(found + self._edges(text))

    def _inside(self, text: str) -> list[Span]:
        found = []
        match = self._start.search(text)
        while match:
            start = match.start()
            for length in self._lengths:
                if text[start : start + length] in self.tokens:
                    found.append((start, start + length))
                    break
            match = self._start.search(text, start + 1)
        return found

    def _edges(self, text: str) -> list[Span]:
        """Parts of tokens at the ends, looking past white space, which templates trim."""
        left, right = len(text) - len(text.lstrip()), len(text.rstrip())
        found = []
        for length in range(min(self._lengths[0] if self._lengths else 0, right - left), 0, -1):
            if text[left : left + length] in self._tails:
                found.append((left, left + length))
                break
        for length in range(min(self._lengths[0] if self._lengths else 0, right - left), 0, -1):
            if text[right - length : right] in self._heads:
                found.append((right - length, right))
                break
        return found

    def mark(self, value: Any, marks: Marks) -> Any:
        """`value` (strings, lists and objects of them) with marks around every span, also in keys."""
        if isinstance(value, str):
            return marks.enclose(value, self.spans(value))
        if isinstance(value, Mapping):
            return {self.mark(key, marks): self.mark(item, marks) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.mark(item, marks) for item in value]
        return value


def _merged(spans: list[Span]) -> list[Span]:
    merged: list[Span] = []
    for start, end in sorted(spans):
        # Neighbours stay apart: a template that splits text at one token must not uncover the next.
        if merged and start < merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


class Protected:
    """The spans of a text in which no control token may lie, in order and apart.

    An empty span is a place that no control token may lie across.
    """

    def __init__(self, spans: Sequence[Span]) -> None:
        self.spans = list(spans)
        self._ends = [end for _, end in self.spans]

    def touches(self, start: int, end: int) -> bool:
        """True if the characters from `start` to `end` hold any of a span, or lie across an empty one."""
        first = bisect_right(self._ends, start)
        return first < len(self.spans) and self.spans[first][0] < end


def unmark(rendered: str, marks: Marks) -> tuple[str, Protected]:
    """The render without marks, and the spans of it that they enclosed.

    A mark whose partner was cut away leaves an empty span.
    """
    pieces: list[str] = []
    spans: list[Span] = []
    length, done = 0, 0  # of the text without marks, of the rendered
    opened: tuple[int, int] | None = None  # number of the pair, where it opened
    for match in _MARK.finditer(rendered):
        meaning = marks.meaning.get(_character(match.group()))
        if meaning is None:
            continue
        pieces.append(rendered[done : match.start()])
        length += match.start() - done
        done = match.end()
        number, closes = meaning
        if closes and opened is not None and opened[0] == number:
            spans.append((opened[1], length))
            opened = None
            continue
        spans += [] if opened is None else [(opened[1], opened[1])]
        spans += [(length, length)] if closes else []
        opened = None if closes else (number, length)
    spans += [] if opened is None else [(opened[1], opened[1])]
    return "".join([*pieces, rendered[done:]]), Protected(spans)


def _character(written: str) -> str:
    """A mark as it is, from how it was written."""
    if len(written) == 1:
        return written
    if written.startswith("\\U"):
        return chr(int(written[2:], 16))
    units = bytes.fromhex(written[2:6] + written[8:12])
    return units.decode("utf-16-be")
