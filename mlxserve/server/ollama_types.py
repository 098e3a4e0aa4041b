"""Ollama's request bodies: which fields there are, and what becomes of each.

Knows: https://github.com/ollama/ollama/blob/main/docs/api.md. Does not know how a field is carried out.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from mlxserve.server.fields import (
    Body,
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
    TopLogprobs,
)

# How llama.cpp places a model on a machine. MLX has one memory and one device; answers do not depend on it.
_PLACEMENT_OPTIONS = (
    "numa num_batch num_gpu main_gpu low_vram f16_kv logits_all vocab_only use_mmap use_mlock embedding_only "
    "num_thread num_keep"
)
PLACEMENT = dict.fromkeys(
    _PLACEMENT_OPTIONS.split(), "How another engine places a model; answers do not depend on it."
)


class Options(Body):
    """Sampling options. num_predict -1 means: as far as the context reaches; -2 the same."""

    num_ctx: Count | None = None
    num_predict: Annotated[int, Meta(ge=-2, le=2**31 - 1)] | None = None
    seed: Seed | None = None
    temperature: Temperature | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    min_p: MinP | None = None
    repeat_penalty: Repetition | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    stop: Stop | None = None

    HARMLESS = PLACEMENT
    REFUSED = {
        "typical_p": "use top_p or min_p.",
        "tfs_z": "use top_p or min_p.",
        "mirostat": "use top_p or min_p.",
        "mirostat_tau": "use top_p or min_p.",
        "mirostat_eta": "use top_p or min_p.",
        "penalize_newline": "use logit_bias of the OpenAI API.",
        "repeat_last_n": "the penalty looks at prompt and answer as a whole.",
    }
    NEUTRAL = {
        "typical_p": (1.0,),
        "tfs_z": (1.0,),
        "mirostat": (0,),
        "penalize_newline": (True, False),
        "repeat_last_n": (-1,),
    }


class OllamaFunction(Part):
    name: Name
    arguments: dict[str, Any] | str | None = None
    index: Any = None
    description: Any = None


class OllamaCall(Part):
    function: OllamaFunction
    id: str | None = None
    type: Literal["function"] | None = None


class OllamaMessage(Part):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: list[Any] | None = None
    tool_calls: list[OllamaCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaTool(Part):
    function: dict[str, Any]
    type: Literal["function"] = "function"


KeepAlive = str | float | int


class Generating(Body):
    """What chat and generate have in common. `stream` is true unless said."""

    model: Name
    stream: bool | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None
    options: dict[str, Any] | None = None
    keep_alive: KeepAlive | None = None
    think: bool | Literal["low", "medium", "high"] | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None

    HARMLESS = {
        "truncate": "A prompt that is too long is refused.",
        "shift": "A full context ends the answer.",
    }


class ChatRequest(Generating):
    messages: list[OllamaMessage] | None = None
    tools: list[OllamaTool] | None = None


class GenerateRequest(Generating):
    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    context: list[TokenId] | None = None
    raw: bool | None = None
    images: list[Any] | None = None

    REFUSED = {
        "template": "the model's own chat template holds; use 'raw' for a prompt of your own.",
        "width": "this server makes text.",
        "height": "this server makes text.",
        "steps": "this server makes text.",
    }
    NEUTRAL = {"template": ("",)}


class EmbedRequest(Body):
    """Of the options num_ctx counts: longer texts are cut there, or refused without `truncate`."""

    model: Name
    input: str | list[str]
    truncate: bool | None = None
    dimensions: Count | None = None
    keep_alive: KeepAlive | None = None
    options: dict[str, Any] | None = None


class EmbeddingsRequest(Body):
    """The older end point: one prompt, one vector."""

    model: Name
    prompt: str
    keep_alive: KeepAlive | None = None
    options: dict[str, Any] | None = None


class NamedModel(Body):
    """`model`, or `name` as older clients say."""

    model: Name | None = None
    name: Name | None = None

    HARMLESS = {"verbose": "All that is known is shown."}
    REFUSED = dict.fromkeys(("system", "template", "options"), "a model is shown as it is.")
    NEUTRAL = {"system": ("",), "template": ("",), "options": ({},)}


class PullRequest(Body):
    model: Name | None = None
    name: Name | None = None
    stream: bool | None = None

    REFUSED = {"insecure": "downloads are always checked."}
    NEUTRAL = {"insecure": (False,)}
