"""Ollama's end points about models: tags, show, ps, pull, delete, version, embed.

Knows: Ollama's objects, https://github.com/ollama/ollama/blob/main/docs/api.md. Does not know where models
come from (a Loader does).
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from datetime import UTC, datetime, timedelta
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from mlxserve.errors import UsageError
from mlxserve.server.answer import json_response, read_json, service_of
from mlxserve.server.embeddings import Vectors
from mlxserve.server.embeddings import embed as make_vectors
from mlxserve.server.faults import ollama_error
from mlxserve.server.models import Loaded
from mlxserve.server.ollama import NDJSON, context_limit, keep_alive_s, read_options
from mlxserve.server.ollama_types import EmbeddingsRequest, EmbedRequest, NamedModel, PullRequest
from mlxserve.server.ports import ModelCard, PullProgress
from mlxserve.server.sse import FrameStream, StreamLimits, line_frame, unless_gone

# Clients read this to know which fields they may send.
API_VERSION = "0.12.0"
_FOR_EVER_S = 100 * 365 * 86_400.0


async def version(request: HttpRequest) -> Response:
    return json_response({"version": API_VERSION})


async def tags(request: HttpRequest) -> Response:
    cards = await service_of(request).models.catalogue()
    return json_response({"models": [model_object(card) for card in cards]})


async def ps(request: HttpRequest) -> Response:
    models = service_of(request).models
    return json_response({"models": [_running(entry, models.idle_s(entry)) for entry in models.loaded]})


def _running(entry: Loaded, left_s: float) -> dict[str, Any]:
    # "For ever" has no JSON form; Ollama shows a time some centuries away.
    ahead = timedelta(seconds=min(left_s, _FOR_EVER_S))
    return {
        **model_object(entry.card),
        "size_vram": entry.card.needed_bytes,
        "expires_at": _time_text((datetime.now(UTC) + ahead).timestamp()),
        "context_length": entry.engine.context,
    }


def model_object(card: ModelCard) -> dict[str, Any]:
    return {
        "name": card.name,
        "model": card.name,
        "modified_at": _time_text(card.created),
        "size": card.size_bytes,
        "digest": card.digest,
        "details": details(card),
    }


def details(card: ModelCard) -> dict[str, Any]:
    return {
        "parent_model": card.parent,
        "format": card.format,
        "family": card.family,
        "families": [card.family] if card.family else [],
        "parameter_size": parameter_text(card.parameters),
        "quantization_level": card.quantization,
    }


def parameter_text(count: int) -> str:
    """134515008 as '134.5M'."""
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= size:
            return f"{count / size:.1f}{unit}"
    return str(count) if count else ""


def _time_text(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def _model_name(body: NamedModel | PullRequest) -> str:
    name = body.model or body.name
    if name is None:
        raise UsageError("'model' is required.", param="model", code="missing_field")
    return name


async def show(request: HttpRequest) -> Response:
    body = await read_json(request, NamedModel)
    models = service_of(request).models
    card = await models.card(_model_name(body))
    entry = next((entry for entry in models.loaded if entry.card.name == card.name), None)
    return json_response(
        {
            "modelfile": "",
            "parameters": _parameters(entry),
            "template": card.template,
            "license": card.licence,
            "modified_at": _time_text(card.created),
            "details": details(card),
            "model_info": model_info(card),
            "capabilities": abilities(card, entry),
        }
    )


def _parameters(entry: Loaded | None) -> str:
    defaults = entry.engine.generation_defaults if entry else {}
    return "\n".join(f"{name} {value}" for name, value in defaults.items())


def model_info(card: ModelCard) -> dict[str, Any]:
    """Keys as GGUF names them; clients look for '.context_length'."""
    family = card.family or "unknown"
    info: dict[str, Any] = {
        "general.architecture": family,
        "general.parameter_count": card.parameters,
        f"{family}.context_length": card.context,
    }
    names = {
        "hidden_size": "embedding_length",
        "num_hidden_layers": "block_count",
        "num_attention_heads": "attention.head_count",
        "num_key_value_heads": "attention.head_count_kv",
    }
    config = card.config or {}
    info |= {f"{family}.{theirs}": config[ours] for ours, theirs in names.items() if ours in config}
    return info


def abilities(card: ModelCard, entry: Loaded | None) -> list[str]:
    """What Ollama's clients ask for by name; of a model that is not loaded, what its template tells."""
    if card.embeds:
        return ["embedding"]
    if entry is not None:
        dialogue = entry.dialogue
        more = {
            "tools": dialogue.can_chat,
            "thinking": dialogue.can_reason,
            "insert": dialogue.filling is not None,
        }
    else:
        more = {"tools": "tools" in card.template, "thinking": "<think>" in card.template}
    return ["completion", *(name for name, there in more.items() if there)]


