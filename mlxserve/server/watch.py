"""What happens around every request: an id, one line in the log, numbers, and a trace where wanted.

Knows: when a request began and ended and how. Does not look at texts; with log_prompts the handler's body is
logged as it came.
"""

from __future__ import annotations

import json
import logging
import time
import uuid
from typing import Any

from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlxserve.config import ServerConfig
from mlxserve.errors import MlxServeError
from mlxserve.server.generation import Run
from mlxserve.server.tracing import span

log = logging.getLogger("mlxserve.access")
_QUIET = frozenset({"/health", "/ready", "/metrics"})
_LOGGED_BODY_BYTES = 16_384


class Watch:
    """ASGI middleware, the outermost one."""

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self.app = app
        self._config = config

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        scope.setdefault("state", {})
        note = _Note(scope)

        async def watched_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                note.status = message["status"]
                tag = note.id.encode()
                message = {
                    **message,
                    "headers": [*message.get("headers", []), (b"x-request-id", tag), (b"request-id", tag)],
                }
            await send(message)

        heard = note.listen(receive) if self._config.log_prompts else receive
        with span(scope["method"], _route(scope), note) as finish:
            try:
                await self.app(scope, heard, watched_send)
            finally:
                self._record(scope, note)
                finish(note)

    def _record(self, scope: Scope, note: _Note) -> None:
        seconds = time.perf_counter() - note.started
        route = _route(scope)
        service = scope["app"].state.service
        service.metrics.request(route, note.status, seconds)
        error = scope["state"].get("error")
        if isinstance(error, MlxServeError):
            service.metrics.error(error.code)
        if scope["path"] in _QUIET:
            return
        level = logging.WARNING if note.status >= 500 else logging.INFO
        facts = note.facts(seconds, error)
        log.log(level, "%s", self._line(dict(facts)), extra={"facts": facts})

    def _line(self, facts: dict[str, Any]) -> str:
        if self._config.log_format == "json":
            return json.dumps(facts, ensure_ascii=False)
        head = f"{facts.pop('method')} {_one_word(facts.pop('path'))} {facts.pop('status')}"
        told = (f"{name}={_one_word(value)}" for name, value in facts.items() if value is not None)
        return " ".join([head, *told])


def _one_word(value: Any) -> str:
    """A caller's word as part of a line: quoted where it could be taken for other facts, or another line."""
    text = str(value)
    return text if text.isprintable() and " " not in text and '"' not in text else json.dumps(text)


class _Note:
    """What is known of one request. `status` stays 499 where the client left before an answer."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.id = f"req_{uuid.uuid4().hex[:24]}"
        self.started = time.perf_counter()
        self.status = 499
        self._body = bytearray()

    def listen(self, receive: Receive) -> Receive:
        async def heard() -> Message:
            message = await receive()
            if message["type"] == "http.request" and len(self._body) < _LOGGED_BODY_BYTES:
                self._body += message.get("body", b"")[:_LOGGED_BODY_BYTES]
            return message

        return heard

    @property
    def run(self) -> Run | None:
        run: Run | None = self.scope["state"].get("run")
        return run

    def facts(self, seconds: float, error: Any) -> dict[str, Any]:
        client = self.scope.get("client")
        facts: dict[str, Any] = {
            "method": self.scope["method"],
            "path": self.scope["path"],
            "status": self.status,
            "seconds": round(seconds, 4),
            "request": self.id,
            "client": client[0] if client else None,
            "model": self.scope["state"].get("model"),
        }
        if self.run is not None:
            usage = self.run.usage
            first = self.run.first_token_s
            facts["first_token_s"] = None if first is None else round(first, 4)
            facts["prompt_tokens"] = usage.prompt_tokens
            facts["cached_tokens"] = usage.cached_tokens
            facts["completion_tokens"] = usage.completion_tokens
        if isinstance(error, MlxServeError):
            facts["error"] = error.code
        if self._body:
            facts["body"] = bytes(self._body).decode("utf-8", "replace")
        return facts


def _route(scope: Scope) -> str:
    """The route's pattern, so that metrics have few labels; the same word for everything unknown."""
    for route in scope["app"].routes if "app" in scope else ():
        if route.matches(scope)[0] is not Match.NONE:
            return str(route.path)
    return "unknown"
