"""From a read request to its answer: lend a model, run it, render what comes, whole or as a stream.

Knows: the order of these steps and who must be told. Does not know any API's fields or shapes.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from mlxserve.config import ServerConfig
from mlxserve.errors import MlxServeError, UsageError
from mlxserve.server.awake import Awake
from mlxserve.server.faults import ErrorObject, ShuttingDown
from mlxserve.server.fields import B, read
from mlxserve.server.generation import Run
from mlxserve.server.metrics import Metrics
from mlxserve.server.models import Loaded, ModelRegistry
from mlxserve.server.security import read_body
from mlxserve.server.sse import FrameStream, StreamLimits, unless_gone


@dataclass(slots=True, eq=False)
class Service:
    """What every handler shares. `working` counts the calls in progress."""

    config: ServerConfig
    models: ModelRegistry
    metrics: Metrics
    awake: Awake = field(default_factory=Awake)
    working: int = 0
    draining: bool = False
    failed: str | None = None

    @contextlib.asynccontextmanager
    async def lend(self, model: str, *, keep_alive_s: float | None = None) -> AsyncIterator[Loaded]:
        """A model for the length of one call. Raises ShuttingDown after a stop signal."""
        if self.draining:
            raise ShuttingDown("The server is shutting down.", retry_after_s=10.0)
        self.working += 1
        try:
            with self.awake.hold():
                async with self.models.use(model, keep_alive_s=keep_alive_s) as entry:
                    yield entry
        finally:
            self.working -= 1


class Renderer(Protocol):
    """One call's answer in one API's words."""

    media_type: str

    async def whole(self, run: Run) -> Any:
        """The JSON value of the unstreamed answer."""
        ...

    def frames(self, run: Run) -> AsyncGenerator[bytes, None]:
        """The frames of the streamed answer."""
        ...

    def failure(self, error: MlxServeError) -> bytes:
        """The last frame of a stream that broke."""
        ...

    def heartbeat(self) -> bytes: ...


def service_of(request: HttpRequest) -> Service:
    service: Service = request.app.state.service
    return service


async def read_json(request: HttpRequest, kind: type[B]) -> B:
    """The request's body as `kind`. Raises UsageError, TooLarge, BodyTimeout, Cancelled."""
    return read(await read_body(request, service_of(request).config), kind)


def json_response(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status_code=status, media_type="application/json")


def client_of(request: HttpRequest, user: str | None = None) -> str:
    """Whom fairness counts: the user that the caller names, else the caller's address."""
    address = request.client.host if request.client else ""
    return f"{address}/{user}" if user else address


@dataclass(frozen=True, slots=True)
class Call:
    """One generation call. `plan` makes the Run once the model is there.

    `fields`: what this API calls the fields that errors of the engine name.
    """

    model: str
    plan: Callable[[Loaded], Awaitable[Run]]
    renderer: Renderer
    stream: bool
    keep_alive_s: float | None = None
    fields: Mapping[str, str] = field(default_factory=dict)


@contextlib.contextmanager
def _naming(fields: Mapping[str, str]) -> Iterator[None]:
    """Errors leave with the name that the caller used for the field at fault."""
    try:
        yield
    except UsageError as error:
        error.param = fields.get(error.param or "", error.param)
        raise


async def answer(request: HttpRequest, call: Call) -> Response:
    """Carries a call out and answers it. Errors before the first frame have their own status."""
    service = service_of(request)
    request.state.model = call.model
    if not call.stream:
        return json_response(await unless_gone(request.receive, _whole(request, service, call)))
    config = service.config
    return FrameStream(
        _frames(request, service, call),
        call.renderer.failure,
        StreamLimits(config.heartbeat_s, config.write_timeout_s),
        heartbeat=call.renderer.heartbeat,
        media_type=call.renderer.media_type,
    )


async def _whole(request: HttpRequest, service: Service, call: Call) -> Any:
    lent = service.lend(call.model, keep_alive_s=call.keep_alive_s)
    with _naming(call.fields):
        async with lent as entry:
            run = await call.plan(entry)
            request.state.run = run
            return await call.renderer.whole(run)


async def _frames(request: HttpRequest, service: Service, call: Call) -> AsyncGenerator[bytes, None]:
    lent = service.lend(call.model, keep_alive_s=call.keep_alive_s)
    with _naming(call.fields):
        async with lent as entry:
            run = await call.plan(entry)
            request.state.run = run
            async with aclosing(call.renderer.frames(run)) as frames:
                async for frame in frames:
                    yield frame


def failure_event(shape: ErrorObject, error: MlxServeError) -> bytes:
    """OpenAI's way to say that a stream broke: a data event with the error object, and no [DONE]."""
    return b"data: " + msgspec.json.encode(shape(error)) + b"\n\n"
