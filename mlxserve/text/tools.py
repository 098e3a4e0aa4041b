"""What stands between the markers of tool calls, read into names and JSON arguments.

Knows: the payloads of the dialects in text/formats.py. Knows nothing of streams. What a model writes is never
trusted to be well-formed: a call that cannot be read is handed back as the text it was, its siblings live on.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlxserve.errors import DependencyMissing
from mlxserve.text.events import Event, ToolArguments, ToolEnd, ToolStart
from mlxserve.text.formats import Dialect
from mlxserve.text.mlx_lm_parsers import parser


@dataclass(frozen=True, slots=True)
class Call:
    """One call. `arguments` is the text of a JSON object; `id` is the model's own, if it gives any."""

    name: str
    arguments: str
    id: str | None = None


def call_events(index: int, call: Call, new_id: Callable[[], str]) -> list[Event]:
    """A complete call as events, with a new id if it has none."""
    start = ToolStart(index, call.id or new_id(), call.name)
    return [start, ToolArguments(index, call.arguments), ToolEnd(index)]


class Malformed(ValueError):
    """A payload, or a part of one, that is no call; its text is the message."""


def read_calls(dialect: Dialect, payload: str, tools: Sequence[Mapping[str, Any]]) -> list[Call | str]:
    """The calls of one payload in order; in the place of an unreadable one, its text."""
    pieces = [payload]
    if dialect.each is not None:
        pieces = re.findall(dialect.each, payload, re.DOTALL) or [payload]
    found: list[Call | str] = []
    for piece in pieces:
        try:
            found += _READERS.get(dialect.payload, _with_mlx_lm)(dialect, piece, tools)
        except DependencyMissing:
            raise
        except Exception:  # parsers of free text stumble in many ways
            found.append(piece)
    return found


def call_of(name: str, arguments: str) -> Call:
    """A call from its name and the text of its arguments. Raises Malformed where that is no JSON object."""
    return _call({"name": name, "arguments": arguments})


def tool_names(tools: Sequence[Mapping[str, Any]]) -> Collection[str]:
    """The names of the functions that a request defines."""
    return {tool["function"]["name"] for tool in tools}


def _read_json(dialect: Dialect, payload: str, tools: Sequence[Mapping[str, Any]]) -> list[Call | str]:
    """Objects, in a list or in a row: `{"name": …, "arguments": {…}}` under any of the usual keys."""
    found: list[Call | str] = []
    try:
        for text in _objects(payload):
            found.append(_call_or_text(text))
    except Malformed as error:
        found.append(str(error))
    return found


def _call_or_text(text: str) -> Call | str:
    try:
        return _call(_loads(text))
    except Malformed:
        return text


def _read_pairs(dialect: Dialect, payload: str, tools: Sequence[Mapping[str, Any]]) -> list[Call | str]:
    """`[{"name of the function": {arguments}}]`, Apertus' way."""
    return [
        _call({"name": name, "arguments": arguments})
        for text in _objects(payload)
        for name, arguments in _loads(text).items()
    ]


