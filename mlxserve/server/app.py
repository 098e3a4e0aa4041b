"""The application: routes, what runs around every request, what runs from start to stop.

Knows: which path leads to which handler. Does not know what handlers do.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from mlxserve.config import ServerConfig
from mlxserve.errors import MlxServeError
from mlxserve.server import (
    adapters,
    admin,
    anthropic,
    editor,
    embeddings,
    files,
    finetuning,
    ollama,
    ollama_models,
    openai_chat,
    openai_completions,
    openapi,
    page,
    responses,
)
from mlxserve.server.answer import Service
from mlxserve.server.faults import NotFound, WrongMethod, error_response, object_for
from mlxserve.server.jobs import Jobs
from mlxserve.server.metrics import Metrics
from mlxserve.server.models import ModelRegistry
from mlxserve.server.ports import Trainer
from mlxserve.server.security import Guard
from mlxserve.server.sse import as_shown
from mlxserve.server.watch import Watch

log = logging.getLogger("mlxserve.server")
Handler = Callable[[HttpRequest], Awaitable[Response]]
EXPIRE_TICK_S = 1.0

_POST: dict[str, Handler] = {
    "/v1/chat/completions": openai_chat.chat_completions,
    "/v1/completions": openai_completions.completions,
    "/v1/responses": responses.create,
    "/v1/responses/{id}/cancel": responses.cancel,
    "/v1/embeddings": embeddings.embeddings,
    "/v1/messages": anthropic.messages,
    "/v1/messages/count_tokens": anthropic.count_tokens,
    "/api/chat": ollama.chat,
    "/api/generate": ollama.generate,
    "/api/embed": ollama_models.embed,
    "/api/embeddings": ollama_models.embeddings,
    "/api/show": ollama_models.show,
    "/api/pull": ollama_models.pull,
    "/v1/adapters": adapters.load,
    "/v1/files": files.upload,
    "/v1/fine_tuning/jobs": finetuning.create,
    "/v1/fine_tuning/jobs/{id}/cancel": finetuning.cancel,
    "/tokenize": editor.tokenize,
    "/detokenize": editor.detokenize,
    "/apply-template": editor.apply_template,
    "/infill": editor.infill,
}
_GET: dict[str, Handler] = {
    "/": page.index,
    "/static/{name}": page.asset,
    "/favicon.ico": page.favicon,
    "/health": admin.health,
    "/ready": admin.ready,
    "/metrics": admin.metrics,
    "/openapi.json": openapi.document,
    "/v1/models": admin.list_models,
    "/v1/models/{model:path}": admin.show_model,
    "/v1/files": files.list_files,
    "/v1/files/{id}": files.retrieve,
    "/v1/files/{id}/content": files.content,
    "/v1/fine_tuning/jobs": finetuning.list_jobs,
    "/v1/fine_tuning/jobs/{id}": finetuning.retrieve,
    "/v1/fine_tuning/jobs/{id}/events": finetuning.events,
    "/v1/fine_tuning/jobs/{id}/checkpoints": finetuning.checkpoints,
    "/v1/adapters": adapters.list_all,
    "/v1/adapters/{name:path}": adapters.show,
    "/v1/capabilities": admin.capabilities,
    "/v1/responses/{id}": responses.retrieve,
    "/v1/responses/{id}/input_items": responses.input_items,
    "/api/tags": ollama_models.tags,
    "/api/ps": ollama_models.ps,
    "/api/version": ollama_models.version,
}
_DELETE: dict[str, Handler] = {
    "/v1/responses/{id}": responses.delete,
    "/v1/adapters/{name:path}": adapters.drop,
    "/v1/files/{id}": files.delete,
    "/v1/models/{model:path}": finetuning.delete_model,
    "/api/delete": ollama_models.delete,
}


def make_app(config: ServerConfig, models: ModelRegistry, trainer: Trainer | None = None) -> Starlette:
    """The ASGI application on these models. Its lifespan unloads them at the end.

    trainer: runs fine-tuning jobs, in the folder that `config` names for them.
    """
    app = Starlette(
        routes=_routes(),
        middleware=_middleware(config),
        exception_handlers={
            MlxServeError: _shown,
            HTTPException: _from_starlette,
        },
        lifespan=_lifespan,
    )
    app.state.service = Service(config, models, Metrics(models))
    app.state.files = app.state.jobs = None
    if config.data_dir is not None:
        app.state.files = files.FileStore(config.data_dir / "files", config.stored_file_bytes)
        app.state.jobs = Jobs(config.data_dir / "jobs", app.state.files, models, trainer)
        app.state.jobs.restore()
    app.state.responses = responses.ResponseStore(config.stored_responses, config.stored_response_bytes)
    return app


def _routes() -> list[Route]:
    table = [("POST", _POST), ("GET", _GET), ("DELETE", _DELETE)]
    return [
        Route(path, _shielded(handler), methods=[method])
        for method, paths in table
        for path, handler in paths.items()
    ]


def _shielded(handler: Handler) -> Handler:
    """The handler, with unforeseen errors logged and shown as one plain sentence."""

    async def shielded(request: HttpRequest) -> Response:
        try:
            return await handler(request)
        except Exception as error:
            shown = as_shown(error)
            assert shown is not None
            raise shown from None

    return shielded


def _middleware(config: ServerConfig) -> list[Middleware]:
    """From the outside in: note what happens, answer browsers' preflights, refuse strangers."""
    made = [Middleware(Watch, config=config)]
    if config.cors_origins:
        made.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(config.cors_origins),
                allow_methods=["GET", "POST", "DELETE"],
                allow_headers=["*"],
                expose_headers=["x-request-id", "retry-after"],
            )
        )
    return [*made, Middleware(Guard, config=config)]


@contextlib.asynccontextmanager
async def _lifespan(app: Starlette) -> AsyncIterator[None]:
    service: Service = app.state.service
    clock = asyncio.create_task(_expire(service.models))
    try:
        yield
    finally:
        clock.cancel()
        if app.state.jobs is not None:
            await app.state.jobs.close()
        await service.models.close()


async def _expire(models: ModelRegistry) -> None:
    while True:
        await asyncio.sleep(EXPIRE_TICK_S)
        try:
            await models.expire()
        except Exception as error:  # one engine that cannot be closed; the others still expire
            log.error("Unloading an idle model failed", exc_info=error)


async def _shown(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, MlxServeError)
    request.state.error = error
    return error_response(error, object_for(request.url.path, request.headers))


async def _from_starlette(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path
    if error.status_code == 405:
        answer = await _shown(request, WrongMethod(f"{path} does not take {request.method}."))
        answer.headers.update(error.headers or {})  # Allow
        return answer
    return await _shown(request, NotFound(f"There is nothing at {path}."))
