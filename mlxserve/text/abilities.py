"""What a chat template can do, found by rendering small probes instead of guessing from its name.

Knows: which message shapes a template prints and which it drops or refuses. Knows nothing of real messages.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mlxserve.errors import MlxServeError
from mlxserve.text.template import ChatTemplate

ArgumentsForm = Literal["object", "string"]
ToolsPlace = Literal["argument", "message", "xml_tools"]
IdForm = Literal["any", "nine", "function"]

_SYSTEM, _USER, _RESULT = "probe system text", "probe user text", "probe result text"
_NAME, _KEY, _VALUE, _ID = "probe_function", "probe_key", "probe value", "probe0001"
_SHORT_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "parameters": {"type": "object", "properties": {_KEY: {"type": "string"}}},
    },
}


@dataclass(frozen=True, slots=True)
class Abilities:
    """One template's abilities.

    system: a leading system turn is printed. parts: content must be a list of parts. alternates: two user
    turns in a row are refused.

    tools: where definitions are read from: the argument `tools`, the system message, or a variable of
    another name; None where they are not printed at all. full_tools: only definitions with descriptions.

    calls, results: calls are printed, and their results. arguments: the form in which calls' arguments come
    out as JSON, not as Python. ids: what ids of calls must look like: anything, nine letters or digits, or
    the function's name and a number. result_names: results must name their function. roles: names that the
    template wants for the roles of such turns.
    """

    system: bool
    parts: bool
    alternates: bool
    tools: ToolsPlace | None
    full_tools: bool
    calls: bool
    results: bool
    arguments: ArgumentsForm
    ids: IdForm
    result_names: bool
    roles: Mapping[str, str]


def full_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool's definition with every description and the parameters' schema, empty where it had none."""
    function = {"description": "", **tool["function"]}
    schema = {"type": "object", "properties": {}, "required": [], **(function.get("parameters") or {})}
    schema["properties"] = {
        name: {"description": "", **value} if isinstance(value, Mapping) else value
        for name, value in schema["properties"].items()
    }
    return {**tool, "function": {**function, "parameters": schema}}


def probe(template: ChatTemplate) -> Abilities:
    """The abilities of `template`; some ten small renders, 1 to 5 ms."""
    return _Probe(template).abilities()


class _Probe:
    """Renders of one template. A template that works only with tools is always given some."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._parts = False
        self._always: dict[str, Any] = {}
        if self._render([self._turn("user")]) is None:
            self._always = {"tools": [full_tool(_SHORT_TOOL)]}
        if not self._prints([self._turn("user")], _USER):
            self._parts = True
            self._parts = self._prints([self._turn("user")], _USER)

    def abilities(self) -> Abilities:
        user = self._turn("user")
        tools, full_tools = self._tools()
        calls, results, arguments, result_names = self._tool_turns()
        return Abilities(
            system=self._prints([self._turn("system"), user], _SYSTEM),
            parts=self._parts,
            alternates=self._render([user, user]) is None,
            tools=tools,
            full_tools=full_tools,
            calls=calls,
            results=results,
            arguments=arguments,
            ids=self._ids(arguments, result_names),
            result_names=result_names,
            roles=_tool_roles(self._template.source),
        )

    def _turn(self, role: str) -> dict[str, Any]:
        text = {"system": _SYSTEM, "tool": _RESULT}.get(role, _USER)
        return {"role": role, "content": [{"type": "text", "text": text}] if self._parts else text}

    def _render(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str | None:
        try:
            return self._template.render(messages, **{**self._always, **options})
        except MlxServeError:
            return None

    def _prints(self, messages: Sequence[Mapping[str, Any]], text: str, **options: Any) -> bool:
        return text in (self._render(messages, **options) or "")

    def _tools(self) -> tuple[ToolsPlace | None, bool]:
        """Where definitions are read from, and whether only full ones are printed."""
        user = self._turn("user")
        for full in (False, True):
            if self._prints([user], _NAME, tools=[full_tool(_SHORT_TOOL) if full else _SHORT_TOOL]):
                return "argument", full
        if self._prints([{**self._turn("system"), "tools": str([_SHORT_TOOL])}, user], _NAME):
            return "message", False
        if self._prints([user], _NAME, variables={"xml_tools": [_SHORT_TOOL]}):
            return "xml_tools", False
        return None, False

    def _tool_turns(self) -> tuple[bool, bool, ArgumentsForm, bool]:
        """What is printed of a call and its result, in the first form in which both are, else in the best."""
        best: tuple[bool, bool, ArgumentsForm, bool] = (False, False, "object", False)
        forms: tuple[ArgumentsForm, ...] = ("object", "string")
        for form in forms:
            for named in (False, True):
                out = self._render(self._called(form, named)) or ""
                python = f"{{'{_KEY}'" in out or f'\\"{_KEY}' in out
                found = (_KEY in out and _VALUE in out and not python, _RESULT in out, form, named)
                if sum(found[:2]) > sum(best[:2]):
                    best = found
        return best

    def _called(self, form: ArgumentsForm, named: bool) -> list[dict[str, Any]]:
        arguments = {_KEY: _VALUE} if form == "object" else f'{{"{_KEY}": "{_VALUE}"}}'
        call = {"id": _ID, "type": "function", "function": {"name": _NAME, "arguments": arguments}}
        result = {**self._turn("tool"), "tool_call_id": _ID, **({"name": _NAME} if named else {})}
        nothing: Any = [] if self._parts else ""
        asked = {"role": "assistant", "content": nothing, "tool_calls": [call]}
        return [self._turn("user"), asked, result]

    def _ids(self, form: ArgumentsForm, named: bool) -> IdForm:
        """Kimi prints a call's id for its name."""
        if re.search(r"length\s*!=\s*9", self._template.source):
            return "nine"
        out = self._render(self._called(form, named)[:2]) or ""
        return "function" if _ID in out and _NAME not in out else "any"


def _tool_roles(source: str) -> dict[str, str]:
    """Granite 3.0 names the turns itself: calls are text of a role of their own."""
    if "'assistant_tool_call'" in source and "'tool_response'" in source:
        return {"call": "assistant_tool_call", "tool": "tool_response"}
    return {}
