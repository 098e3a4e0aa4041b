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

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Span = tuple[int, int]  # half-open, in characters
_PRIVATE_USE = range(0xF0000, 0xFFFFE)


@dataclass(frozen=True, slots=True)
class Marks:
    """The two marks of one render, a character each."""

    open: str
    close: str

    @classmethod
    def absent_from(cls, *values: Any) -> Marks:
        """The first two private-use characters that stand in no string of `values`."""
        used = set().union(*(set(text) for value in values for text in _strings(value)))
        free = (char for char in map(chr, _PRIVATE_USE) if char not in used)
        return cls(next(free), next(free))

    def pattern(self) -> re.Pattern[str]:
        """Either mark, also as JSON and Python write it where they keep to ASCII."""
        return re.compile(
            "|".join(f"({'|'.join(map(re.escape, _forms(mark)))})" for mark in (self.open, self.close))
        )


def _forms(mark: str) -> list[str]:
    return [mark, json.dumps(mark)[1:-1], ascii(mark)[1:-1]]


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
            return _enclosed(value, self.spans(value), marks)
        if isinstance(value, Mapping):
            return {self.mark(key, marks): self.mark(item, marks) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.mark(item, marks) for item in value]
        return value


def _merged(spans: list[Span]) -> list[Span]:
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _enclosed(text: str, spans: list[Span], marks: Marks) -> str:
    pieces, done = [], 0
    for start, end in spans:
        pieces += [text[done:start], marks.open, text[start:end], marks.close]
        done = end
    return "".join([*pieces, text[done:]])


def unmark(rendered: str, marks: Marks) -> tuple[str, list[Span]]:
    """The render without marks, and the spans of it that they enclosed.

    A mark whose partner was cut away leaves an empty span: no control token may lie across that place.
    """
    pieces: list[str] = []
    spans: list[Span] = []
    length, done = 0, 0  # of the text without marks, of the rendered
    opened: int | None = None
    for mark in marks.pattern().finditer(rendered):
        pieces.append(rendered[done : mark.start()])
        length += mark.start() - done
        done = mark.end()
        if mark.lastindex == 1:
            spans += [] if opened is None else [(opened, opened)]
            opened = length
        else:
            spans.append((length if opened is None else opened, length))
            opened = None
    spans += [] if opened is None else [(opened, opened)]
    return "".join([*pieces, rendered[done:]]), spans


def touches(spans: list[Span], start: int, end: int) -> bool:
    """True if the characters from `start` to `end` hold any of a span, or lie across an empty one.

    `spans` are in order and apart, as `unmark` gives them.
    """
    for first, last in spans:
        if first >= end:
            return False
        if last > start and (first < last or first > start):
            return True
    return False
