"""An engine whose next words the test dictates, a loader of such engines, and a real server around them.

Nothing here knows the server's insides: it implements `mlxserve.server.ports`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from tokenizers import Tokenizer as Backend

from mlxserve.config import ServerConfig
from mlxserve.engine.adapters import AdapterInfo
from mlxserve.errors import EngineStopped, ModelNotFound, Unsupported
from mlxserve.request import Delta, FinishReason, Metrics, Request, TokenLogprob
from mlxserve.server.app import make_app
from mlxserve.server.models import ModelRegistry
from mlxserve.server.ports import ModelCard, PullProgress, Trainer
from mlxserve.text.stream import TextStream
from mlxserve.text.tokenizer import Tokenizer
from tests import tiny

FILL = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>", "<|file_sep|>")

# The shape of Qwen's templates: tools in the system turn, calls and results as tags, a switch to think.
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n"
    "{% if messages[0].role == 'system' %}{{ messages[0].content }}\n\n{% endif %}"
    "# Tools\n<tools>\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}</tools>\n"
    'Answer with <tool_call>\n{"name": ..., "arguments": ...}\n</tool_call><|im_end|>\n'
    "{% elif messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n"
    "{% elif m.role == 'assistant' %}<|im_start|>assistant\n"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|im_end|>\n"
    "{% elif m.role != 'system' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


def make_tokenizer(template: str | None = TEMPLATE, *, fill: bool = True) -> Tokenizer:
    """Token i is byte i; ChatML markers, tags, and tokens to fill in the middle."""
    backend = Backend.from_str(json.dumps(tiny.byte_tokenizer_json()))
    if fill:
        backend.add_special_tokens(list(FILL))
    eos = backend.token_to_id("<|eos|>")
    return Tokenizer(backend, bos_token_id=256, eos_token_ids=[eos], chat_template=template)


Piece = str | float | Exception | asyncio.Event | FinishReason | Delta
Script = Sequence[Piece]


class StubEngine:
    """Says what `script` says: text pieces, pauses in seconds, errors, events to wait for, whole deltas.

    `script` may also be a function of the request. Text is followed by an end of turn, unless the script
    ends with a FinishReason. `seen` holds every request, `cancelled` the ids of those that were closed early.
    """

    def __init__(
        self,
        name: str = "stub",
        tokenizer: Tokenizer | None = None,
        context: int = 4096,
        defaults: Mapping[str, Any] | None = None,
        vectors: Callable[[Sequence[int]], list[float]] | None = None,
    ) -> None:
        self.name = name
        self.context = context
        self.tokenizer = tokenizer or make_tokenizer()
        self.generation_defaults = dict(defaults or {})
        self.script: Script | Callable[[Request], Script] = ["Hello", " there", "."]
        self.seen: list[Request] = []
        self.cancelled: list[str] = []
        self.loaded_adapters: dict[str, AdapterInfo] = {}
        self.running = 0
        self.closed = False
        self.dead = False
        self.cached_tokens = 0
        self.cache_limits: list[int] = []
        self._vectors = vectors

    async def generate(self, request: Request) -> AsyncGenerator[Delta, None]:
        self.seen.append(request)
        self.running += 1
        finished = False
        try:
            async for delta in self._deltas(request):
                finished = delta.finish_reason is not None
                yield delta
        finally:
            if not finished:
                self.cancelled.append(request.id)
            self.running -= 1

    async def _deltas(self, request: Request) -> AsyncGenerator[Delta, None]:
        text = TextStream(self.tokenizer, list(request.params.stop))
        script = self.script(request) if callable(self.script) else self.script
        made = 0
        limit = request.params.max_tokens
        assert limit is not None, "the server resolves the limit"
        for piece in script:
            if self.closed:
                raise EngineStopped("The engine was closed.")
            if isinstance(piece, FinishReason):
                yield self._last(request, text, made, piece)
                return
            if isinstance(piece, Delta):
                yield piece
                continue
            if not isinstance(piece, str):
                await self._pause(piece)
                continue
            ids = self.tokenizer.encode(piece, add_special_tokens=False)[: limit - made]
            made += len(ids)
            shown = "".join(map(text.push, ids))
            delta = Delta(shown, tuple(ids), tuple(_logprobs(ids, request.params.logprobs)))
            if text.stopped or made >= limit:
                reason = FinishReason.STOP if text.stopped else FinishReason.LENGTH
                yield self._with_end(delta, request, text, made, reason)
                return
            yield delta
        yield self._last(request, text, made, FinishReason.STOP)

    async def _pause(self, piece: float | Exception | asyncio.Event) -> None:
        if isinstance(piece, Exception):
            raise piece
        if isinstance(piece, asyncio.Event):
            await piece.wait()
        else:
            await asyncio.sleep(piece)
        if self.closed:
            raise EngineStopped("The engine was closed.")

    def _last(self, request: Request, text: TextStream, made: int, reason: FinishReason) -> Delta:
        return self._with_end(Delta(), request, text, made, reason)

    def _with_end(
        self, delta: Delta, request: Request, text: TextStream, made: int, reason: FinishReason
    ) -> Delta:
        metrics = Metrics(len(request.prompt), self.cached_tokens, made)
        rest = text.finish()
        return Delta(delta.text + rest, delta.token_ids, delta.logprobs, reason, metrics, text.stop)

    def stats(self) -> dict[str, float | int]:
        return {"queue": 0, "running": self.running, "pages_free": 100, "pages_total": 100}

    trouble: str | None = None

    @property
    def healthy(self) -> bool:
        return not self.dead

    @property
    def adapters(self) -> list[AdapterInfo]:
        return list(self.loaded_adapters.values())

    async def load_adapter(self, name: str, folder: Path) -> AdapterInfo:
        """Any folder called after the adapter is one."""
        if folder.name != name:
            raise ModelNotFound(f"There is no adapter folder {folder}.", param="adapter")
        self.loaded_adapters[name] = AdapterInfo(name, str(folder), "0" * 32, "lora", 8, 14, 1024)
        return self.loaded_adapters[name]

    async def drop_adapter(self, name: str) -> int:
        del self.loaded_adapters[name]
        return self.running

    async def embed(self, batch: Sequence[Sequence[int]], adapter: str | None = None) -> list[list[float]]:
        if self._vectors is None:
            raise Unsupported(f"{self.name} makes no embeddings.", param="model")
        return [self._vectors(ids) for ids in batch]

    async def limit_cache(self, limit_bytes: int) -> None:
        if self.dead:
            raise EngineStopped("The engine has stopped.")
        self.cache_limits.append(limit_bytes)

    async def close(self) -> None:
        self.closed = True


def _logprobs(ids: Sequence[int], top: int | None) -> list[TokenLogprob]:
    if top is None:
        return []
    return [TokenLogprob(i, -0.25, tuple(((i + k) % 256, -0.25 - k) for k in range(top))) for i in ids]


def bag_of_bytes(ids: Sequence[int]) -> list[float]:
    """A vector of eight numbers and length one, from token ids alone."""
    counts = [1.0 + sum(1 for i in ids if i % 8 == k) for k in range(8)]
    length = math.sqrt(sum(c * c for c in counts))
    return [c / length for c in counts]


@dataclass
class StubLoader:
    """Makes engines by name. `load_s` is how long a load takes, `fail` what it raises."""

    cards: dict[str, ModelCard] = field(default_factory=dict)
    engines: dict[str, StubEngine] = field(default_factory=dict)
    loads: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    load_s: float = 0.0
    fail: Exception | None = None

    def add(self, engine: StubEngine, needed_bytes: int = 100, **card: Any) -> StubEngine:
        self.engines[engine.name] = engine
        self.cards[engine.name] = ModelCard(
            engine.name,
            needed_bytes,
            size_bytes=needed_bytes,
            created=1_700_000_000,
            digest="sha256:" + "0" * 64,
            family="llama",
            parameters=134_515_008,
            quantization="F32",
            context=engine.context,
            template=engine.tokenizer.chat_template or "",
            **card,
        )
        return engine

    def catalogue(self) -> list[ModelCard]:
        return list(self.cards.values())

    def find(self, name: str) -> ModelCard:
        base = name.removesuffix(":latest")
        if base not in self.cards:
            raise ModelNotFound(f"There is no model '{name}'.", param="model")
        return self.cards[base]

    async def load(self, card: ModelCard) -> StubEngine:
        self.loads.append(card.name)
        await asyncio.sleep(self.load_s)
        if self.fail is not None:
            raise self.fail
        engine = self.engines[card.name]
        engine.closed = False
        return engine

    async def pull(self, name: str) -> AsyncGenerator[PullProgress, None]:
        if name == "missing":
            raise ModelNotFound(f"There is no model '{name}'.", param="model")
        yield PullProgress("pulling manifest")
        for done in (10, 40, 40):
            yield PullProgress("downloading", "sha256:1", 40, done)

    def remove(self, name: str) -> None:
        self.removed.append(self.find(name).name)


class RunningServer:
    """A real uvicorn on a free port of 127.0.0.1, in a thread of its own."""

    def __init__(
        self, loader: Any, config: ServerConfig, budget_bytes: int = 1000, trainer: Trainer | None = None
    ) -> None:
        self.loader, self.config, self._budget, self._trainer = loader, config, budget_bytes, trainer
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._ready.wait(60), "the server did not start"

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.models = ModelRegistry(
            self.loader,
            self._budget,
            keep_alive_s=self.config.keep_alive_s,
            load_wait_s=self.config.load_wait_s,
        )
        self.app = make_app(self.config, self.models, self._trainer)
        settings = uvicorn.Config(
            self.app, host="127.0.0.1", port=0, log_config=None, timeout_graceful_shutdown=1, lifespan="on"
        )
        self._server = uvicorn.Server(settings)
        main = asyncio.create_task(self._server.serve())
        while not self._server.started:
            await asyncio.sleep(0.005)
        self.port = self._server.servers[0].sockets[0].getsockname()[1]
        self._ready.set()
        await main

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def call(self, work: Callable[[], Any]) -> Any:
        """Runs a coroutine function on the server's loop."""
        return asyncio.run_coroutine_threadsafe(work(), self.loop).result(60)

    def tasks(self) -> int:
        """Tasks alive on the server's loop, beside its own."""

        async def count() -> int:
            return len(asyncio.all_tasks())

        found: int = self.call(count)
        return found

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(60)
        assert not self._thread.is_alive(), "the server did not stop"


@contextlib.contextmanager
def running(
    *engines: StubEngine, budget_bytes: int = 1000, loader: StubLoader | None = None, **config: Any
) -> Iterator[RunningServer]:
    """A server with these engines (by default one named 'stub')."""
    loader = loader or StubLoader()
    for engine in engines or (StubEngine(),):
        loader.add(engine)
    settings = {"heartbeat_s": 5.0, "keep_alive_s": None, **config}
    server = RunningServer(loader, ServerConfig(**settings), budget_bytes)
    try:
        yield server
    finally:
        server.stop()
