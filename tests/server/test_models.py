"""Which models are loaded: on demand, least recently used, keep-alive, pins, and the budget."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable

import pytest

from mlxserve.errors import Busy, DoesNotFit, ModelInvalid, ModelNotFound
from mlxserve.server import app as app_module
from mlxserve.server.models import ModelRegistry
from tests.server.stub import StubEngine, StubLoader, make_tokenizer, running
from tests.server.test_conduct import eventually


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def world(
    sizes: dict[str, int], budget: int = 100, *, cache_bytes: int = 0, **settings: float
) -> tuple[ModelRegistry, StubLoader, Clock]:
    loader, clock, tokenizer = StubLoader(), Clock(), make_tokenizer()
    for name, size in sizes.items():
        loader.add(StubEngine(name, tokenizer), needed_bytes=size, cache_bytes=cache_bytes)
    return ModelRegistry(loader, budget, clock=clock, load_wait_s=0.05, **settings), loader, clock


def names(models: ModelRegistry) -> list[str]:
    return [entry.card.name for entry in models.loaded]


def run(work: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(work())


def test_loads_once_for_many() -> None:
    async def work() -> None:
        models, loader, _ = world({"a": 10})
        loader.load_s = 0.02

        async def one() -> None:
            async with models.use("a") as entry:
                assert entry.engine.name == "a"

        await asyncio.gather(*(one() for _ in range(8)))
        assert loader.loads == ["a"]

    run(work)


def test_least_recently_used_leaves_first() -> None:
    async def work() -> None:
        models, loader, clock = world({"a": 40, "b": 40, "c": 40})
        for name in ("a", "b"):
            clock.now += 1
            async with models.use(name):
                pass
        clock.now += 1
        async with models.use("a"):
            pass
        async with models.use("c"):
            assert names(models) == ["a", "c"]
        assert loader.engines["b"].closed
        assert models.used_bytes <= models.budget_bytes

    run(work)


def test_too_large_is_refused_with_both_numbers() -> None:
    async def work() -> None:
        models, loader, _ = world({"a": 40, "huge": 101})
        async with models.use("a"):
            pass
        with pytest.raises(DoesNotFit) as caught:
            await models.acquire("huge")
        assert (caught.value.needed_bytes, caught.value.available_bytes) == (101, 100)
        assert "101" in str(caught.value)
        assert "100" in str(caught.value)
        assert names(models) == ["a"]  # nothing was given up for it

    run(work)


def test_pinned_models_stay() -> None:
    async def work() -> None:
        models, _, _ = world({"a": 60, "b": 60})
        await models.preload("a", pinned=True)
        with pytest.raises(DoesNotFit) as caught:
            await models.acquire("b")
        assert caught.value.available_bytes == 40
        assert not await models.unload("a")
        assert names(models) == ["a"]

    run(work)


def test_never_evicted_in_mid_answer() -> None:
    async def work() -> None:
        models, loader, _ = world({"a": 60, "b": 60})
        entry = await models.acquire("a")
        with pytest.raises(Busy) as caught:
            await models.acquire("b")
        assert caught.value.retry_after_s > 0
        assert not loader.engines["a"].closed
        assert not await models.unload("a")

        waiting = asyncio.create_task(models.acquire("b"))
        await asyncio.sleep(0.01)
        await models.release(entry)  # the waiting one gets its room now
        assert (await waiting).card.name == "b"
        assert loader.engines["a"].closed

    run(work)


def test_keep_alive() -> None:
    async def work() -> None:
        models, _, clock = world({"a": 10, "b": 10, "c": 10}, keep_alive_s=300)
        await models.preload("c")
        async with models.use("a"):
            clock.now = 1000
            assert await models.expire() == []  # in use
        async with models.use("b", keep_alive_s=math.inf):
            pass
        clock.now = 1299
        assert await models.expire() == []
        clock.now = 1300
        assert await models.expire() == ["a"]
        clock.now = 1e9
        assert await models.expire() == []
        async with models.use("b", keep_alive_s=0):
            pass
        assert names(models) == ["c"]

    run(work)


def test_a_failed_load_leaves_nothing() -> None:
    async def work() -> None:
        models, loader, _ = world({"a": 10})
        loader.fail = ModelInvalid("broken")
        with pytest.raises(ModelInvalid):
            await models.acquire("a")
        with pytest.raises(ModelNotFound):
            await models.acquire("nobody")
        assert names(models) == []
        loader.fail = None
        await models.acquire("a")

    run(work)


def test_a_caller_that_leaves_does_not_undo_the_others_load() -> None:
    async def work() -> None:
        models, loader, _ = world({"a": 10})
        loader.load_s = 0.05
        first = asyncio.create_task(models.acquire("a"))
        second = asyncio.create_task(models.acquire("a"))
        await asyncio.sleep(0.01)
        first.cancel()
        assert (await second).users == 1
        assert loader.loads == ["a"]

    run(work)


def test_other_names_for_one_model() -> None:
    async def work() -> None:
        models, loader, _ = world({"a": 10})
        async with models.use("a"), models.use("a:latest") as entry:
            assert entry.users == 2
        assert loader.loads == ["a"]

    run(work)


def test_asked_to_leave_in_mid_answer_it_leaves_after_it() -> None:
    async def work() -> None:
        models, loader, _ = world({"a": 10, "b": 10}, keep_alive_s=None)
        async with models.use("a"):
            assert not await models.unload("a")
            assert names(models) == ["a"]
        assert names(models) == []
        await models.preload("b", pinned=True)
        assert not await models.unload("b")
        async with models.use("b"):
            pass
        assert names(models) == ["b"]
        assert math.isinf(models.idle_s(models.loaded[0]))

    run(work)


def test_a_failed_load_gives_the_others_their_memory_back() -> None:
    async def work() -> None:
        models, loader, _ = world({"a": 20, "b": 30}, keep_alive_s=None)
        await models.preload("a")
        whole = loader.engines["a"].cache_limits[-1]
        loader.fail = ModelInvalid("damaged")
        with pytest.raises(ModelInvalid):
            await models.preload("b")
        assert min(loader.engines["a"].cache_limits) < whole
        assert loader.engines["a"].cache_limits[-1] == whole

    run(work)


def test_one_engine_that_cannot_be_closed_does_not_stop_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken() -> None:
        raise RuntimeError("stuck")

    monkeypatch.setattr(app_module, "EXPIRE_TICK_S", 0.01)
    bad, good = StubEngine("bad"), StubEngine("good")
    monkeypatch.setattr(bad, "close", broken)
    with running(bad, good) as server:

        async def load() -> None:
            for name in ("bad", "good"):
                async with server.models.use(name, keep_alive_s=0.02):
                    pass

        server.call(load)
        eventually(lambda: not server.models.loaded, "the clock stopped")
        assert good.closed


def test_close_ends_everything() -> None:
    async def work() -> None:
        models, loader, _ = world({"a": 10, "b": 10})
        await models.acquire("a")
        loader.load_s = 5
        waiting = asyncio.create_task(models.acquire("b"))
        await asyncio.sleep(0.01)
        await models.close()
        assert loader.engines["a"].closed
        with pytest.raises(asyncio.CancelledError):
            await waiting

    run(work)


def test_caches_share_what_weights_leave() -> None:
    async def work() -> None:
        models, loader, _ = world({"a": 20, "b": 30}, cache_bytes=5)
        for name in ("a", "b"):
            async with models.use(name):
                pass
        # Of 100: alone 80 are left to a, before b is loaded 50 to both; four fifths of that for caches.
        assert loader.engines["a"].cache_limits == [5 + 64, 5 + 20, 5 + 20]
        assert loader.engines["b"].cache_limits == [5 + 20]
        await models.unload("b")
        assert loader.engines["a"].cache_limits[-1] == 5 + 64

    run(work)


def test_an_engine_that_is_gone_does_not_hinder_the_others() -> None:
    async def work() -> None:
        models, loader, _ = world({"a": 20, "b": 30})
        async with models.use("a"):
            pass
        loader.engines["a"].dead = True
        async with models.use("b"):
            assert loader.engines["b"].cache_limits == [20]

    run(work)
