"""Text that people wrote, told from a template's own by its characters.

Knows: strings and what a template can do to them. Knows nothing of templates, messages or tokens.

Every character of a person's text is replaced by a stand-in: the code point as far up as planes 4 to 10, which
Unicode leaves empty. A template may cut, join, format or escape a text: a stand-in stays one or is dropped,
and none turns into a character of the template's own. So a finished render says of each character who wrote
it. That alone is what safety rests on.

`UserText` is for fidelity: a string of stand-ins that compares, searches, splits, trims and changes case as
the plain text would. An operation that it does not know sees stand-ins: its result may be odd, never unsafe.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from typing import Any, SupportsIndex

from jinja2.exceptions import SecurityError

_SHIFT = 0x40000  # planes 0 to 3 to planes 4 to 7
_HIGH, _HIGH_SHIFT = 0xE0000, -0x60000  # planes 14 to 16 to planes 8 to 10
_STAND_IN = re.compile(r"[\U00040000-\U000AFFFF]")
_RUN = re.compile(r"[\U00040000-\U000AFFFF]+")
_REPLACEMENT = 0xFFFD
# Stand-ins as JSON writes them where it keeps to ASCII.
_PAIR = re.compile(r"\\u(d8[c-f][0-9a-f]|d9[0-9a-f]{2}|da[0-7][0-9a-f])\\u(d[c-f][0-9a-f]{2})")


class _Table(dict[int, int]):
    """A table for str.translate that is filled as characters come."""

    def __init__(self, rule: Callable[[int], int]) -> None:
        self._rule = rule

    def __missing__(self, code: int) -> int:
        self[code] = made = self._rule(code)
        return made


def _stand_in(code: int) -> int:
    if code < _SHIFT:
        return code + _SHIFT
    # Of planes 4 to 13 Unicode has assigned nothing; a text that holds such is damaged.
    return code + _HIGH_SHIFT if code >= _HIGH else _REPLACEMENT + _SHIFT


def _original(code: int) -> int:
    if 2 * _SHIFT <= code < 0xB0000:
        return code - _HIGH_SHIFT
    return code - _SHIFT if _SHIFT <= code < 2 * _SHIFT else code


_TO_STAND_INS, _TO_ORIGINALS = _Table(_stand_in), _Table(_original)


def plain(text: str) -> str:
    """`text` with originals for stand-ins."""
    if isinstance(text, UserText):
        return text._plain
    return text if str.isascii(text) else text.translate(_TO_ORIGINALS)


def holds_user_text(text: str) -> bool:
    """True if any character of `text` is a stand-in."""
    return not str.isascii(text) and _STAND_IN.search(text) is not None


def user_runs(text: str) -> list[tuple[int, int]]:
    """Where a text's stand-ins are: half-open, in characters, in order and apart."""
    return [] if str.isascii(text) else [match.span() for match in _RUN.finditer(text)]


