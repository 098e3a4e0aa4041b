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

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from json import dumps
from typing import Any

from mlxserve.errors import Unsupported, UsageError
from mlxserve.text.abilities import Abilities, full_tool
from mlxserve.text.tool_turns import (
    arguments_object,
    check_calls,
    check_tools,
    generic_tools,
    suit_tool_turns,
)

__all__ = ["Suited", "arguments_object", "check_tools", "content_text", "fold_system", "suit"]

Message = dict[str, Any]

PART_JOINER = "\n"
TURN_JOINER = "\n\n"
SYSTEM_ROLES = ("system", "developer")
ROLES = (*SYSTEM_ROLES, "user", "assistant", "tool", "function")
_TEXT_KEYS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


@dataclass(frozen=True, slots=True)
class Suited:
    """What to render: messages, the argument `tools`, and variables that the template reads tools from."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    variables: dict[str, Any] = field(default_factory=dict)


def suit(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    abilities: Abilities,
    template_source: str,
) -> Suited:
    """Messages and tools as the template wants them; the input is not changed.

    An empty `tools` is the same as none. Raises UsageError, naming the field, for what is no message, and
    Unsupported for content that is not text.
    """
    known = check_tools(plain_data(tools))
    if known and abilities.full_tools:
        known = [full_tool(tool) for tool in known]
    made = [_plain(i, message, template_source) for i, message in enumerate(_checked_list(messages))]
    made = [_with_reasoning(message, template_source) for message in made]
    made = fold_system(made, abilities.alternates)
    if known and abilities.tools == "message":
        made = [{**_lead(made), "tools": dumps(known, ensure_ascii=False)}, *_after_lead(made)]
    if known and abilities.tools is None:
        made = [_joined(_lead(made), generic_tools(known)), *_after_lead(made)]
    made = suit_tool_turns(made, abilities)
    if not abilities.system:
        made = _system_into_user(made)
    if abilities.parts:
        made = [_as_parts(message) for message in made]
    return Suited(
        made,
        known if abilities.tools == "argument" else None,
        {"xml_tools": known} if known and abilities.tools == "xml_tools" else {},
    )


def plain_data(value: Any) -> Any:
    """`value` in JSON's own types: a template gets no object whose methods could do anything."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain_data(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_data(item) for item in value]
    return str(value)


def _checked_list(messages: Any) -> Sequence[Mapping[str, Any]]:
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise UsageError("messages must be a list of messages.", param="messages")
    if not messages:
        raise UsageError("messages must hold at least one message.", param="messages")
    return messages


def _plain(index: int, message: Any, template_source: str) -> Message:
    """One message with a known role, text as content, and no field that is null or an empty list of calls."""
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise UsageError(f"{where} must be an object with role and content.", param=where)
    made = {str(key): plain_data(value) for key, value in message.items() if value is not None}
    made["role"] = _role(where, message.get("role"), template_source)
    made["content"] = content_text(message.get("content"), f"{where}.content")
    if made["role"] == "assistant" and not made.get("tool_calls") and made.get("function_call"):
        made["tool_calls"] = [{"function": made["function_call"]}]
    made.pop("function_call", None)
    calls = made.pop("tool_calls", None)
    if calls:
        made["tool_calls"] = check_calls(f"{where}.tool_calls", calls)
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


def _lead(messages: Sequence[Message]) -> Message:
    """The leading system message, an empty one if there is none."""
    return messages[0] if messages and messages[0]["role"] == "system" else {"role": "system", "content": ""}


def _after_lead(messages: Sequence[Message]) -> Sequence[Message]:
    return messages[1:] if messages and messages[0]["role"] == "system" else messages


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
