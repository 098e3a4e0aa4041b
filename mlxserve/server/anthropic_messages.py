"""Anthropic's conversations as the messages and tools that chat templates read.

Knows: content blocks, tool results inside user turns. Does not know templates or sampling.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mlxserve.errors import Unsupported, UsageError
from mlxserve.server.anthropic_types import (
    AnthropicMessage,
    AnthropicTool,
    AnyChoice,
    Conversation,
    DocumentBlock,
    ImageBlock,
    NoChoice,
    OneChoice,
    RedactedBlock,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from mlxserve.server.constraints import Tools, choose_tools
from mlxserve.server.openai_types import ChatTool, FunctionName, FunctionSpec, NamedChoice

Message = dict[str, Any]


def conversation(body: Conversation) -> list[Message]:
    """System text and turns, tool results as turns of their own."""
    made: list[Message] = []
    if body.system:
        made.append({"role": "system", "content": _text(body.system, "system")})
    for i, message in enumerate(body.messages):
        made += _turns(message, f"messages[{i}]")
    return made


def _turns(message: AnthropicMessage, where: str) -> Iterator[Message]:
    if isinstance(message.content, str):
        yield {"role": message.role, "content": message.content}
    elif message.role == "assistant":
        yield _assistant(message.content, where)
    else:
        yield from _user(message, where)


def _user(message: AnthropicMessage, where: str) -> Iterator[Message]:
    """Results first, as tool turns, then what the user says, as the API asks its callers to order them."""
    if not message.content:
        raise UsageError(f"{where}.content must hold at least one block.", param=f"{where}.content")
    said: list[str] = []
    for i, block in enumerate(message.content):
        at = f"{where}.content[{i}]"
        if isinstance(block, ToolResultBlock):
            yield _result(block, at)
        else:
            said.append(_block_text(block, at))
    if said:
        yield {"role": message.role, "content": [{"type": "text", "text": text} for text in said]}


def _result(block: ToolResultBlock, where: str) -> Message:
    text = _text(block.content or "", f"{where}.content")
    if block.is_error:
        text = f"Error: {text}"
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": text}


def _assistant(blocks: list[Any], where: str) -> Message:
    texts, thoughts, calls = [], [], []
    for i, block in enumerate(blocks):
        match block:
            case ThinkingBlock(thinking=thought):
                thoughts.append(thought)
            case RedactedBlock():
                pass  # encrypted elsewhere: nothing to read
            case ToolUseBlock(id=id_, name=name, input=arguments):
                calls.append(
                    {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}
                )
            case _:
                texts.append(_block_text(block, f"{where}.content[{i}]"))
    made: Message = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        made["reasoning_content"] = "\n".join(thoughts)
    if calls:
        made["tool_calls"] = calls
    return made


def _text(content: str | list[Any], where: str) -> str:
    """Text, or text blocks joined by a new line."""
    if isinstance(content, str):
        return content
    return "\n".join(_block_text(block, f"{where}[{i}]") for i, block in enumerate(content))


def _block_text(block: Any, where: str) -> str:
    match block:
        case TextBlock(text=text):
            return text
        case DocumentBlock(source=source) if source.type == "text" and source.data is not None:
            heading = "\n".join(filter(None, (block.title, block.context)))
            return f"{heading}\n\n{source.data}" if heading else source.data
        case DocumentBlock(source=source):
            raise Unsupported(
                f"{where}.source: this model reads text only, not '{source.type}'.", param=where
            )
        case ImageBlock():
            raise Unsupported(f"{where}: this model reads text only, not images.", param=where)
        case _:
            raise Unsupported(f"{where}: such a block cannot stand in this turn.", param=where)


def _schema(tool: AnthropicTool) -> dict[str, Any]:
    """The input's schema, with examples under the word that JSON schema has for them."""
    examples = {"examples": tool.input_examples} if tool.input_examples else {}
    return {**tool.input_schema, **examples}


def offered_tools(body: Conversation) -> Tools:
    """The tools that the prompt shows, and whether one must be called."""
    tools = [
        ChatTool(
            function=FunctionSpec(
                name=tool.name,
                description=tool.description,
                parameters=_schema(tool),
                strict=tool.strict,
            )
        )
        for tool in body.tools or ()
    ]
    match body.tool_choice:
        case NoChoice():
            return choose_tools(tools, "none")
        case AnyChoice():
            return choose_tools(tools, "required")
        case OneChoice(name=name):
            return choose_tools(tools, NamedChoice(function=FunctionName(name=name)))
        case _:
            return choose_tools(tools, None)
