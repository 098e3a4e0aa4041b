"""Those who answer in the tests: a target on a clock of its own, and a server that sends given frames."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from mlxserve.bench.target import Ask, Heard, Totals
from mlxserve.errors import MlxServeError


class FakeTarget:
    """Answers each prompt with `tokens` words; prompts that hold "refuse" fail. One token a word, and four
    more for the template, so that a word is a token exactly."""

    kind = "fake"
    name = "fake"

    def __init__(self, context: int | None = None, answer: str = "yes ") -> None:
        self.context = context
        self.answer = answer
        self.asked: list[Ask] = []
        self.running = self.most_running = 0

    async def ask(self, question: Ask, heard: Heard) -> Totals:
        self.asked.append(question)
        if "refuse" in str(question.messages):
            raise MlxServeError("It is refused.")
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        for _ in range(question.max_tokens):
            await asyncio.sleep(0)
            heard(self.answer, 1)
        self.running -= 1
        words = sum(len(message["content"].split()) for message in question.messages)
        return Totals(words + 4, question.max_tokens, 0, "length")

    async def peak_bytes(self) -> int | None:
        return 1 << 20

    async def close(self) -> None:
        """There is nothing to close."""


Reply = tuple[int, Sequence[Any]]


@contextmanager
def scripted(
    reply: Callable[[dict[str, Any]], Reply], models: Any = None
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server whose answers `reply` dictates: a status, and SSE frames (objects, or text sent as it is).

    models: what /v1/models answers; None for 404. Yields the address, and every body and key it was sent.
    """
    seen: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status = 404 if models is None else models if isinstance(models, int) else 200
            self._send(status, "application/json", json.dumps(models))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            seen.append({"path": self.path, "key": self.headers["authorization"], **body})
            status, frames = reply(body)
            texts = (f if isinstance(f, str) else f"data: {json.dumps(f)}\n\n" for f in frames)
            self._send(status, "text/event-stream", "".join(texts))

        def _send(self, status: int, kind: str, text: str) -> None:
            self.send_response(status)
            self.send_header("content-type", kind)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *args: Any) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", seen
    finally:
        server.shutdown()
        server.server_close()


def piece(text: str, finish: str | None = None, **fields: Any) -> dict[str, Any]:
    """A chunk of a chat completion with one choice."""
    delta = {"content": text, **fields}
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}
