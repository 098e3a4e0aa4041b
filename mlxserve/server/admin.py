"""What people and supervisors ask a server about itself: health, metrics, models, abilities.

Knows: /health, /ready, /metrics, /v1/models, /v1/capabilities. Does not know how an answer is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from datetime import UTC, datetime
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from mlxserve.errors import UsageError
from mlxserve.request import SamplingParams
from mlxserve.server.answer import json_response, service_of
from mlxserve.server.files import page_of
from mlxserve.server.models import Loaded
from mlxserve.server.ports import ModelCard
from mlxserve.text.template import RESERVED

ENDPOINTS = {
    "openai": ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/v1/models"],
    "anthropic": ["/v1/messages", "/v1/messages/count_tokens"],
    "ollama": ["/api/chat", "/api/generate", "/api/embed", "/api/tags", "/api/show", "/api/pull", "/api/ps"],
    "adapters": ["/v1/adapters", "/v1/files", "/v1/fine_tuning/jobs"],
    "editors": ["/tokenize", "/detokenize", "/apply-template", "/infill"],
}


async def health(request: HttpRequest) -> Response:
    """200 while the engines go on; 503, with the reason, while one is being restored or once it cannot be."""
    service = service_of(request)
    failed = service.failed or next(
        (f"{e.card.name}'s engine has stopped." for e in service.models.loaded if not e.engine.healthy), None
    )
    if failed:
        return json_response({"status": "failed", "reason": failed}, 503)
    trouble = next((e.engine.trouble for e in service.models.loaded if e.engine.trouble), None)
    if trouble:
        return json_response({"status": "recovering", "reason": trouble}, 503)
    return json_response({"status": "ok"})


async def ready(request: HttpRequest) -> Response:
    """200 while new requests are taken; 503 from a stop signal on, and while an engine is being restored."""
    service = service_of(request)
    if any(entry.engine.trouble for entry in service.models.loaded):
        return json_response({"status": "recovering"}, 503)
    if service.draining or service.failed or not service.models.healthy:
        return json_response({"status": "draining" if service.draining else "failed"}, 503)
    return json_response({"status": "ready", "models": [entry.card.name for entry in service.models.loaded]})


async def metrics(request: HttpRequest) -> Response:
    return Response(service_of(request).metrics.render(), media_type=CONTENT_TYPE_LATEST)


async def list_models(request: HttpRequest) -> Response:
    """OpenAI's list, or Anthropic's where its clients ask."""
    cards = await service_of(request).models.catalogue()
    if "anthropic-version" in request.headers:
        return json_response(_anthropic_page([anthropic_model(card) for card in cards], request.query_params))
    return json_response({"object": "list", "data": [openai_model(card) for card in cards]})


def _anthropic_page(models: list[dict[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """`limit` models behind `after_id`, or those before `before_id`. Raises UsageError."""
    after, before = query.get("after_id"), query.get("before_id")
    if after is not None and before is not None:
        raise UsageError("Send after_id or before_id, but not both.", param="before_id")
    turned = models[::-1] if before is not None else models
    asked = {"limit": query.get("limit", "20"), "after": after if before is None else before}
    page = page_of(turned, {k: v for k, v in asked.items() if v is not None}, most=1000)
    data = page["data"][::-1] if before is not None else page["data"]
    edge = {"first_id": data[0]["id"] if data else None, "last_id": data[-1]["id"] if data else None}
    return {"data": data, "has_more": page["has_more"], **edge}


async def show_model(request: HttpRequest) -> Response:
    card = await service_of(request).models.card(request.path_params["model"])
    shape = anthropic_model if "anthropic-version" in request.headers else openai_model
    return json_response(shape(card))


def openai_model(card: ModelCard) -> dict[str, Any]:
    return {
        "id": card.name,
        "object": "model",
        "created": card.created,
        "owned_by": "local",
        "context_length": card.context or None,
        "parent": card.parent or None,
    }


def anthropic_model(card: ModelCard) -> dict[str, Any]:
    created = datetime.fromtimestamp(card.created, UTC).isoformat().replace("+00:00", "Z")
    return {"type": "model", "id": card.name, "display_name": card.name, "created_at": created}


async def capabilities(request: HttpRequest) -> Response:
    """What each loaded model can do, and what the server takes."""
    service = service_of(request)
    return json_response(
        {
            "object": "capabilities",
            "models": {
                entry.card.name: {
                    **model_abilities(entry),
                    "adapters": [known.id for known in service.models.adapters.listed(entry.card.name)],
                }
                for entry in service.models.loaded
            },
            "sampling": [item.name for item in fields(SamplingParams)],
            "structured_output": ["json_schema", "json_object", "regex", "choice", "grammar"],
            "endpoints": ENDPOINTS,
            "limits": {"body_bytes": service.config.max_body_bytes},
        }
    )


def model_abilities(entry: Loaded) -> dict[str, Any]:
    dialogue = entry.dialogue
    return {
        "context": entry.engine.context,
        "chat": dialogue.can_chat,
        "tools": "template" if dialogue.can_call_tools else ("described" if dialogue.can_chat else None),
        "reasoning": dialogue.can_reason,
        "template_variables": sorted(dialogue.variables - RESERVED),
        "fill_in_the_middle": dialogue.filling is not None,
        "embeddings": entry.card.embeds,
        "input": ["text"],
        "generation_defaults": dict(entry.engine.generation_defaults),
        "pinned": entry.pinned,
    }
