"""Request bodies: from bytes to typed objects, or to one sentence that names the field.

Knows: JSON, types, ranges, and which fields an API documents but this server cannot honour.
Does not know what a field means.

An API describes a body as a class:

    class ChatBody(Body):
        model: str
        temperature: Temperature | None = None
        HARMLESS = {"metadata": "Kept by nobody."}             # accepted: changes no answer
        REFUSED = {"store": "Nothing is stored."}              # a 400, unless null or
        NEUTRAL = {"store": (False,)}                          # one of these: what happens anyway

Every other field is a 400, so nothing is silently ignored.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, TypeVar

import msgspec
from msgspec import Meta

from mlxserve.errors import Unsupported, UsageError

Temperature = Annotated[float, Meta(ge=0, le=5)]
TopP = Annotated[float, Meta(gt=0, le=1)]
TopK = Annotated[int, Meta(ge=0, le=2**31 - 1)]
MinP = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Repetition = Annotated[float, Meta(gt=0, le=10)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Choices = Annotated[int, Meta(ge=1, le=128)]
TopLogprobs = Annotated[int, Meta(ge=0, le=20)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
StopString = Annotated[str, Meta(min_length=1)]
Name = Annotated[str, Meta(min_length=1, max_length=256)]
Stop = StopString | list[StopString]


class Part(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """An object inside a body; unknown fields are refused there too."""


class Body(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A whole request body."""

    HARMLESS: ClassVar[Mapping[str, str]] = {}
    REFUSED: ClassVar[Mapping[str, str]] = {}
    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {}


T = TypeVar("T", bound=msgspec.Struct)
B = TypeVar("B", bound=Body)


def read(body: bytes, kind: type[B]) -> B:
    """The body as `kind`. Raises UsageError or Unsupported that name the field."""
    return convert(parse_object(body), kind)


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object in `body`. Raises UsageError where it is none."""
    try:
        raw = msgspec.json.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise UsageError(f"The body is not valid JSON: {error}.", code="invalid_json") from None
    if not isinstance(raw, dict):
        raise UsageError("The body must be a JSON object.", code="invalid_json")
    return raw


def convert(raw: Mapping[str, Any], kind: type[B]) -> B:
    """A parsed object as `kind`; harmless fields are dropped, refused ones raise."""
    kept = {}
    for name, value in raw.items():
        if name in kind.HARMLESS:
            continue
        if name in kind.REFUSED:
            if value is not None and value not in kind.NEUTRAL.get(name, ()):
                raise Unsupported(f"'{name}' is not supported: {kind.REFUSED[name]}", param=name)
            continue
        kept[name] = value
    return part(kept, kind)


def part(raw: Any, kind: type[T], where: str = "") -> T:
    """Any parsed value as `kind`; `where` is put before the field's name in errors."""
    try:
        return msgspec.convert(raw, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise _named(str(error), where) from None
    except RecursionError:
        raise UsageError("The body is nested too deeply.", code="invalid_json") from None


_PATH = re.compile(r"^(?P<what>.*?)(?: - at (?P<key>`key` in )?`(?P<path>[^`]*)`)?$", re.DOTALL)
_FIELD = re.compile(r"(?:unknown|required) field `(?P<name>[^`]*)`")


def _named(text: str, where: str) -> UsageError:
    """msgspec's message as a sentence about a field, spelt as in JavaScript: messages[0].role."""
    match = _PATH.match(text)
    assert match is not None  # the pattern matches every text
    what, path = match["what"], (match["path"] or "$")[1:].lstrip(".")
    path = ".".join(filter(None, (where, path))) if not path.startswith("[") else where + path
    field = _FIELD.search(what)
    if field is None:
        name = path or "body"
        return UsageError(f"{name}: {_plain(what)}.", param=name)
    name = ".".join(filter(None, (path, field["name"])))
    if "unknown" in what:
        return Unsupported(f"'{name}' is not a field this server knows.", param=name, code="unknown_field")
    return UsageError(f"'{name}' is required.", param=name, code="missing_field")


def _plain(what: str) -> str:
    return (what[:1].lower() + what[1:]).replace("`", "").replace("array", "list")


def require(condition: bool, message: str, param: str) -> None:
    """UsageError that names `param`, unless `condition`."""
    if not condition:
        raise UsageError(message, param=param)


def given(**values: Any) -> dict[str, Any]:
    """The keyword arguments that are not None: what the caller really said."""
    return {name: value for name, value in values.items() if value is not None}