async def pull(request: HttpRequest) -> Response:
    body = await read_json(request, PullRequest)
    service = service_of(request)
    name = _model_name(body)
    steps = service.models.loader.pull(name)
    if body.stream is False:
        return json_response(await unless_gone(request.receive, _pull_whole(steps)))
    config = service.config
    return FrameStream(
        _pull_lines(steps),
        lambda error: line_frame(ollama_error(error)),
        StreamLimits(config.heartbeat_s, config.write_timeout_s),
        media_type=NDJSON,
    )


async def _pull_whole(steps: AsyncGenerator[PullProgress, None]) -> dict[str, str]:
    async with aclosing(steps):
        async for _ in steps:
            pass
    return {"status": "success"}


async def _pull_lines(steps: AsyncGenerator[PullProgress, None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(steps):
        async for step in steps:
            yield line_frame(_progress(step))
    yield line_frame({"status": "success"})


def _progress(step: PullProgress) -> dict[str, Any]:
    made: dict[str, Any] = {"status": step.status}
    if step.digest:
        made["digest"] = step.digest
    if step.total_bytes:
        made |= {"total": step.total_bytes, "completed": step.completed_bytes}
    return made


async def delete(request: HttpRequest) -> Response:
    body = await read_json(request, NamedModel)
    name = _model_name(body)
    await service_of(request).models.remove(name)
    return Response(status_code=200)


async def embed(request: HttpRequest) -> Response:
    body = await read_json(request, EmbedRequest)
    begun = time.perf_counter()
    inputs = [body.input] if isinstance(body.input, str) else body.input
    work = _vectors(request, body, inputs, body.dimensions, truncate=body.truncate is not False)
    made, load_s = await unless_gone(request.receive, work)
    return json_response(
        {
            "model": body.model,
            "embeddings": made.vectors,
            "total_duration": round((time.perf_counter() - begun) * 1e9),
            "load_duration": round(load_s * 1e9),
            "prompt_eval_count": made.tokens,
        }
    )


async def embeddings(request: HttpRequest) -> Response:
    """The older form."""
    body = await read_json(request, EmbeddingsRequest)
    work = _vectors(request, body, [body.prompt], None, truncate=True)
    made, _ = await unless_gone(request.receive, work)
    return json_response({"embedding": made.vectors[0]})


async def _vectors(
    request: HttpRequest,
    body: EmbedRequest | EmbeddingsRequest,
    inputs: list[str],
    dimensions: int | None,
    *,
    truncate: bool,
) -> tuple[Vectors, float]:
    """The vectors, and the seconds it took to load the model."""
    options, alive_s = read_options(body.options), keep_alive_s(body.keep_alive)
    begun = time.perf_counter()
    request.state.model = body.model
    async with service_of(request).lend(body.model, keep_alive_s=alive_s) as entry:
        load_s = time.perf_counter() - begun
        limit = context_limit(options, entry)
        return await make_vectors(entry, inputs, dimensions, truncate=truncate, limit=limit), load_s
