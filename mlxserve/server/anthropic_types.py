"""Anthropic's request bodies: which fields there are, and what becomes of each.

Knows: https://docs.anthropic.com/en/api/messages. Does not know how a field is carried out.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from mlxserve.server.fields import Body, Count, Name, Part, StopString, TopK, TopP

HISTORY_HINTS = {
    "cache_control": "A cache hint; prefixes are shared by themselves.",
    "diagnostics": "Asks about the cache of a hosted service.",
    "inference_geo": "Everything runs on this machine.",
    "service_tier": "There is one tier.",
}


class TextBlock(Part, tag="text", tag_field="type"):
    text: str
    cache_control: Any = None
    citations: Any = None


class ImageBlock(Part, tag="image", tag_field="type"):
    source: Any
    cache_control: Any = None


class DocumentSource(Part):
    """Only plain text can be read; the other types are refused by name."""

    type: str
    data: str | None = None
    media_type: str | None = None
    content: Any = None
    url: Any = None
    file_id: Any = None


class Citations(Part):
    enabled: Literal[False] | None = None  # answers point at no places in a document


class DocumentBlock(Part, tag="document", tag_field="type"):
    source: DocumentSource
    title: str | None = None
    context: str | None = None
    cache_control: Any = None
    citations: Citations | None = None


class ToolUseBlock(Part, tag="tool_use", tag_field="type"):
    id: str
    name: Name
    input: dict[str, Any]
    cache_control: Any = None
    caller: Any = None
    toolset_name: None = None


class ToolResultBlock(Part, tag="tool_result", tag_field="type"):
    tool_use_id: str
    content: str | list[TextBlock | ImageBlock | DocumentBlock] | None = None
    is_error: bool | None = None
    cache_control: Any = None
    toolset_name: None = None


class ThinkingBlock(Part, tag="thinking", tag_field="type"):
    thinking: str
    signature: str | None = None


class RedactedBlock(Part, tag="redacted_thinking", tag_field="type"):
    """Encrypted by a hosted service; there is nothing in it to read."""

    data: str


ContentBlock = (
    TextBlock | ImageBlock | DocumentBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock | RedactedBlock
)


class AnthropicMessage(Part):
    role: Literal["user", "assistant", "system"]
    content: str | list[ContentBlock]


class AnthropicTool(Part):
    """A tool of the caller's. Tools that a hosted service runs have other types, and are refused."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: Any = None
    eager_input_streaming: bool | None = None  # arguments are always streamed as they come
    input_examples: list[dict[str, Any]] | None = None
    allowed_callers: list[Literal["direct"]] | None = None
    defer_loading: Literal[False] | None = None


class AutoChoice(Part, tag="auto", tag_field="type"):
    disable_parallel_tool_use: bool | None = None


class AnyChoice(Part, tag="any", tag_field="type"):
    disable_parallel_tool_use: bool | None = None


class OneChoice(Part, tag="tool", tag_field="type"):
    name: Name
    disable_parallel_tool_use: bool | None = None


class NoChoice(Part, tag="none", tag_field="type"):
    pass


class ThinkingEnabled(Part, tag="enabled", tag_field="type"):
    budget_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    display: Literal["summarized", "omitted"] | None = None


class ThinkingAdaptive(Part, tag="adaptive", tag_field="type"):
    display: Literal["summarized", "omitted"] | None = None


class ThinkingBetween(Part, tag="between_tools", tag_field="type"):
    pass


class ThinkingDisabled(Part, tag="disabled", tag_field="type"):
    pass


Thinking = ThinkingEnabled | ThinkingAdaptive | ThinkingBetween | ThinkingDisabled


class SchemaOutput(Part):
    schema: dict[str, Any]
    type: Literal["json_schema"] = "json_schema"


class OutputConfig(Part):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: SchemaOutput | None = None


class Metadata(Part):
    user_id: str | None = None


class ContextManagement(Part):
    """Edits of a history that a hosted service makes. None is made here, and the answer says so."""

    edits: list[dict[str, Any]] = []


class Conversation(Body):
    """What a message and a count of its tokens have in common."""

    model: Name
    messages: Annotated[list[AnthropicMessage], Meta(min_length=1)]
    system: str | list[TextBlock] | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: AutoChoice | AnyChoice | OneChoice | NoChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    metadata: Metadata | None = None
    context_management: ContextManagement | None = None

    HARMLESS = HISTORY_HINTS
    REFUSED = {
        "container": "there are no containers here.",
        "mcp_servers": "call MCP servers from the client.",
        "speed": "there is one speed.",
    }
    NEUTRAL = {"mcp_servers": ([],), "speed": ("standard",)}


class CountBody(Conversation):
    pass


class MessageBody(Conversation, kw_only=True):
    max_tokens: Count
    stream: bool | None = None
    stop_sequences: list[StopString] | None = None
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: TopK | None = None
    top_p: TopP | None = None
