"""`AsyncEncoder`: an embedding model behind the same face as a language model.

Knows: asyncio, and one thread that owns the model's arrays. Does not know HTTP, nor which special tokens go
around a text (`Tokenizer.encode_for_embedding`). It generates nothing and says so.

Calls take turns batch by batch, so that a long one does not hold up the others; one whose caller leaves ends
with the batch it is in.
"""

from __future__ import annotations

import asyncio
import atexit
import threading
from collections.abc import AsyncGenerator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from mlxserve.config import EngineConfig
from mlxserve.engine.adapters import AdapterInfo
from mlxserve.engine.beside import Beside, TrainingBase
from mlxserve.engine.threads import join_fully
from mlxserve.errors import Busy, EngineStopped, ModelNotFound, PromptTooLong, Unsupported
from mlxserve.models.bert import LoadedEncoder, load_encoder
from mlxserve.request import Delta, Request
from mlxserve.text.tokenizer import Tokenizer, load_tokenizer

MOST_TOGETHER = 32
T = TypeVar("T")


class _Thread:
    """One thread for all of a model's work. Ended or not, it never meets an interpreter that is going down."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="mlxserve-encoder")
        self._thread = self._pool.submit(threading.current_thread).result()
        atexit.register(self._join)  # after Python has told its pools to end

    async def run(self, work: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work, *arguments)

    def end(self) -> None:
        """Do what is waiting, then stop; returns when the thread is gone."""
        self._pool.shutdown()
        self._join()
        atexit.unregister(self._join)

    def _join(self) -> None:
        join_fully(self._thread)


class AsyncEncoder:
    """A BERT-like model; `embed` is all it does. Texts of one call run in batches of similar length."""

    def __init__(self, loaded: LoadedEncoder, tokenizer: Tokenizer, thread: _Thread, max_queue: int) -> None:
        self._loaded = loaded
        self._thread = thread
        self._max_queue = max_queue
        self._open = True
        self.tokenizer = tokenizer
        self._calls = self._texts = 0

    @classmethod
    async def start(
        cls, folder: Path, *, name: str | None = None, max_queue: int = EngineConfig().max_queue
    ) -> AsyncEncoder:
        """Load an encoder on a thread of its own, which all its work stays on.

        max_queue: calls that may wait beside the one that runs, before Busy.
        """
        thread = _Thread()
        try:
            loaded = await thread.run(lambda: load_encoder(folder, name=name))
            return cls(loaded, await asyncio.to_thread(load_tokenizer, folder), thread, max_queue)
        except BaseException:
            await asyncio.to_thread(thread.end)
            raise

    @property
    def name(self) -> str:
        return self._loaded.name

    @property
    def context(self) -> int:
        """Tokens a text may have, with the special ones around it."""
        return self._loaded.context

    @property
    def generation_defaults(self) -> Mapping[str, Any]:
        return {}

    @property
    def config(self) -> Mapping[str, Any]:
        return self._loaded.config

    @property
    def healthy(self) -> bool:
        return self._open

    @property
    def trouble(self) -> str | None:
        return None

    def stats(self) -> dict[str, Any]:
        return {"queue": max(self._calls - 1, 0), "running": min(self._calls, 1), "texts": self._texts}

    async def generate(self, request: Request) -> AsyncGenerator[Delta, None]:
        """Raises Unsupported: this is an embedding model."""
        raise Unsupported(f"{self.name} is an embedding model; it generates no text.", param="model")
        yield Delta()

    @property
    def adapters(self) -> list[AdapterInfo]:
        return []

    async def load_adapter(self, name: str, folder: Path) -> AdapterInfo:
        """Raises Unsupported: adapters are for language models."""
        raise Unsupported(f"{self.name} is an embedding model; it takes no adapters.", param="model")

    async def drop_adapter(self, name: str) -> int:
        raise ModelNotFound(f"{self.name} has no adapter '{name}'.", param="model")

    async def shared_copy(self) -> TrainingBase:
        """Raises Unsupported: the trainer is for language models."""
        raise Unsupported(f"{self.name} is an embedding model; it cannot be fine-tuned.", param="model")

    def beside(self, work: Callable[[Beside[T]], T]) -> Beside[T]:
        raise Unsupported(f"{self.name} is an embedding model; nothing runs beside it.", param="model")

    async def embed(self, batch: list[list[int]], adapter: str | None = None) -> list[list[float]]:
        """One vector of length 1 for each text's token ids.

        Raises PromptTooLong beyond `context`, Busy where too many calls wait, EngineStopped once closed.
        """
        if adapter is not None:
            raise ModelNotFound(f"{self.name} has no adapter '{adapter}'.", param="model")
        long = next((ids for ids in batch if len(ids) > self.context), None)
        if long is not None:
            raise PromptTooLong(
                f"The input has {len(long)} tokens; {self.name} reads {self.context}.",
                needed=len(long),
                limit=self.context,
            )
        if self._calls > self._max_queue:
            raise Busy(f"{self._calls - 1} calls wait for {self.name}, and no more may.")
        self._calls += 1
        try:
            return await self._in_batches(batch)
        finally:
            self._calls -= 1

    async def _in_batches(self, batch: list[list[int]]) -> list[list[float]]:
        order = sorted(range(len(batch)), key=lambda i: len(batch[i]))
        vectors: dict[int, list[float]] = {}
        for first in range(0, len(order), MOST_TOGETHER):
            if not self._open:
                raise EngineStopped(f"{self.name} was closed.")
            chosen = order[first : first + MOST_TOGETHER]
            made = await self._thread.run(self._loaded.embed, [batch[i] for i in chosen])
            vectors.update(zip(chosen, made))
            self._texts += len(chosen)
        return [vectors[i] for i in range(len(batch))]

    async def limit_cache(self, limit_bytes: int) -> None:
        """An encoder keeps nothing between texts, whatever it may."""

    async def close(self) -> None:
        """Calls in progress get EngineStopped, behind the batch that runs."""
        self._open = False
        await asyncio.to_thread(self._thread.end)
