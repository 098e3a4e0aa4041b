"""`AsyncLLM`: the same engine for asyncio, one async iterator a request.

Knows: event loops and the worker. A step's news for all requests of a loop crosses over in one wake-up.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from mlxserve.config import DEFAULT_MODEL, EngineConfig, LoadConfig
from mlxserve.engine.adapters import AdapterInfo
from mlxserve.engine.beside import Beside, TrainingBase
from mlxserve.engine.engine import Engine
from mlxserve.engine.llm import Progress, open_worker
from mlxserve.engine.worker import Handle, Served
from mlxserve.errors import EngineStopped, MlxServeError, Unsupported
from mlxserve.models.share import shared_copy
from mlxserve.request import Delta, Request
from mlxserve.text.tokenizer import Tokenizer

News = Delta | MlxServeError
T = TypeVar("T")


class AsyncLLM:
    """An engine as asyncio code sees it. All its coroutines belong to the loop that `start` ran in."""

    def __init__(self, worker: Handle) -> None:
        self._worker = worker
        self._engine: Served = worker.engine
        self._mail = _Mailbox(asyncio.get_running_loop())

    @classmethod
    async def start(
        cls,
        model: str = DEFAULT_MODEL,
        *,
        load: LoadConfig = LoadConfig(),  # noqa: B008 (frozen)
        engine: EngineConfig = EngineConfig(),  # noqa: B008 (frozen)
        progress: Progress | None = None,
        on_death: Callable[[BaseException], None] | None = None,
    ) -> AsyncLLM:
        """Find, fetch and load a model without blocking the loop."""
        return cls(
            await asyncio.to_thread(open_worker, model, load, engine, progress=progress, on_death=on_death)
        )

    @property
    def name(self) -> str:
        return self._engine.loaded.name

    @property
    def context(self) -> int:
        return self._engine.loaded.context

    @property
    def tokenizer(self) -> Tokenizer:
        return self._engine.tokenizer

    @property
    def generation_defaults(self) -> Mapping[str, Any]:
        return self._engine.loaded.generation_defaults

    @property
    def config(self) -> Mapping[str, Any]:
        """The model's configuration."""
        return self._engine.loaded.config

    @property
    def notes(self) -> list[str]:
        """What was done other than asked, for people to read."""
        return list(self._engine.notes)

    @property
    def healthy(self) -> bool:
        return self._worker.healthy

    @property
    def trouble(self) -> str | None:
        """Why requests wait at the moment though they will be answered; None where nothing is wrong."""
        return self._worker.trouble

    def stats(self) -> dict[str, Any]:
        """Figures of the engine as of now; cheap, and safe beside a running step."""
        return self._engine.stats()

    async def generate(self, request: Request) -> AsyncGenerator[Delta, None]:
        """The request's deltas; the last has finish_reason. Closing the iterator cancels the request.

        Raises the engine's errors: PromptTooLong, DoesNotFit, Busy before the first delta; EngineFailed,
        EngineStopped at any time.
        """
        inbox: asyncio.Queue[News] = asyncio.Queue()
        self._worker.submit(request, lambda news: self._mail.send(inbox, news))
        done = False
        try:
            while not done:
                news = await inbox.get()
                done = isinstance(news, MlxServeError) or news.finish_reason is not None
                if isinstance(news, MlxServeError):
                    raise news
                yield news
        finally:
            if not done:
                self._worker.cancel(request.id)

    async def embed(self, batch: list[list[int]], adapter: str | None = None) -> list[list[float]]:
        """A vector for each sequence of token ids: the mean of the trunk's last hidden states, length 1.

        One sequence between two steps, so that running answers go on, and a caller who leaves stops it.
        """
        return [vector for ids in batch for vector in await self._embed([ids], adapter)]

    async def _embed(self, batch: list[list[int]], adapter: str | None) -> list[list[float]]:
        return await asyncio.wrap_future(self._worker.call(lambda engine: engine.embed(batch, adapter)))

    @property
    def adapters(self) -> list[AdapterInfo]:
        """The adapters that requests may name, as of now."""
        return self._engine.adapters.listed

    async def load_adapter(self, name: str, folder: Path) -> AdapterInfo:
        """Put an adapter on the model between two steps; see `Adapters.load`."""
        return await asyncio.wrap_future(self._worker.call(lambda engine: engine.adapters.load(name, folder)))

    async def drop_adapter(self, name: str) -> int:
        """Take its name away; how many answers still use it, and go on to their end."""
        return await asyncio.wrap_future(self._worker.call(lambda engine: engine.adapters.drop(name)))

    async def shared_copy(self) -> TrainingBase:
        """What a trainer needs of the model; its weights are the ones that are served."""
        return await asyncio.wrap_future(self._worker.call(_training_base))

    def beside(self, work: Callable[[Beside[T]], T]) -> Beside[T]:
        """Long work in turns with the engine's steps; see `Worker.beside`."""
        return self._worker.beside(work)

    async def limit_cache(self, limit_bytes: int) -> None:
        """As `Engine.limit_cache`; a limit that the configuration gave stays."""
        if self._engine.config.cache_bytes is None:
            await asyncio.wrap_future(self._worker.call(lambda engine: engine.limit_cache(limit_bytes)))

    async def close(self) -> None:
        """Stop the engine; running requests get EngineStopped."""
        await asyncio.to_thread(self._worker.close)


def _training_base(engine: Engine) -> TrainingBase:
    loaded = engine.loaded
    if not engine.adapters.alone:
        raise Unsupported("A model that several machines share is not fine-tuned here.", param="model")
    return TrainingBase(
        loaded.name, loaded.path, shared_copy(loaded.model), dict(loaded.config), engine.tokenizer
    )


class _Mailbox:
    """Letters from the worker's thread to one loop; many letters, one wake-up."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._letters: deque[tuple[asyncio.Queue[News], News]] = deque()
        self._lock = threading.Lock()
        self._awake = False

    def send(self, inbox: asyncio.Queue[News], news: News) -> None:
        """From any thread. After the loop has closed nobody listens, and letters are dropped."""
        with self._lock:
            self._letters.append((inbox, news))
            wake, self._awake = not self._awake, True
        if wake:
            try:
                self._loop.call_soon_threadsafe(self._deliver)
            except RuntimeError as error:
                if not self._loop.is_closed():
                    raise EngineStopped("The event loop does not take news.") from error

    def _deliver(self) -> None:
        with self._lock:
            letters, self._letters = self._letters, deque()
            self._awake = False
        for inbox, news in letters:
            inbox.put_nowait(news)
