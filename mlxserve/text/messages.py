"""Messages as clients send them, made into messages that a given chat template prints rightly.

Knows: the union types and nullable fields of chat APIs, and an `Abilities`. Knows nothing of Jinja or tokens.

Rules, in this order:
1. Content parts are joined in order by PART_JOINER; null and an empty list are the empty text.
2. All system and developer turns become one leading system turn, joined by TURN_JOINER; where the template
   has none, it opens the first user turn. User turns that only a folded turn kept apart are joined where the
   template wants roles to alternate.
3. Arguments of tool calls take the form that the template prints (object or string). A string that is no JSON
   object becomes `{"raw": string}` where an object is needed.
4. Where the template knows no tools, definitions, calls and results are written as text.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from mlxserve.errors import Unsupported, UsageError
from mlxserve.text.abilities import Abilities

PART_JOINER = "\n"
TURN_JOINER = "\n\n"
SYSTEM_ROLES = ("system", "developer")
ROLES = (*SYSTEM_ROLES, "user", "assistant", "tool", "function")
GENERIC_TOOLS = (
    "You can call these functions, given as JSON schemas:\n{definitions}\n\n"
    "To call one, write its name and arguments as JSON between tags, once for each call:\n"
    '<tool_call>\n{{"name": "function_name", "arguments": {{"argument": "value"}}}}\n</tool_call>\n'
    "The results come back between <tool_response> tags."
)
_TEXT_KEYS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}

Message = dict[str, Any]


def suit(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    abilities: Abilities,
    template_source: str,
) -> tuple[list[Message], list[dict[str, Any]] | None]:
    """Messages and tools as the template wants them; the input is not changed.

    An empty `tools` is the same as none. Raises UsageError, naming the field, for what is no message, and
    Unsupported for content that is not text.
    """
    checked_tools = check_tools(tools)
    made = [_plain(i, message, template_source) for i, message in enumerate(_checked_list(messages))]
    made = [_with_reasoning(message, template_source) for message in made]
    made = fold_system(made, abilities.alternates)
    if checked_tools and abilities.tools == "message":
        _lead(made)["tools"] = json.dumps(checked_tools, ensure_ascii=False)
    if checked_tools and abilities.tools is None:
        _describe_tools(made, checked_tools)
    if abilities.tool_turns:
        made = [_with_calls(message, abilities) for message in made]
    else:
        made = _tools_as_text(made, abilities)
    if not abilities.system:
        made = _system_into_user(made)
    if abilities.parts:
        made = [_as_parts(message) for message in made]
    return made, checked_tools if abilities.tools == "argument" else None


def _checked_list(messages: Any) -> Sequence[Mapping[str, Any]]:
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise UsageError("messages must be a list of messages.", param="messages")
    if not messages:
        raise UsageError("messages must hold at least one message.", param="messages")
    return messages


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
    return [dict(tool) for tool in tools]


def _plain(index: int, message: Any, template_source: str) -> Message:
    """One message with a known role, text as content, and no field that is null or an empty list of calls."""
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise UsageError(f"{where} must be an object with role and content.", param=where)
    made = {key: value for key, value in message.items() if value is not None}
    made["role"] = _role(where, message.get("role"), template_source)
    made["content"] = content_text(message.get("content"), f"{where}.content")
    if made["role"] == "assistant" and not made.get("tool_calls") and made.get("function_call"):
        made["tool_calls"] = [{"function": made["function_call"]}]
    made.pop("function_call", None)
    calls = made.pop("tool_calls", None)
    if calls:
        made["tool_calls"] = _checked_calls(f"{where}.tool_calls", calls)
    return made


def _role(where: str, role: Any, template_source: str) -> str:
    """The role, if it is usual or the template names it; anything else could spell a control token."""
    named = isinstance(role, str) and re.fullmatch(r"\w+", role) is not None
    if not named or not (role in ROLES or re.search(rf"['\"]{role}['\"]", template_source)):
        raise UsageError(
            f"{where}.role must be one of {', '.join(ROLES)}, not {role!r}.", param=f"{where}.role"
        )
    return "tool" if role == "function" else str(role)


def content_text(content: Any, where: str) -> str:
    """A content field as text: a string, null, or a list of text parts joined by PART_JOINER.

    Raises Unsupported, naming the part, for an image, audio or file; UsageError for anything else.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, Sequence):
        raise UsageError(f"{where} must be text or a list of parts.", param=where)
    return PART_JOINER.join(_part_text(part, f"{where}[{i}]") for i, part in enumerate(content))


