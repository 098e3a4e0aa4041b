"""OpenAI's request bodies: which fields there are, and what becomes of each.

Knows: https://platform.openai.com/docs/api-reference (chat, completions, embeddings) and the extensions
that local servers share. Does not know how a field is carried out.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from mlxserve.server.fields import (
    Bias,
    Body,
    Choices,
    Count,
    MinP,
    Name,
    Part,
    Penalty,
    Repetition,
    Seed,
    Stop,
    Temperature,
    TokenId,
    TopK,
    TopLogprobs,
    TopP,
)

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]

# Kept apart from any answer: the caller's own bookkeeping, or hints for a cache that works by itself.
BOOKKEEPING = {
    "metadata": "The caller's own labels; nothing here reads them.",
    "safety_identifier": "The caller's own label.",
    "prompt_cache_key": "Prefixes are shared by their tokens, without a key.",
    "prompt_cache_options": "Prefixes are shared by themselves, as long as memory allows.",
    "prompt_cache_retention": "Prefixes are kept by themselves, as long as memory allows.",
}


class TextPart(Part, tag="text", tag_field="type"):
    text: str
    cache_control: Any = None  # a cache hint of some gateways; prefixes are shared by themselves


class RefusalPart(Part, tag="refusal", tag_field="type"):
    refusal: str


class ImagePart(Part, tag="image_url", tag_field="type"):
    image_url: Any


class AudioPart(Part, tag="input_audio", tag_field="type"):
    input_audio: Any


class FilePart(Part, tag="file", tag_field="type"):
    file: Any


ContentPart = TextPart | RefusalPart | ImagePart | AudioPart | FilePart


class FunctionCall(Part):
    name: Name
    arguments: str | dict[str, Any] | None = None


class ToolCall(Part):
    function: FunctionCall
    id: str | None = None
    type: Literal["function"] = "function"
    index: Any = None  # left over from a stream


class ChatMessage(Part):
    """One turn. What clients echo from our answers and others' (refusal, audio, …) is accepted."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    annotations: Any = None
    audio: None = None
    function_call: None = None


class FunctionSpec(Part):
    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChatTool(Part):
    function: FunctionSpec
    type: Literal["function"] = "function"
    cache_control: Any = None


class FunctionName(Part):
    name: Name


class NamedChoice(Part, tag="function", tag_field="type"):
    function: FunctionName


class AllowedTool(Part):
    function: FunctionName
    type: Literal["function"] = "function"


class AllowedTools(Part):
    mode: Literal["auto", "required"]
    tools: list[AllowedTool]


class AllowedChoice(Part, tag="allowed_tools", tag_field="type"):
    allowed_tools: AllowedTools


ToolChoice = Literal["none", "auto", "required"] | NamedChoice | AllowedChoice


class TextFormat(Part, tag="text", tag_field="type"):
    pass


class JsonFormat(Part, tag="json_object", tag_field="type"):
    pass


class JsonSchema(Part):
    name: Name
    schema: dict[str, Any] | bool | None = None
    description: str | None = None
    strict: bool | None = None


class SchemaFormat(Part, tag="json_schema", tag_field="type"):
    json_schema: JsonSchema


ResponseFormat = TextFormat | JsonFormat | SchemaFormat


class StructuredOutputs(Part):
    """The extension that vLLM's clients use: one of these holds."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class StreamOptions(Part):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None  # nothing is padded


class Sampled(Body):
    """Fields that chat and text completions share."""

    model: Name
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Choices | None = None
    seed: Seed | None = None
    stop: Stop | None = None
    max_tokens: Count | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: dict[TokenId, Bias] | None = None
    user: str | None = None
    # Extensions.
    top_k: TopK | None = None
    min_p: MinP | None = None
    repetition_penalty: Repetition | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    structured_outputs: StructuredOutputs | None = None


class ChatBody(Sampled, kw_only=True):
    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    response_format: ResponseFormat | None = None
    tools: list[ChatTool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    service_tier: Literal["auto", "default", "flex", "priority"] | None = None
    # Extensions.
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None

    HARMLESS = BOOKKEEPING
    REFUSED = {
        "audio": "this server makes no audio.",
        "function_call": "use 'tool_choice'.",
        "functions": "use 'tools'.",
        "modalities": "this server makes text.",
        "moderation": "this server does not moderate.",
        "prediction": "answers are not predicted from the caller's text.",
        "store": "chat completions are not stored; use /v1/responses.",
        "verbosity": "say it in the prompt.",
        "web_search_options": "this server does not search the web.",
    }
    NEUTRAL = {"modalities": (["text"],), "store": (False,), "verbosity": ("medium",)}


class CompletionBody(Sampled, kw_only=True):
    prompt: str | list[str | TokenId | list[TokenId]]
    suffix: str | None = None
    echo: bool | None = None
    logprobs: TopLogprobs | None = None
    best_of: Choices | None = None


class EmbeddingBody(Body):
    model: Name
    input: str | list[str | TokenId | list[TokenId]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Count | None = None

    HARMLESS = {"user": "The caller's own label."}