def from_user(value: Any) -> Any:
    """`value` (strings, lists and objects of them, keys too) as people's text; the input is not changed."""
    if isinstance(value, str):
        return value if isinstance(value, UserText) else UserText(value.translate(_TO_STAND_INS))
    if isinstance(value, Mapping):
        return {from_user(key): from_user(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([from_user(item) for item in value])
    return value


def without_stand_ins(value: Any) -> Any:
    """The reverse of `from_user`."""
    if isinstance(value, str):
        return plain(value)
    if isinstance(value, Mapping):
        return {without_stand_ins(key): without_stand_ins(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([without_stand_ins(item) for item in value])
    return value


def kept(value: Any) -> Any:
    """`value`, as UserText if it is a string that holds stand-ins: for results of Python's own functions."""
    if isinstance(value, str) and not isinstance(value, UserText) and holds_user_text(value):
        return UserText(str.__str__(value))
    return value


def to_json(value: Any, *, ensure_ascii: bool = False, sort_keys: bool = False, **options: Any) -> str:
    """`value` as json.dumps writes it; what it writes for a person's character is that person's text."""
    written = json.dumps(_json_ready(value, ensure_ascii, sort_keys), ensure_ascii=ensure_ascii, **options)
    return kept(_PAIR.sub(_joined_pair, written) if ensure_ascii else written)


def _json_ready(value: Any, ensure_ascii: bool, sort_keys: bool) -> Any:
    """`value` with people's characters escaped already: json.dumps takes stand-ins as they are."""
    if isinstance(value, str):
        return _escaped(value, ensure_ascii) if holds_user_text(value) else value
    if isinstance(value, dict):
        items = sorted(value.items()) if sort_keys else value.items()
        return {
            _json_ready(k, ensure_ascii, False): _json_ready(v, ensure_ascii, sort_keys) for k, v in items
        }
    if isinstance(value, list | tuple):
        return [_json_ready(item, ensure_ascii, sort_keys) for item in value]
    return value


def _escaped(text: str, ensure_ascii: bool) -> str:
    def escape(run: re.Match[str]) -> str:
        return json.dumps(plain(run.group()), ensure_ascii=ensure_ascii)[1:-1].translate(_TO_STAND_INS)

    return _RUN.sub(escape, str.__str__(text))


def _joined_pair(pair: re.Match[str]) -> str:
    return bytes.fromhex(pair[1] + pair[2]).decode("utf-16-be")


def _asked(name: str) -> Callable[..., Any]:
    """str's method `name` on the plain text: for answers that are no text."""
    method = getattr(str, name)

    @wraps(method)
    def ask(self: UserText, *args: Any) -> Any:
        return method(self._plain, *without_stand_ins(args))

    return ask


def _changed(name: str) -> Callable[..., UserText]:
    """str's method `name` on the plain text; who wrote each character stays, where the length does."""
    method = getattr(str, name)

    @wraps(method)
    def change(self: UserText, *args: Any) -> UserText:
        changed: str = method(self._plain, *without_stand_ins(args))
        if len(changed) != len(self):
            return from_user(changed)
        made = changed.translate(_TO_STAND_INS)
        if _RUN.fullmatch(str.__str__(self)):
            return UserText(made)
        return UserText(
            "".join(new if _STAND_IN.match(old) else c for old, new, c in zip(self, made, changed))
        )

    return change


class UserText(str):
    """A string of which some characters, mostly all, are stand-ins. Immutable, like any string.

    Equal to the plain text, and of its hash; its methods return UserText.
    """

    __slots__ = ("_original",)
    _original: str

    @property
    def _plain(self) -> str:
        try:
            return self._original
        except AttributeError:
            self._original = str.__str__(self).translate(_TO_ORIGINALS)
            return self._original

    def __str__(self) -> str:
        return self

    def __repr__(self) -> str:
        return from_user(repr(self._plain))

    def __hash__(self) -> int:
        return hash(self._plain)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and self._plain == plain(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __getitem__(self, key: SupportsIndex | slice) -> UserText:
        return UserText(super().__getitem__(key))

    def __iter__(self) -> Iterator[UserText]:
        return map(UserText, super().__iter__())

    def __contains__(self, item: object) -> bool:
        return plain(item) in self._plain if isinstance(item, str) else super().__contains__(item)  # type: ignore[operator]

    def __add__(self, other: str) -> UserText:
        return UserText(super().__add__(other))

    def __radd__(self, other: str) -> UserText:
        return UserText(other.__add__(str.__str__(self)))

    def strip(self, chars: str | None = None, /) -> UserText:
        return self.rstrip(chars).lstrip(chars)

    def lstrip(self, chars: str | None = None, /) -> UserText:
        return self[len(self) - len(self._plain.lstrip(without_stand_ins(chars))) :]

    def rstrip(self, chars: str | None = None, /) -> UserText:
        return self[: len(self._plain.rstrip(without_stand_ins(chars)))]

    def removeprefix(self, prefix: str, /) -> UserText:
        return self[len(prefix) :] if self.startswith(prefix) else self

    def removesuffix(self, suffix: str, /) -> UserText:
        return self[: len(self) - len(suffix)] if suffix and self.endswith(suffix) else self

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._cut(self._plain.split(without_stand_ins(sep), maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._cut(self._plain.rsplit(without_stand_ins(sep), maxsplit), sep)

    def splitlines(self, keepends: bool = False) -> list[str]:
        whole = self._cut(self._plain.splitlines(keepends=True), "")
        lengths = [len(line) for line in self._plain.splitlines(keepends)]
        return [line[:length] for line, length in zip(whole, lengths)]

    def partition(self, sep: str, /) -> tuple[str, str, str]:
        before, between, after = self._cut(list(self._plain.partition(plain(sep))), "")
        return before, between, after

    def rpartition(self, sep: str, /) -> tuple[str, str, str]:
        before, between, after = self._cut(list(self._plain.rpartition(plain(sep))), "")
        return before, between, after

    def _cut(self, pieces: list[str], gap: str | None) -> list[str]:
        """The parts of this text that `pieces` of the plain one are, `gap` (None: white space) between them."""
        made: list[str] = []
        start = 0
        for piece in pieces:
            if gap is None:
                start = self._plain.index(piece, start)
            made.append(self[start : start + len(piece)])
            start += len(piece) + len(gap or "")
        return made

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> UserText:
        if old:
            return UserText(str.__str__(new).join(self.split(old, count)))
        gaps = len(self) + 1 if count.__index__() < 0 else min(count.__index__(), len(self) + 1)
        opened = [str.__str__(new) + char for char in [*self, UserText()][:gaps]]
        return UserText("".join([*opened, *[*self, UserText()][gaps:]]))

    def encode(self, encoding: str = "utf-8", errors: str = "strict") -> bytes:
        raise SecurityError("it turns text into bytes, of which nobody could tell who wrote them")


_ANSWERS = (
    *("__lt__", "__le__", "__gt__", "__ge__", "startswith", "endswith", "find", "rfind", "index", "rindex"),
    *("count", "isalnum", "isalpha", "isascii", "isdecimal", "isdigit", "isidentifier", "islower"),
    *("isnumeric", "isprintable", "isspace", "istitle", "isupper"),
)
_CHANGES = ("upper", "lower", "title", "capitalize", "swapcase", "casefold", "zfill", "expandtabs")
for _name in _ANSWERS:
    setattr(UserText, _name, _asked(_name))
for _name in _CHANGES:
    setattr(UserText, _name, _changed(_name))