def _part_text(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(kind, str):
        raise UsageError(f"{where} must be an object with a type.", param=where)
    if kind not in _TEXT_KEYS:
        raise Unsupported(f"{where} is of type {kind!r}, but this model reads text only.", param=where)
    text = part.get(_TEXT_KEYS[kind])
    if not isinstance(text, str):
        raise UsageError(f"{where}.{_TEXT_KEYS[kind]} must be text.", param=f"{where}.{_TEXT_KEYS[kind]}")
    return text


def _checked_calls(where: str, calls: Any) -> list[dict[str, Any]]:
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


def _with_reasoning(message: Message, template_source: str) -> Message:
    """Reasoning under the names that templates read, also where a client sends it inside the content."""
    reasoning = next(
        (message[key] for key in ("reasoning_content", "reasoning", "thinking") if message.get(key)), None
    )
    content = message["content"]
    if message["role"] == "assistant" and "</think>" in content and "</think>" in template_source:
        inside, _, _ = content.partition("</think>")
        reasoning = reasoning or inside.rpartition("<think>")[2].strip("\n")
        content = content.rpartition("</think>")[2]
        if "reasoning_content" in template_source:
            content = content.lstrip("\n")
    if not isinstance(reasoning, str):
        return message
    return {**message, "content": content, "reasoning_content": reasoning, "thinking": reasoning}


def fold_system(messages: Sequence[Message], alternates: bool) -> list[Message]:
    """All system and developer turns as one leading system turn, the others in their order."""
    texts: list[str] = []
    kept: list[Message] = []
    folded = False
    for message in messages:
        if message["role"] in SYSTEM_ROLES:
            texts.append(message["content"])
            folded = True
        elif folded and alternates and kept and kept[-1]["role"] == message["role"] == "user":
            kept[-1] = _joined(kept[-1], message["content"])
            folded = False
        else:
            kept.append(message)
            folded = False
    return [{"role": "system", "content": _join_texts(texts)}, *kept] if texts else kept


def _join_texts(texts: Sequence[str]) -> str:
    return TURN_JOINER.join(text for text in texts if text)


def _joined(message: Message, text: str) -> Message:
    return {**message, "content": _join_texts([message["content"], text])}


def _lead(messages: list[Message]) -> Message:
    """The leading system message, made if there is none."""
    if not messages or messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": ""})
    return messages[0]


def _describe_tools(messages: list[Message], tools: Sequence[Mapping[str, Any]]) -> None:
    definitions = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    lead = _lead(messages)
    messages[0] = _joined(lead, GENERIC_TOOLS.format(definitions=definitions))


def _with_calls(message: Message, abilities: Abilities) -> Message:
    """Calls with arguments in the template's form, and ids in its length."""
    made = dict(message)
    if "tool_calls" in made:
        made["tool_calls"] = [_call_for(call, abilities) for call in made["tool_calls"]]
    if abilities.short_ids and made.get("tool_call_id"):
        made["tool_call_id"] = _short_id(str(made["tool_call_id"]))
    return made


def _call_for(call: dict[str, Any], abilities: Abilities) -> dict[str, Any]:
    given = call["function"]["arguments"]
    arguments = arguments_object(given) if abilities.arguments == "object" else _arguments_string(given)
    made = {**call, "function": {**call["function"], "arguments": arguments}}
    if abilities.short_ids:
        made["id"] = _short_id(call.get("id", call["function"]["name"]))
    return made


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


def _short_id(call_id: str) -> str:
    if re.fullmatch(r"[A-Za-z0-9]{9}", call_id):
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:9]


def _tools_as_text(messages: Sequence[Message], abilities: Abilities) -> list[Message]:
    """Calls and results written out; the results of one turn stand in one turn."""
    made: list[Message] = []
    after_result = False
    for message in messages:
        if message["role"] == "tool" and "tool" not in abilities.roles:
            text = f"<tool_response>\n{message['content']}\n</tool_response>"
            if after_result:
                made[-1] = {**made[-1], "content": f"{made[-1]['content']}\n{text}"}
            else:
                made.append({"role": "user", "content": text})
        elif after_result and abilities.alternates and message["role"] == "user":
            made[-1] = _joined(made[-1], message["content"])
        else:
            made.append(_call_as_text(message, abilities))
        after_result = message["role"] == "tool"
    return made


def _call_as_text(message: Message, abilities: Abilities) -> Message:
    role = abilities.roles.get(message["role"], message["role"])
    if "tool_calls" not in message:
        return {**message, "role": role}
    calls = [
        {"name": call["function"]["name"], "arguments": arguments_object(call["function"]["arguments"])}
        for call in message["tool_calls"]
    ]
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    if "call" in abilities.roles:
        return {**rest, "role": abilities.roles["call"], "content": json.dumps(calls, ensure_ascii=False)}
    tagged = "\n".join(f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>" for call in calls)
    return {**rest, "role": role, "content": "\n".join(filter(None, [message["content"], tagged]))}


def _system_into_user(messages: Sequence[Message]) -> list[Message]:
    if not messages or messages[0]["role"] != "system":
        return list(messages)
    system, *rest = messages
    for i, message in enumerate(rest):
        if message["role"] == "user":
            text = _join_texts([system["content"], message["content"]])
            return [*rest[:i], {**message, "content": text}, *rest[i + 1 :]]
    return [{"role": "user", "content": system["content"]}, *rest]


def _as_parts(message: Message) -> Message:
    return {**message, "content": [{"type": "text", "text": message["content"]}]}
