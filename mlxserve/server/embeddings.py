"""Vectors of texts: OpenAI's POST /v1/embeddings, Ollama's /api/embed and /api/embeddings.

Knows: both APIs' shapes, and how a vector is shortened. Does not know how a model pools.
"""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from mlxserve.errors import PromptTooLong, UsageError
from mlxserve.server.answer import json_response, read_json, service_of
from mlxserve.server.fields import require
from mlxserve.server.models import Loaded
from mlxserve.server.openai_completions import Prompt, split_prompts
from mlxserve.server.openai_types import EmbeddingBody
from mlxserve.server.sse import unless_gone

MAX_INPUTS = 2048


@dataclass(frozen=True, slots=True)
class Vectors:
    """Vectors of length one, and the tokens they were made of."""

    vectors: list[list[float]]
    tokens: int


async def embeddings(request: HttpRequest) -> Response:
    body = await read_json(request, EmbeddingBody)
    inputs = split_prompts(body.input, "input")
    work = _openai(request, body, inputs)
    return json_response(await unless_gone(request.receive, work))


async def _openai(request: HttpRequest, body: EmbeddingBody, inputs: list[Prompt]) -> dict[str, Any]:
    request.state.model = body.model
    async with service_of(request).lend(body.model) as entry:
        made = await embed(entry, inputs, body.dimensions)
    packed = body.encoding_format == "base64"
    data = [
        {"object": "embedding", "index": i, "embedding": to_base64(vector) if packed else vector}
        for i, vector in enumerate(made.vectors)
    ]
    usage = {"prompt_tokens": made.tokens, "total_tokens": made.tokens}
    return {"object": "list", "data": data, "model": body.model, "usage": usage}


async def embed(
    entry: Loaded,
    inputs: Sequence[Prompt],
    dimensions: int | None = None,
    *,
    truncate: bool = False,
    limit: int | None = None,
) -> Vectors:
    """One vector an input. Raises PromptTooLong (or cuts, with `truncate`) and UsageError.

    limit: tokens an input may have, where that is less than the model reads.
    """
    require(len(inputs) <= MAX_INPUTS, f"input holds more than {MAX_INPUTS} texts.", "input")
    most = limit or entry.engine.context
    batch = [await _tokens(entry, i, text, truncate, most) for i, text in enumerate(inputs)]
    vectors = await entry.engine.embed(batch, entry.adapter) if batch else []
    if dimensions is not None:
        vectors = [shorten(vector, dimensions) for vector in vectors]
    return Vectors(vectors, sum(map(len, batch)))


async def _tokens(entry: Loaded, index: int, text: Prompt, truncate: bool, limit: int) -> list[int]:
    if isinstance(text, str):
        ids = await entry.dialogue.encode_for_embedding(text, limit=limit if truncate else None)
    else:
        ids = entry.dialogue.check_ids(text, f"input[{index}]")
    if not ids:
        raise UsageError(f"input[{index}] has no tokens.", param=f"input[{index}]")
    if len(ids) > limit and not truncate:
        raise PromptTooLong(
            f"input[{index}] has {len(ids)} tokens; the model reads {limit}.", needed=len(ids), limit=limit
        )
    return ids[:limit]


def shorten(vector: list[float], dimensions: int) -> list[float]:
    """The first `dimensions` numbers, again of length one (Matryoshka embeddings, Kusupati et al. 2022)."""
    if dimensions > len(vector):
        raise UsageError(
            f"dimensions is {dimensions}; this model's vectors have {len(vector)}.", param="dimensions"
        )
    cut = vector[:dimensions]
    length = math.sqrt(sum(x * x for x in cut)) or 1.0
    return [x / length for x in cut]


def to_base64(vector: list[float]) -> str:
    """Little-endian float32, as OpenAI's clients decode it."""
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
