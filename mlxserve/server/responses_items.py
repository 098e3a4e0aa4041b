"""Items of the Responses API, and the messages that chat templates read.

Knows: message, function_call, function_call_output and reasoning items. Does not know templates or sampling.
"""

from __future__ import annotations

import base64
import binascii
import uuid
from collections.abc import Sequence
from typing import Any

from mlxserve.errors import Unsupported, UsageError
from mlxserve.server.constraints import Tools, choose_tools
from mlxserve.server.fields import part
from mlxserve.server.openai_types import (
    AllowedChoice,
    AllowedTools,
    ChatTool,
    FunctionName,
    FunctionSpec,
    NamedChoice,
)
from mlxserve.server.openai_types import AllowedTool as ChatAllowedTool
from mlxserve.server.openai_types import ToolChoice as ChatChoice
from mlxserve.server.responses_types import (
    CallItem,
    CallOutputItem,
    InputPart,
    InputText,
    Item,
    ItemBox,
    MessageItem,
    OneTool,
    OutputText,
    ReasoningItem,
    Refusal,
    ResponseBody,
    SomeTools,
)

Message = dict[str, Any]
_SEALED = "mlxserve-reasoning:"


def input_items(body: ResponseBody) -> list[dict[str, Any]]:
    """The input as items with ids. Raises UsageError that names the item."""
    if isinstance(body.input, str):
        if not body.input:
            raise UsageError("'input' is required.", param="input")
        return [_with_id({"type": "message", "role": "user", "content": body.input})]
    if not body.input:
        raise UsageError("input must hold at least one item.", param="input")
    return [_with_id(_checked(raw, f"input[{i}]")) for i, raw in enumerate(body.input)]


def _checked(raw: dict[str, Any], where: str) -> dict[str, Any]:
    if raw.get("type") is None and "role" in raw:
        raw = {**raw, "type": "message"}
    if raw.get("type") == "item_reference":
        raise Unsupported(f"{where}: send the item itself, or previous_response_id.", param=where)
    read_item(raw, where)
    return raw


def read_item(raw: dict[str, Any], where: str) -> Item:
    try:
        return part({"item": raw}, ItemBox).item
    except UsageError as error:
        error.message = error.message.replace("item", where, 1)
        error.param = (error.param or "").replace("item", where, 1) or where
        raise


def _with_id(item: dict[str, Any]) -> dict[str, Any]:
    prefix = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
    return {"id": new_id(prefix[item["type"]]), **{k: v for k, v in item.items() if k != "id" or v}}


def new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


def messages_of(items: Sequence[dict[str, Any]]) -> list[Message]:
    """Items as messages: reasoning and calls join the assistant's turn that they belong to."""
    made: list[Message] = []
    for i, raw in enumerate(items):
        where = f"input[{i}]"
        match read_item(raw, where):
            case MessageItem(role="assistant", content=content):
                _assistant(made, "content")["content"] = _text(content, where)
            case MessageItem(role=role, content=content):
                made.append({"role": role, "content": _text(content, where)})
            case CallItem(call_id=id_, name=name, arguments=arguments):
                function = {"name": name, "arguments": arguments}
                call = {"id": id_, "type": "function", "function": function}
                _assistant(made).setdefault("tool_calls", []).append(call)
            case CallOutputItem(call_id=id_, output=output):
                made.append({"role": "tool", "tool_call_id": id_, "content": _text(output, where)})
            case ReasoningItem() as item:
                if thought := _thought(item):
                    _assistant(made, "reasoning_content", "content", "tool_calls")["reasoning_content"] = (
                        thought
                    )
    return made


def _assistant(made: list[Message], *free: str) -> Message:
    """The assistant's turn that is being gathered, if it is the last and has none of `free` yet."""
    last = made[-1] if made else None
    if last is None or last["role"] != "assistant" or any(last.get(name) for name in free):
        made.append({"role": "assistant", "content": ""})
    return made[-1]


def _text(content: str | list[InputPart], where: str) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(_part_text(item, f"{where}.content[{i}]") for i, item in enumerate(content))


def _part_text(item: InputPart, where: str) -> str:
    match item:
        case InputText(text=text) | OutputText(text=text):
            return text
        case Refusal(refusal=text):
            return text
        case _:
            raise Unsupported(f"{where}: this model reads text only.", param=where)


def _thought(item: ReasoningItem) -> str:
    shown = "\n".join(piece.text for piece in item.content or item.summary)
    return shown or unsealed(item.encrypted_content)


def sealed(thought: str) -> str:
    """Reasoning for a client that keeps it opaque and sends it back (include reasoning.encrypted_content)."""
    return base64.b64encode((_SEALED + thought).encode()).decode()


def unsealed(text: str | None) -> str:
    """The reasoning in a sealed text of ours; empty for others', which only their makers can read."""
    try:
        opened = base64.b64decode(text or "", validate=True).decode()
    except (binascii.Error, ValueError):
        return ""
    return opened.removeprefix(_SEALED) if opened.startswith(_SEALED) else ""


def offered_tools(body: ResponseBody) -> Tools:
    """The tools that the prompt shows, and whether one must be called."""
    tools = [
        ChatTool(
            function=FunctionSpec(
                name=tool.name,
                description=tool.description,
                parameters=tool.parameters,
                strict=tool.strict,
            )
        )
        for tool in body.tools or ()
    ]
    return choose_tools(tools, _choice(body.tool_choice))


def _choice(choice: Any) -> ChatChoice | None:
    match choice:
        case OneTool(name=name):
            return NamedChoice(function=FunctionName(name=name))
        case SomeTools(mode=mode, tools=tools):
            allowed = [ChatAllowedTool(function=FunctionName(name=tool.name)) for tool in tools]
            return AllowedChoice(allowed_tools=AllowedTools(mode=mode, tools=allowed))
        case _:
            named: ChatChoice | None = choice
            return named