_MISTRAL_CALL = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*(\w+)\s*)?(?:\[ARGS\])?\s*(?=\{)")


def _read_mistral(dialect: Dialect, payload: str, tools: Sequence[Mapping[str, Any]]) -> list[Call | str]:
    """A JSON list, or `name[ARGS]{arguments}`, also without the marker, with an id, or repeated."""
    if payload.lstrip()[:1] in ("[", "{"):
        return _read_json(dialect, payload, tools)
    found: list[Call | str] = []
    position = 0
    while position < len(payload.rstrip()):
        match = _MISTRAL_CALL.match(payload, position)
        if match is None:
            raise Malformed(payload)
        arguments = _object_at(payload, match.end())
        position = match.end() + len(arguments)
        call = _call({"name": match[1], "arguments": _loads(arguments), "id": match[2]})
        found.append(call)
    return found


_DEEPSEEK_CALL = re.compile(
    r"<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?\s*([^\s<]+)\s*(?:<｜tool▁sep｜>)?\s*"
    r"(?:```json\s*)?(\{.*\})\s*(?:```)?\s*<｜tool▁call▁end｜>",
    re.DOTALL,
)


def _read_deepseek(dialect: Dialect, payload: str, tools: Sequence[Mapping[str, Any]]) -> list[Call | str]:
    """V3 and R1 write the arguments as a fenced block of JSON, V3.1 plainly."""
    match = _DEEPSEEK_CALL.fullmatch(payload.strip())
    if match is None:
        raise Malformed(payload)
    return [_call({"name": match[1], "arguments": _loads(match[2])})]


_DSML_PARAMETER = re.compile(
    r'<｜DSML｜parameter name="([^"]+)"(?: string="(true|false)")?>(.*?)</｜DSML｜parameter>', re.DOTALL
)


def _read_dsml(dialect: Dialect, payload: str, tools: Sequence[Mapping[str, Any]]) -> list[Call | str]:
    """DeepSeek V3.2 and V4: a parameter is text, or JSON where it says `string="false"`."""
    name = re.match(r'<｜DSML｜invoke name="([^"]+)">', payload)
    if name is None:
        raise Malformed(payload)
    arguments = {
        key: _loads(value) if kind == "false" else value
        for key, kind, value in _DSML_PARAMETER.findall(payload)
    }
    return [_call({"name": name[1], "arguments": arguments})]


def _with_mlx_lm(dialect: Dialect, payload: str, tools: Sequence[Mapping[str, Any]]) -> list[Call | str]:
    """Any other dialect. GLM's parser takes any text for a call, so only known names count there."""
    parsed = parser(dialect.payload)(payload.strip(), list(tools))
    calls = [_call(call) for call in (parsed if isinstance(parsed, list) else [parsed])]
    if dialect.payload == "glm47" and not {call.name for call in calls} <= set(tool_names(tools)):
        raise Malformed(payload)
    return list(calls)


_READERS = {
    "json": _read_json,
    "pairs": _read_pairs,
    "mistral": _read_mistral,
    "deepseek": _read_deepseek,
    "dsml": _read_dsml,
}


def _call(value: Any) -> Call:
    """A parsed object as a call. Raises Malformed where it has no name or its arguments are no object."""
    if isinstance(value, Mapping) and isinstance(value.get("function"), Mapping):
        value = {**value["function"], "id": value.get("id")}
    if not isinstance(value, Mapping):
        raise Malformed(str(value))
    name = next((value[key] for key in ("name", "function", "tool_name") if key in value), None)
    arguments: Any = next((value[key] for key in ("arguments", "parameters", "args") if key in value), {})
    if isinstance(arguments, str):
        arguments = _loads(arguments) if arguments.strip() else {}
    if not isinstance(name, str) or not name or not isinstance(arguments, Mapping | None):
        raise Malformed(str(value))
    own_id = value.get("id")
    return Call(name, _dumped(arguments or {}), own_id if isinstance(own_id, str) and own_id else None)


def _dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, default=str)


_BAD_ESCAPE = re.compile(r'\\(\\|["/bfnrt]|u[0-9a-fA-F]{4})|\\')


def _loads(text: str) -> Any:
    """JSON as models write it: raw line breaks in strings, stray backslashes, Python's quotes."""
    for attempt in (text, _BAD_ESCAPE.sub(lambda m: m[0] if m[1] else r"\\", text)):
        try:
            return json.loads(attempt, strict=False)
        except ValueError:
            continue
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
        raise Malformed(text) from error


_BETWEEN = re.compile(r"[\s,;\[\]]*(?:```(?:json)?)?[\s,;\[\]}]*")


def _objects(text: str) -> Iterator[str]:
    """The texts of the objects in a list or a sequence. Raises Malformed for anything else between them."""
    position = _BETWEEN.match(text).end()  # type: ignore[union-attr]
    if position == len(text):
        raise Malformed(text)
    while position < len(text):
        found = _object_at(text, position)
        yield found
        position = _BETWEEN.match(text, position + len(found)).end()  # type: ignore[union-attr]


_STEP = re.compile(r'"(?:[^"\\]|\\.)*"?|[{}]|[^"{}]+', re.DOTALL)


def _object_at(text: str, start: int) -> str:
    """The object that starts at `start`, up to its closing brace. Raises Malformed if there is none."""
    depth = 0
    for step in _STEP.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(step.group(), 0)
        if depth == 0:
            if step.group() != "}":
                break
            return text[start : step.end()]
    raise Malformed(text[start:])
