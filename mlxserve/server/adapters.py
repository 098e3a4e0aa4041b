"""Adapters that this server knows, by base and name, and the calls about them: /v1/adapters.

Knows: names, folders, who may name a folder. Does not know what an adapter computes. An adapter is known
whether its base is loaded or not; it is put on the engine when it is first asked for.

    POST   /v1/adapters          {"name": …, "path": …, "model": …}     load one now
    GET    /v1/adapters          all, /v1/adapters/{name} one (name, or base@name)
    DELETE /v1/adapters/{name}   forget it; answers that use it go on to their end
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from mlxserve.config import ServerConfig
from mlxserve.errors import MlxServeError, ModelNotFound, UsageError
from mlxserve.server.answer import json_response, read_json, service_of
from mlxserve.server.book import KnownAdapter
from mlxserve.server.faults import Forbidden
from mlxserve.server.fields import Body, Name
from mlxserve.server.models import ModelRegistry
from mlxserve.server.security import is_loopback


class AdapterBody(Body):
    """model: the base, the server's first where it is left out. path: a folder on the server's machine."""

    name: Name
    path: str
    model: Name | None = None


async def load(request: HttpRequest) -> Response:
    body = await read_json(request, AdapterBody)
    service = service_of(request)
    folder = allowed_folder(body.path, service.config)
    async with service.lend(body.model or service.models.first) as entry:
        with _naming():
            known = await service.models.load_adapter(entry.card.name, body.name, folder)
    return json_response(adapter_object(known, service.models))


@contextlib.contextmanager
def _naming() -> Iterator[None]:
    """Errors about the adapter name the field that says which: a bad name, or a folder where there is none."""
    try:
        yield
    except MlxServeError as error:
        if error.param == "adapter":
            error.param = "name" if isinstance(error, UsageError) else "path"
        raise


async def list_all(request: HttpRequest) -> Response:
    models = service_of(request).models
    found = [adapter_object(known, models) for known in models.adapters.listed()]
    return json_response({"object": "list", "data": found})


async def show(request: HttpRequest) -> Response:
    models = service_of(request).models
    return json_response(adapter_object(_named(request.path_params["name"], models), models))


async def drop(request: HttpRequest) -> Response:
    models = service_of(request).models
    known = _named(request.path_params["name"], models)
    in_use = await models.drop_adapter(known)
    return json_response({"id": known.id, "object": "adapter", "deleted": True, "in_use": in_use})


def _named(name: str, models: ModelRegistry) -> KnownAdapter:
    """The adapter called `base@name`, or just `name` where only one base has one. Raises ModelNotFound."""
    base, _, short = name.rpartition("@")
    found = [k for k in models.adapters.listed() if k.name == short and base in ("", k.base)]
    if len(found) == 1:
        return found[0]
    if found:
        several = ", ".join(known.id for known in found)
        raise ModelNotFound(f"Several adapters are called '{name}': {several}.", param="name")
    there = ", ".join(known.id for known in models.adapters.listed()) or "none"
    raise ModelNotFound(f"There is no adapter '{name}'; there are: {there}.", param="name")


def allowed_folder(path: str, config: ServerConfig) -> Path:
    """The folder that a caller names. Raises Forbidden where callers may not name it.

    With adapter_dirs only what lies in one of them; without, anything, as long as only this machine can call.
    """
    try:
        folder = Path(path).expanduser()
        folder.resolve()
        folder.exists()
    except (RuntimeError, ValueError, OSError) as error:  # no such user, a NUL, a circle of links, too long
        raise UsageError(f"{path!r} is no folder's name.", param="path") from error
    if config.adapter_dirs:
        roots = [root.expanduser().resolve() for root in config.adapter_dirs]
        real = (roots[0] / folder).resolve()
        if any(real.is_relative_to(root) for root in roots):
            return real
        raise Forbidden("Adapters are loaded from the folders of --adapter-dir only.", param="path")
    if not is_loopback(config.host):
        raise Forbidden(
            f"This server listens on {config.host}, so callers may not name folders; see --adapter-dir.",
            param="path",
        )
    return folder


def adapter_object(known: KnownAdapter, models: ModelRegistry) -> dict[str, Any]:
    info = known.info
    facts = (
        {"kind": info.kind, "rank": info.rank, "layers": info.layers, "bytes": info.nbytes} if info else {}
    )
    return {
        "id": known.id,
        "object": "adapter",
        "created": known.created,
        "name": known.name,
        "model": known.base,
        "loaded": models.has_loaded(known),
        **facts,
        "note": info.note if info else "",
    }
