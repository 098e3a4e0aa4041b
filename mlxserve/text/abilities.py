"""What a chat template can do, found by rendering small probes instead of guessing from its name.

Knows: which message shapes a template prints and which it drops or refuses. Knows nothing of real messages.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mlxserve.errors import MlxServeError
from mlxserve.text.template import ChatTemplate

_SYSTEM, _USER, _RESULT = "probe system text", "probe user text", "probe result text"
_NAME, _KEY, _VALUE = "probe_function", "probe_key", "probe value"
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "probe description",
        "parameters": {"type": "object", "properties": {_KEY: {"type": "string"}}, "required": [_KEY]},
    },
}


@dataclass(frozen=True, slots=True)
class Abilities:
    """One template's abilities.

    system: a leading system turn is printed. parts: content must be a list of parts. alternates: two user
    turns in a row are refused. tools: definitions are printed (`"argument"`), read from the system message
    (`"message"`), or not at all (None). tool_turns: calls and results are printed. arguments: the form in
    which calls' arguments are printed as JSON, not as Python. roles: names the template wants for the roles
    of tool turns. short_ids: tool call ids must be nine letters or digits.
    """

    system: bool
    parts: bool
    alternates: bool
    tools: Literal["argument", "message"] | None
    tool_turns: bool
    arguments: Literal["object", "string"]
    roles: Mapping[str, str]
    short_ids: bool


def probe(template: ChatTemplate) -> Abilities:
    """The abilities of `template`; some ten small renders."""
    parts = not _prints(template, [_turn("user", False)], _USER) and _prints(
        template, [_turn("user", True)], _USER
    )
    arguments = _arguments_form(template, parts)
    return Abilities(
        system=_prints(template, [_turn("system", parts), _turn("user", parts)], _SYSTEM),
        parts=parts,
        alternates=_refuses(template, [_turn("user", parts), _turn("user", parts)]),
        tools=_tools_way(template, parts),
        tool_turns=arguments is not None,
        arguments=arguments or "object",
        roles=_tool_roles(template.source),
        short_ids=bool(re.search(r"length\s*!=\s*9", template.source)),
    )


def _turn(role: str, parts: bool) -> dict[str, Any]:
    text = {"system": _SYSTEM, "tool": _RESULT}.get(role, _USER)
    return {"role": role, "content": [{"type": "text", "text": text}] if parts else text}


def _rendered(template: ChatTemplate, messages: Sequence[Mapping[str, Any]], **options: Any) -> str | None:
    try:
        return template.render(messages, **options)
    except MlxServeError:
        return None


def _prints(template: ChatTemplate, messages: Sequence[Mapping[str, Any]], text: str, **options: Any) -> bool:
    return text in (_rendered(template, messages, **options) or "")


def _refuses(template: ChatTemplate, messages: Sequence[Mapping[str, Any]]) -> bool:
    return _rendered(template, messages) is None


def _tools_way(template: ChatTemplate, parts: bool) -> Literal["argument", "message"] | None:
    if _prints(template, [_turn("user", parts)], _NAME, tools=[_TOOL]):
        return "argument"
    with_tools = {**_turn("system", parts), "tools": str(_TOOL)}
    return "message" if _prints(template, [with_tools, _turn("user", parts)], _NAME) else None


def _arguments_form(template: ChatTemplate, parts: bool) -> Literal["object", "string"] | None:
    """The form of arguments that comes out well; None where calls or results are not printed at all."""
    forms: list[tuple[Literal["object", "string"], Any, Callable[[str], bool]]] = [
        ("object", {_KEY: _VALUE}, lambda out: f"{{'{_KEY}'" not in out),
        ("string", f'{{"{_KEY}": "{_VALUE}"}}', lambda out: f'\\"{_KEY}' not in out),
    ]
    for form, arguments, well in forms:
        call = {"id": "probe0001", "type": "function", "function": {"name": _NAME, "arguments": arguments}}
        result = {**_turn("tool", parts), "tool_call_id": "probe0001", "name": _NAME}
        messages = [
            _turn("user", parts),
            {"role": "assistant", "content": [] if parts else "", "tool_calls": [call]},
            result,
        ]
        out = _rendered(template, messages, tools=[_TOOL])
        if out and well(out) and all(text in out for text in (_KEY, _VALUE, _RESULT)):
            return form
    return None


def _tool_roles(source: str) -> dict[str, str]:
    """Granite 3.0 names the turns itself: calls are text of a role of their own."""
    if "'assistant_tool_call'" in source and "'tool_response'" in source:
        return {"call": "assistant_tool_call", "tool": "tool_response"}
    return {}
