"""The Responses API's bodies: which fields there are, and what becomes of each.

Knows: https://platform.openai.com/docs/api-reference/responses. Does not know how a field is carried out.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from mlxserve.server.fields import Body, Count, Name, Part, Temperature, TopLogprobs, TopP
from mlxserve.server.openai_types import BOOKKEEPING, Effort

Status = Literal["in_progress", "completed", "incomplete"]


class InputText(Part, tag="input_text", tag_field="type"):
    text: str


class OutputText(Part, tag="output_text", tag_field="type"):
    text: str
    annotations: Any = None
    logprobs: Any = None


class Refusal(Part, tag="refusal", tag_field="type"):
    refusal: str


class InputImage(Part, tag="input_image", tag_field="type"):
    image_url: Any = None
    file_id: Any = None
    detail: Any = None


class InputFile(Part, tag="input_file", tag_field="type"):
    file_id: Any = None
    file_data: Any = None
    file_url: Any = None
    filename: Any = None
    detail: Any = None


InputPart = InputText | OutputText | Refusal | InputImage | InputFile


class MessageItem(Part, tag="message", tag_field="type"):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[InputPart]
    id: str | None = None
    status: Status | None = None
    phase: Any = None


class CallItem(Part, tag="function_call", tag_field="type"):
    call_id: str
    name: Name
    arguments: str
    id: str | None = None
    status: Status | None = None


class CallOutputItem(Part, tag="function_call_output", tag_field="type"):
    call_id: str
    output: str | list[InputPart]
    id: str | None = None
    status: Status | None = None
    name: str | None = None


class ReasoningText(Part):
    text: str
    type: Literal["reasoning_text", "summary_text"] = "reasoning_text"


class ReasoningItem(Part, tag="reasoning", tag_field="type"):
    summary: list[ReasoningText] = []
    content: list[ReasoningText] | None = None
    id: str | None = None
    encrypted_content: str | None = None
    status: Status | None = None


Item = MessageItem | CallItem | CallOutputItem | ReasoningItem


class ItemBox(Part):
    """Lets one item be read by its own type."""

    item: Item


class FunctionTool(Part):
    """The only kind of tool; those that a hosted service runs are refused by their type."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]
    type: Literal["function"]
    parameters: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None
    defer_loading: Literal[False] | None = None


class OneTool(Part, tag="function", tag_field="type"):
    name: Name


class AllowedTool(Part):
    name: Name
    type: Literal["function"] = "function"


class SomeTools(Part, tag="allowed_tools", tag_field="type"):
    mode: Literal["auto", "required"]
    tools: list[AllowedTool]


class PlainFormat(Part, tag="text", tag_field="type"):
    pass


class ObjectFormat(Part, tag="json_object", tag_field="type"):
    pass


class SchemaFormat(Part, tag="json_schema", tag_field="type"):
    name: Name
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class TextConfig(Part):
    format: PlainFormat | ObjectFormat | SchemaFormat | None = None
    verbosity: Literal["medium"] | None = None


class Reasoning(Part):
    """`summary` asks for the reasoning as a summary: here it is the whole of it."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class StreamOptions(Part):
    include_obfuscation: Literal[False] | None = None  # nothing is padded


Include = Literal["reasoning.encrypted_content", "message.output_text.logprobs"]


class ResponseBody(Body):
    model: Name
    input: str | list[dict[str, Any]] = ""
    instructions: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    max_output_tokens: Count | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_logprobs: TopLogprobs | None = None
    include: list[Include] | None = None
    text: TextConfig | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | OneTool | SomeTools | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    service_tier: Literal["auto", "default", "flex", "priority"] | None = None

    HARMLESS = {
        **{name: why for name, why in BOOKKEEPING.items() if name != "metadata"},
        "max_tool_calls": "Counts tools that a hosted service runs; there are none.",
        "client_metadata": "The caller's own labels.",
    }
    REFUSED = {
        "access_programs": "everything runs on this machine.",
        "background": "responses are made while the caller waits.",
        "background_options": "responses are made while the caller waits.",
        "context_management": "shorten the input, or say truncation: 'auto'.",
        "conversation": "use previous_response_id.",
        "image": "this server reads and makes text.",
        "moderation": "this server does not moderate.",
        "prompt": "prompts are not stored here.",
    }
    NEUTRAL = {"background": (False,)}
