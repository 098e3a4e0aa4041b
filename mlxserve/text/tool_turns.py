"""Tools, calls and results in messages, made into what a given chat template prints rightly.

Knows: the shapes that chat APIs give them, and an `Abilities`. Knows nothing of Jinja, tokens or other turns.
What a template cannot print is written as text, so that every model that chats can be given tools.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from mlxserve.errors import UsageError
from mlxserve.text.abilities import Abilities, IdForm

Message = dict[str, Any]

GENERIC_TOOLS = (
    "You can call these functions, given as JSON schemas:\n{definitions}\n\n"
    "To call one, write its name and arguments as JSON between tags, once for each call:\n"
    '<tool_call>\n{{"name": "function_name", "arguments": {{"argument": "value"}}}}\n</tool_call>\n'
    "The results come back between <tool_response> tags."
)


def check_tools(tools: Any) -> list[dict[str, Any]] | None:
    """The tools as a list of `{"type": "function", "function": {"name": …}}`; None where there are none."""
    if tools is None or (isinstance(tools, Sequence) and not tools):
        return None
    if isinstance(tools, str | Mapping) or not isinstance(tools, Sequence):
        raise UsageError("tools must be a list of tool definitions.", param="tools")
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise UsageError(f"tools[{i}] needs a function with a name.", param=f"tools[{i}].function.name")
        if not isinstance(function.get("parameters"), Mapping | None):
            where = f"tools[{i}].function.parameters"
            raise UsageError(f"{where} must be a JSON schema.", param=where)
    return [dict(tool) for tool in tools]


def generic_tools(tools: Sequence[Mapping[str, Any]]) -> str:
    """Definitions in words, for a template that prints none."""
    definitions = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    return GENERIC_TOOLS.format(definitions=definitions)


def check_calls(where: str, calls: Any) -> list[dict[str, Any]]:
    """An assistant's calls as `{"id"?, "type", "function": {"name", "arguments"}}`.

    Raises UsageError, naming the field, for what is none.
    """
    if isinstance(calls, str | Mapping) or not isinstance(calls, Sequence):
        raise UsageError(f"{where} must be a list.", param=where)
    return [_checked_call(f"{where}[{i}]", call) for i, call in enumerate(calls)]


def _checked_call(where: str, call: Any) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise UsageError(f"{where} needs a function with a name.", param=f"{where}.function.name")
    arguments = function.get("arguments")
    if not isinstance(arguments, str | Mapping | None):
        raise UsageError(f"{where}.function.arguments must be JSON.", param=f"{where}.function.arguments")
    made = {"type": "function", "function": {"name": function["name"], "arguments": arguments or {}}}
    return {"id": str(call["id"]), **made} if call.get("id") else made


def suit_tool_turns(messages: Sequence[Message], abilities: Abilities) -> list[Message]:
    """Calls and results as the template prints them, as text where it does not."""
    made = _with_ids(messages, abilities.ids)
    if abilities.calls:
        made = [_with_arguments(message, abilities) for message in made]
    else:
        made = [_call_as_text(message, abilities) for message in made]
    if not abilities.results:
        return _results_as_text(made, abilities)
    return _with_names(made) if abilities.result_names else made


def _with_ids(messages: Sequence[Message], form: IdForm) -> list[Message]:
    """Ids in the form that the template wants, the same for a call and its result."""
    if form == "any":
        return list(messages)
    known: dict[str, str] = {}
    made = []
    for message in messages:
        changed = dict(message)
        if "tool_calls" in message:
            changed["tool_calls"] = [_with_id(call, form, known) for call in message["tool_calls"]]
        if message.get("tool_call_id"):
            own = str(message["tool_call_id"])
            changed["tool_call_id"] = known.get(own, _short(own) if form == "nine" else own)
        made.append(changed)
    return made


def _with_id(call: dict[str, Any], form: IdForm, known: dict[str, str]) -> dict[str, Any]:
    name = call["function"]["name"]
    own = call.get("id", f"{name}{len(known)}")
    new = _short(own) if form == "nine" else f"functions.{name}:{len(known)}"
    known[own] = own if form == "function" and re.fullmatch(r"functions\..+:\d+", own) else new
    return {**call, "id": known[own]}


def _short(call_id: str) -> str:
    if re.fullmatch(r"[A-Za-z0-9]{9}", call_id):
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:9]


def _with_names(messages: Sequence[Message]) -> list[Message]:
    """Results that name their function: by the call's id, else the last one called."""
    names: dict[str, str] = {}
    last = ""
    made = []
    for message in messages:
        for call in message.get("tool_calls", ()):
            last = names[call.get("id", "")] = call["function"]["name"]
        if message["role"] == "tool":
            message = {"name": names.get(message.get("tool_call_id", ""), last), **message}
        made.append(message)
    return made


def _with_arguments(message: Message, abilities: Abilities) -> Message:
    if "tool_calls" not in message:
        return message
    shaped = arguments_object if abilities.arguments == "object" else _arguments_string
    calls = [
        {**call, "function": {**call["function"], "arguments": shaped(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def arguments_object(arguments: str | Mapping[str, Any]) -> dict[str, Any]:
    """Arguments as an object; text that is none is kept under the key `raw`."""
    if not isinstance(arguments, str):
        return dict(arguments)
    try:
        value = json.loads(arguments) if arguments.strip() else {}
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"raw": arguments}


def _arguments_string(arguments: str | Mapping[str, Any]) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _call_as_text(message: Message, abilities: Abilities) -> Message:
    if "tool_calls" not in message:
        return message
    calls = [
        {"name": call["function"]["name"], "arguments": arguments_object(call["function"]["arguments"])}
        for call in message["tool_calls"]
    ]
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    if "call" in abilities.roles:
        return {**rest, "role": abilities.roles["call"], "content": json.dumps(calls, ensure_ascii=False)}
    tagged = "\n".join(f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>" for call in calls)
    return {**rest, "content": "\n".join(filter(None, [message["content"], tagged]))}


def _results_as_text(messages: Sequence[Message], abilities: Abilities) -> list[Message]:
    """Results as turns of the user, those of one step in one turn, or under the role the template wants.

    Where roles must alternate, what the user says next goes on in the same turn.
    """
    own_role = abilities.roles.get("tool")
    made: list[Message] = []
    after_result = False
    for message in messages:
        is_result = message["role"] == "tool"
        text = message["content"]
        if is_result and own_role is not None:
            made.append({**message, "role": own_role})
        elif is_result:
            text = f"<tool_response>\n{text}\n</tool_response>"
            if after_result:
                made[-1] = {**made[-1], "content": f"{made[-1]['content']}\n{text}"}
            else:
                made.append({"role": "user", "content": text})
        elif after_result and own_role is None and abilities.alternates and message["role"] == "user":
            made[-1] = {**made[-1], "content": f"{made[-1]['content']}\n\n{text}"}
        else:
            made.append(message)
        after_result = is_result
    return made
