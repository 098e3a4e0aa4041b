"""Streams over HTTP: frames out, heartbeats by the clock, slow and vanished readers noticed.

Knows: ASGI and time. Does not know what a frame says.

The first frame decides: an error raised before it becomes an ordinary error answer with its status, one
raised after it becomes a last frame. While nothing is ready a heartbeat keeps proxies and clients
patient. `send` waits for the socket, so a slow reader slows only its own stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from mlxserve.errors import Cancelled, EngineFailed, MlxServeError

log = logging.getLogger("mlxserve.server")
T = TypeVar("T")
_encode = msgspec.json.Encoder().encode


def data_frame(value: Any) -> bytes:
    """One Server-Sent Event with JSON data."""
    return b"data: " + _encode(value) + b"\n\n"


def event_frame(name: str, value: Any) -> bytes:
    """One named Server-Sent Event with JSON data."""
    return b"event: " + name.encode() + b"\ndata: " + _encode(value) + b"\n\n"


def line_frame(value: Any) -> bytes:
    """One line of newline-delimited JSON."""
    return _encode(value) + b"\n"


DONE = b"data: [DONE]\n\n"
COMMENT = b": keep-alive\n\n"  # clients skip comment lines (HTML Living Standard, 9.2.6)


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """heartbeat_s: silence before a heartbeat. write_timeout_s: how long one write may wait."""

    heartbeat_s: float = 10.0
    write_timeout_s: float = 60.0


class FrameStream(Response):
    """A streamed answer made of frames.

    `frames` is closed in every case: at its end, on an error, when the client leaves or reads nothing.
    `failure` turns an error in mid-stream into the last frame. `heartbeat` None sends none.
    """

    def __init__(
        self,
        frames: AsyncGenerator[bytes, None],
        failure: Callable[[MlxServeError], bytes],
        limits: StreamLimits,
        *,
        heartbeat: Callable[[], bytes] | None = None,
        media_type: str = "text/event-stream",
    ) -> None:
        super().__init__(
            media_type=media_type, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        )
        self._frames, self._failure, self._limits, self._heartbeat = frames, failure, limits, heartbeat
        # The length of a stream is not known.
        self.raw_headers = [item for item in self.raw_headers if item[0] != b"content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        wire = _Wire(send, {"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        pump = asyncio.create_task(self._pump(wire))
        helpers = [asyncio.create_task(_until_gone(receive)), asyncio.create_task(self._watch(wire))]
        try:
            await asyncio.wait({pump, *helpers}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _cancel([pump, *helpers])
            await self._frames.aclose()
        await self._finish(pump, wire, scope)

    async def _finish(self, pump: asyncio.Task[None], wire: _Wire, scope: Scope) -> None:
        if pump.cancelled():
            return  # nobody reads any more
        error = as_shown(pump.exception())
        if error is not None and not wire.started:
            raise error
        if error is not None:
            scope.setdefault("state", {})["error"] = error  # for the log and the numbers
        await self._write_in_time(wire, self._failure(error) if error else b"", last=True)

    async def _write_in_time(self, wire: _Wire, frame: bytes, *, last: bool = False) -> bool:
        """False where nobody took it."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._limits.write_timeout_s):
                await wire.write(frame, last=last)
                return True
        return False

    async def _pump(self, wire: _Wire) -> None:
        async for frame in self._frames:
            await wire.write(frame)
            # Where frames are always ready and the socket takes them, nothing above would ever let go.
            await asyncio.sleep(0)

    async def _watch(self, wire: _Wire) -> None:
        """Sends heartbeats; returns, which ends the stream, when a write is stuck for too long."""
        limits = self._limits
        tick_s = min(limits.heartbeat_s, limits.write_timeout_s) / 4
        while wire.stuck_s() < limits.write_timeout_s:
            await asyncio.sleep(tick_s)
            if self._heartbeat is None or wire.writing or wire.silent_s() < limits.heartbeat_s:
                continue
            if not await self._write_in_time(wire, self._heartbeat()):
                return


class _Wire:
    """One response being written, and how long ago it last moved."""

    def __init__(self, send: Send, start: Message) -> None:
        self._send, self._start = send, start
        self._now = asyncio.get_running_loop().time
        self._last = self._now()
        self._turn = asyncio.Lock()  # a heartbeat and a frame never mix
        self.started = False

    async def write(self, frame: bytes, *, last: bool = False) -> None:
        async with self._turn:
            self._last = self._now()
            if not self.started:
                self.started = True
                await self._send(self._start)
            await self._send({"type": "http.response.body", "body": frame, "more_body": not last})
            self._last = self._now()

    @property
    def writing(self) -> bool:
        return self._turn.locked()

    def silent_s(self) -> float:
        return self._now() - self._last

    def stuck_s(self) -> float:
        return self.silent_s() if self.writing else 0.0


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client leaves (then raises Cancelled)."""
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_until_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Cancelled("The client went away.")
        return task.result()
    finally:
        await _cancel([task, gone])


def as_shown(error: BaseException | None) -> MlxServeError | None:
    """The error a client sees; anything unforeseen is logged and becomes one plain sentence."""
    if error is None or isinstance(error, MlxServeError):
        return error
    log.error("Unforeseen error while answering", exc_info=error)
    return EngineFailed("The server failed while answering; its log says more.", code="internal_error")


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(tasks: list[asyncio.Task[Any]]) -> None:
    """Ends the tasks and waits for them; their errors are the caller's to look at."""
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled():
            task.exception()  # marks it as seen
