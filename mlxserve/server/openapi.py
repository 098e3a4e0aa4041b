"""GET /openapi.json: the API document, generated from the same classes that read the bodies.

Knows: which body belongs to which path. Does not repeat any field: names, types and ranges come from the
classes, harmless fields with the reason why they change nothing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as package_version
from typing import Any

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from mlxserve.server import (
    adapters,
    anthropic_types,
    editor,
    finetuning,
    ollama_types,
    openai_types,
    responses_types,
)
from mlxserve.server.fields import Body

BODIES: dict[str, tuple[type[Body], str]] = {
    "/v1/chat/completions": (openai_types.ChatBody, "Chat (OpenAI)"),
    "/v1/completions": (openai_types.CompletionBody, "Text completion (OpenAI)"),
    "/v1/responses": (responses_types.ResponseBody, "Responses (OpenAI)"),
    "/v1/embeddings": (openai_types.EmbeddingBody, "Embeddings (OpenAI)"),
    "/v1/messages": (anthropic_types.MessageBody, "Messages (Anthropic)"),
    "/v1/messages/count_tokens": (anthropic_types.CountBody, "Tokens of a message (Anthropic)"),
    "/api/chat": (ollama_types.ChatRequest, "Chat (Ollama)"),
    "/api/generate": (ollama_types.GenerateRequest, "Completion (Ollama)"),
    "/api/embed": (ollama_types.EmbedRequest, "Embeddings (Ollama)"),
    "/api/embeddings": (ollama_types.EmbeddingsRequest, "Embedding of one prompt (Ollama)"),
    "/api/show": (ollama_types.NamedModel, "One model (Ollama)"),
    "/api/pull": (ollama_types.PullRequest, "Download a model (Ollama)"),
    "/v1/adapters": (adapters.AdapterBody, "Load an adapter"),
    "/v1/fine_tuning/jobs": (finetuning.JobBody, "Train an adapter (OpenAI)"),
    "/tokenize": (editor.TokenizeBody, "Text to token ids"),
    "/detokenize": (editor.DetokenizeBody, "Token ids to text"),
    "/apply-template": (editor.TemplateBody, "Messages as the model's prompt"),
    "/infill": (editor.InfillBody, "What stands between two texts"),
}
READS = {
    "/health": "Whether the engines can go on",
    "/ready": "Whether new requests are taken",
    "/metrics": "Numbers for Prometheus",
    "/v1/models": "Models (OpenAI, Anthropic)",
    "/v1/models/{model}": "One model (OpenAI, Anthropic)",
    "/v1/responses/{id}": "A stored response (OpenAI)",
    "/v1/responses/{id}/input_items": "What a stored response answers (OpenAI)",
    "/v1/adapters": "Adapters",
    "/v1/adapters/{name}": "One adapter",
    "/v1/files": "Files (OpenAI)",
    "/v1/files/{id}": "One file (OpenAI)",
    "/v1/files/{id}/content": "What is in a file (OpenAI)",
    "/v1/fine_tuning/jobs": "Fine-tuning jobs (OpenAI)",
    "/v1/fine_tuning/jobs/{id}": "One fine-tuning job (OpenAI)",
    "/v1/fine_tuning/jobs/{id}/events": "What a job has told (OpenAI)",
    "/v1/fine_tuning/jobs/{id}/checkpoints": "What a job has saved (OpenAI)",
    "/v1/capabilities": "What each loaded model can do",
    "/api/tags": "Models (Ollama)",
    "/api/ps": "Loaded models (Ollama)",
    "/api/version": "Version of the Ollama API",
}
DELETES = {
    "/v1/responses/{id}": "Forget a stored response (OpenAI)",
    "/v1/models/{model}": "Delete an adapter that was trained here (OpenAI)",
    "/v1/adapters/{name}": "Forget an adapter",
    "/v1/files/{id}": "Delete a file (OpenAI)",
}
ENDS = {
    "/v1/responses/{id}/cancel": "Cancel a response (OpenAI)",
    "/v1/fine_tuning/jobs/{id}/cancel": "Cancel a fine-tuning job (OpenAI)",
}
# What may stand in the query of a list.
_PAGES = {
    "/v1/models": ("limit", "after_id", "before_id"),
    "/v1/responses/{id}/input_items": ("limit", "after", "order"),
    "/v1/files": ("limit", "after", "order", "purpose"),
    "/v1/fine_tuning/jobs": ("limit", "after"),
    "/v1/fine_tuning/jobs/{id}/events": ("limit", "after"),
    "/v1/fine_tuning/jobs/{id}/checkpoints": ("limit", "after"),
}
_UPLOAD = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {"file": {"type": "string", "format": "binary"}, "purpose": {"const": "fine-tune"}},
}


async def document(request: HttpRequest) -> Response:
    return Response(_document(), media_type="application/json")


@lru_cache(maxsize=1)
def _document() -> bytes:
    return msgspec.json.encode(make_document())


def make_document() -> dict[str, Any]:
    """The OpenAPI 3.1 document."""
    kinds = [kind for kind, _ in BODIES.values()]
    references, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    for kind in kinds:
        _add_harmless(components[kind.__name__], kind)
    paths: dict[str, Any] = {
        path: {"post": _write(summary, reference)}
        for (path, (_, summary)), reference in zip(BODIES.items(), references)
    }
    by_name = dict(zip((kind.__name__ for kind in kinds), references))
    paths["/api/delete"] = {"delete": _write("Delete a downloaded model (Ollama)", by_name["NamedModel"])}
    paths["/v1/files"] = {"post": _write("Upload training data (OpenAI)", _UPLOAD, "multipart/form-data")}
    for method, table in (("get", READS), ("delete", DELETES), ("post", ENDS)):
        for path, summary in table.items():
            query = _PAGES.get(path, ()) if method == "get" else ()
            paths.setdefault(path, {})[method] = _plain(path, summary, query)
    schemes = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "mlxserve", "version": _version()},
        "security": [{}, *({name: []} for name in schemes)],  # a key only where the server was given one
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": schemes},
    }


def _add_harmless(schema: dict[str, Any], kind: type[Body]) -> None:
    for name, why in kind.HARMLESS.items():
        schema["properties"][name] = {"description": f"Accepted, without effect. {why}"}


def _write(summary: str, schema: dict[str, Any], media_type: str = "application/json") -> dict[str, Any]:
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": {media_type: {"schema": schema}}},
        "responses": _responses(),
    }


def _plain(path: str, summary: str, query: Sequence[str] = ()) -> dict[str, Any]:
    """An operation without a body."""
    text = {"type": "string"}
    inside = [
        {"name": name, "in": "path", "required": True, "schema": text}
        for name in re.findall(r"{(\w+)}", path)
    ]
    behind = [
        {"name": n, "in": "query", "schema": {"type": "integer"} if n == "limit" else text} for n in query
    ]
    return {"summary": summary, "parameters": [*inside, *behind], "responses": _responses()}


def _responses() -> dict[str, Any]:
    return {"200": {"description": "The answer"}, "default": {"description": "An error object"}}


def _version() -> str:
    try:
        return package_version("mlxserve")
    except PackageNotFoundError:
        return "0"
