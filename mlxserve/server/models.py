"""Which models are loaded, and who may stay: on demand, by budget, by keep-alive.

Knows: names, sizes, uses and time. Does not know how a model is loaded (a Loader is handed in) or run.

What the models' weights leave of the memory is shared equally by their caches; it is shared anew whenever a
model comes or goes.

A model is *in use* while a request holds it; it is then never unloaded. Idle models leave when their
keep-alive ends, or, least recently used first, when another needs their memory. Pinned ones stay.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from pathlib import Path

from mlxserve.config import CACHE_SHARE
from mlxserve.errors import Busy, DoesNotFit, MlxServeError, ModelNotFound, UsageError
from mlxserve.server.book import AdapterBook, KnownAdapter
from mlxserve.server.dialogue import Dialogue
from mlxserve.server.ports import AsyncEngine, Loader, ModelCard

log = logging.getLogger("mlxserve.server")


@dataclass(slots=True, eq=False)
class Loaded:
    """One model in memory. Times are the clock's seconds; `expires_at` counts while `users` is 0.

    adapter: set on the copy that a request for `base@adapter` is lent.
    """

    card: ModelCard
    engine: AsyncEngine
    dialogue: Dialogue
    pinned: bool
    keep_alive_s: float
    loaded_at: float
    last_used: float
    load_s: float = 0.0
    users: int = 0
    retired: bool = False
    adapter: str | None = None

    def expires_in_s(self, now: float) -> float:
        return max(0.0, self.last_used + self.keep_alive_s - now)

    @property
    def evictable(self) -> bool:
        return self.users == 0 and not self.pinned


class ModelRegistry:
    """Loads, lends and unloads engines. All methods run on one event loop.

    budget_bytes: of all loaded models together. keep_alive_s: for models loaded on demand, None for
    ever. load_wait_s: how long a request waits for models in use to make room.
    """

    def __init__(
        self,
        loader: Loader,
        budget_bytes: int,
        *,
        keep_alive_s: float | None = 300.0,
        load_wait_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.loader = loader
        self.budget_bytes = budget_bytes
        self._keep_alive_s = math.inf if keep_alive_s is None else keep_alive_s
        self._load_wait_s = load_wait_s
        self._now = clock
        self._loaded: dict[str, Loaded] = {}
        self._aliases: dict[str, str] = {}
        self._changed = asyncio.Condition()
        self._one_at_a_time = asyncio.Lock()
        self._loading: dict[str, asyncio.Task[Loaded]] = {}
        self._closed = False
        self.default: str | None = None
        self.adapters = AdapterBook()

    # -- looking --------------------------------------------------------------------------------

    @property
    def loaded(self) -> list[Loaded]:
        """Loaded models, in the order of loading."""
        return list(self._loaded.values())

    @property
    def used_bytes(self) -> int:
        return sum(entry.card.needed_bytes for entry in self._loaded.values())

    @property
    def healthy(self) -> bool:
        return all(entry.engine.healthy for entry in self._loaded.values())

    @property
    def first(self) -> str:
        """The model that answers where the caller names none: the server's first, else any loaded one.

        Raises UsageError where there is none.
        """
        if self.default is not None:
            return self.default
        for name in self._loaded:
            return name
        raise UsageError("'model' is required: none is loaded.", param="model", code="missing_field")

    async def catalogue(self) -> list[ModelCard]:
        """Loaded models first, then those that could be loaded; each with its adapters behind it."""
        known = {entry.card.name: entry.card for entry in self._loaded.values()}
        for card in await asyncio.to_thread(self.loader.catalogue):
            known.setdefault(card.name, card)
        return [each for card in known.values() for each in (card, *self._adapted_cards(card))]

    def _adapted_cards(self, card: ModelCard) -> list[ModelCard]:
        return [_adapted_card(card, known) for known in self.adapters.listed(card.name)]

    async def card(self, name: str) -> ModelCard:
        """Raises ModelNotFound."""
        base, adapter = await self._split(name)
        entry = self._entry(base)
        card = entry.card if entry else await asyncio.to_thread(self.loader.find, base)
        known = self.adapters.find(card.name, adapter) if adapter else None
        return _adapted_card(card, known) if known else card

    def _entry(self, name: str) -> Loaded | None:
        return self._loaded.get(self._aliases.get(name, name))

    # -- lending --------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def use(self, name: str, *, keep_alive_s: float | None = None) -> AsyncIterator[Loaded]:
        """Lends a model, loading it first where needed; `keep_alive_s` replaces its keep-alive.

        name: a model's, or `base@adapter`. Raises ModelNotFound, DoesNotFit (both numbers), Busy where models
        in use leave no room.
        """
        base, adapter = await self._split(name)
        entry = await self.acquire(base, keep_alive_s=keep_alive_s)
        try:
            yield entry if adapter is None else await self._through(entry, adapter)
        finally:
            await self.release(entry)

    async def acquire(self, name: str, *, keep_alive_s: float | None = None) -> Loaded:
        """As `use`, for callers that give the model back themselves with `release`."""
        entry = self._entry(name)
        while entry is None or entry.retired:
            entry = await self._load(name)
        entry.users += 1
        entry.last_used = self._now()
        if keep_alive_s is not None:
            entry.keep_alive_s = keep_alive_s
        return entry

    async def release(self, entry: Loaded) -> None:
        entry.users -= 1
        entry.last_used = self._now()
        async with self._changed:
            self._changed.notify_all()
        if entry.users == 0 and entry.keep_alive_s <= 0:
            await self._unload_if_idle(entry)

    async def preload(self, name: str, *, pinned: bool = False) -> Loaded:
        """Loads a model to stay: it has no keep-alive, and if pinned is never unloaded."""
        entry = await self.acquire(name, keep_alive_s=math.inf)
        entry.pinned = entry.pinned or pinned
        await self.release(entry)
        self.default = self.default or entry.card.name
        return entry

    def idle_s(self, entry: Loaded) -> float:
        """Seconds that an idle model has left; in use, what it will have then."""
        return entry.keep_alive_s if entry.users else entry.expires_in_s(self._now())

    async def remove(self, name: str) -> None:
        """Deletes a downloaded model. Raises ModelNotFound, and Busy while it is answering."""
        entry = self._entry(name)
        if entry is not None and not await self._unload_if_idle(entry):
            raise Busy(f"{name} is in use.", retry_after_s=10.0)
        await asyncio.to_thread(self.loader.remove, name)

    async def unload(self, name: str) -> bool:
        """Unloads a model: an idle one now, one in use with its last answer (then False, as if not loaded)."""
        entry = self._entry(name)
        if entry is None:
            return False
        if not entry.pinned:
            entry.keep_alive_s = 0.0
        return await self._unload_if_idle(entry)

    # -- adapters -------------------------------------------------------------------------------

    async def _split(self, name: str) -> tuple[str, str | None]:
        """(base, adapter) of `base@adapter`; a Hub name's @revision is no adapter.

        Raises ModelNotFound, naming the base's adapters, for an unknown one.
        """
        left, at, right = name.removesuffix(":latest").rpartition("@")
        if not at or self._entry(name) is not None:
            return name, None
        if self.adapters.find(self._aliases.get(left, left), right) is not None:
            return left, right
        with contextlib.suppress(MlxServeError):
            await asyncio.to_thread(self.loader.find, name)
            return name, None
        base = await asyncio.to_thread(self.loader.find, left)
        if self.adapters.find(base.name, right) is None:
            there = ", ".join(known.name for known in self.adapters.listed(base.name)) or "none"
            raise ModelNotFound(
                f"{base.name} has no adapter '{right}'; there are: {there}.",
                param="model",
                code="adapter_not_found",
            )
        return left, right

    async def _through(self, entry: Loaded, adapter: str) -> Loaded:
        """The model as its adapter speaks, which is put on the engine if it is not there."""
        known = self.adapters.find(entry.card.name, adapter)
        if known is None:
            raise ModelNotFound(f"{entry.card.name} has no adapter '{adapter}' any more.", param="model")
        if not self.has_loaded(known):
            known.info = await entry.engine.load_adapter(known.name, known.folder)
        return replace(entry, adapter=adapter)

    def has_loaded(self, known: KnownAdapter) -> bool:
        entry = self._loaded.get(known.base)
        return entry is not None and any(info.name == known.name for info in entry.engine.adapters)

    async def load_adapter(self, base: str, name: str, folder: Path) -> KnownAdapter:
        """Puts an adapter on a model, which is loaded where needed, and remembers it for the next load.

        Raises what the engine does where it does not fit; then nothing is remembered.
        """
        async with self.use(base) as entry:
            info = await entry.engine.load_adapter(name, folder)
            known = KnownAdapter(entry.card.name, name, folder, info=info)
            self.adapters.add(known)
            log.info("loaded adapter %s", known.id)
        return known

    async def drop_adapter(self, known: KnownAdapter) -> int:
        """Forgets an adapter; how many answers still use it. They go on to their end."""
        self.adapters.remove(known)
        entry = self._loaded.get(known.base)
        return await entry.engine.drop_adapter(known.name) if entry and self.has_loaded(known) else 0

    # -- loading --------------------------------------------------------------------------------

    async def _load(self, name: str) -> Loaded:
        card = await asyncio.to_thread(self.loader.find, name)
        self._aliases[name] = card.name
        entry = self._loaded.get(card.name)
        if entry is not None:
            return entry
        task = self._loading.get(card.name)
        if task is None:
            task = asyncio.create_task(self._load_card(card))
            self._loading[card.name] = task
            task.add_done_callback(lambda done: self._loaded_or_not(card.name, done))
        # One caller who leaves does not undo the others' load.
        return await asyncio.shield(task)

    def _loaded_or_not(self, name: str, done: asyncio.Task[Loaded]) -> None:
        self._loading.pop(name, None)
        if not done.cancelled() and (error := done.exception()) is not None:
            log.error("loading %s: %s", name, error)

    async def _load_card(self, card: ModelCard) -> Loaded:
        async with self._one_at_a_time:
            return await self._load_now(card)

    async def _load_now(self, card: ModelCard) -> Loaded:
        started = self._now()
        await self._make_room(card)
        await self._share_memory(card)
        try:
            engine = await self.loader.load(card)
        except Exception:
            await self._share_memory()  # what the others gave up for it
            raise
        now = self._now()
        entry = Loaded(
            card,
            engine,
            Dialogue(engine.tokenizer),
            False,
            self._keep_alive_s,
            now,
            now,
            load_s=now - started,
        )
        self._loaded[card.name] = entry
        if self._closed:
            await self._drop(entry)
            raise Busy("The server is shutting down.")
        await self._share_memory()
        log.info("loaded %s in %.1f s", card.name, entry.load_s)
        return entry

    async def _make_room(self, card: ModelCard) -> None:
        """Unloads idle models until `card` fits; waits for those in use, up to a limit."""
        pinned = sum(entry.card.needed_bytes for entry in self._loaded.values() if entry.pinned)
        if card.needed_bytes > self.budget_bytes - pinned:
            raise _does_not_fit(card, self.budget_bytes - pinned, pinned)
        deadline = asyncio.get_running_loop().time() + self._load_wait_s
        while self.used_bytes + card.needed_bytes > self.budget_bytes:
            victim = min(
                (entry for entry in self._loaded.values() if entry.evictable),
                key=lambda entry: entry.last_used,
                default=None,
            )
            if victim is not None:
                await self._unload_if_idle(victim)
            else:
                await self._wait_for_change(deadline, card)

    async def _wait_for_change(self, deadline: float, card: ModelCard) -> None:
        try:
            async with asyncio.timeout_at(deadline), self._changed:
                await self._changed.wait()
        except TimeoutError:
            free = self.budget_bytes - self.used_bytes
            raise Busy(
                f"{card.name} needs {card.needed_bytes} bytes, {free} are free, "
                "and the models that hold the rest are answering.",
                retry_after_s=5.0,
            ) from None

    # -- unloading ------------------------------------------------------------------------------

    async def _unload_if_idle(self, entry: Loaded) -> bool:
        if not entry.evictable or entry.retired:
            return False
        await self._drop(entry)
        log.info("unloaded %s", entry.card.name)
        return True

    async def _drop(self, entry: Loaded) -> None:
        entry.retired = True
        if self._loaded.get(entry.card.name) is entry:
            del self._loaded[entry.card.name]
        try:
            await entry.engine.close()
        finally:
            if not self._closed:
                await self._share_memory()
            async with self._changed:
                self._changed.notify_all()

    async def _share_memory(self, coming: ModelCard | None = None) -> None:
        """Let every cache take an equal part of what the loaded models and the coming one leave."""
        cards = [entry.card for entry in self.loaded] + ([coming] if coming else [])
        left = max(self.budget_bytes - sum(card.needed_bytes for card in cards), 0)
        for entry in self.loaded:
            part = int(left * CACHE_SHARE) // len(cards)
            try:
                await entry.engine.limit_cache(entry.card.cache_bytes + part)
            except MlxServeError as error:  # its own callers are told why
                log.error("limiting the cache of %s: %s", entry.card.name, error)

    async def expire(self) -> list[str]:
        """Unloads what has been idle for its keep-alive; returns the names. Called by the clock."""
        now = self._now()
        old = [entry for entry in self.loaded if entry.expires_in_s(now) <= 0]
        return [entry.card.name for entry in old if await self._unload_if_idle(entry)]

    async def close(self) -> None:
        """Ends every engine; answers in progress end with EngineStopped."""
        self._closed = True
        for task in list(self._loading.values()):
            task.cancel()
        for entry in self.loaded:
            try:
                await self._drop(entry)
            except MlxServeError as error:
                log.error("closing %s: %s", entry.card.name, error)


def _adapted_card(card: ModelCard, known: KnownAdapter) -> ModelCard:
    info = known.info
    size = info.nbytes if info else 0
    digest = f"{card.digest}@{info.digest}" if info else card.digest
    return replace(
        card,
        name=known.id,
        created=known.created,
        size_bytes=card.size_bytes + size,
        digest=digest,
        parent=card.name,
    )


def _does_not_fit(card: ModelCard, available: int, pinned: int) -> DoesNotFit:
    note = f" ({pinned} more are pinned)" if pinned else ""
    return DoesNotFit(
        f"{card.name} needs {card.needed_bytes} bytes of memory and {available} are available{note}.",
        needed_bytes=card.needed_bytes,
        available_bytes=available,
    )
