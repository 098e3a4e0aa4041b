"""An embedding model serves many callers: in turns, within a bound, and to a clean end."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from mlxserve.engine import encoder as encoder_module
from mlxserve.engine.aio import AsyncLLM
from mlxserve.engine.encoder import MOST_TOGETHER, AsyncEncoder
from mlxserve.errors import Busy, EngineStopped, ModelInvalid, ModelNotFound
from tests import tiny
from tests.conftest import ROOT
from tests.models.test_bert import tiny_encoder

PROGRAM = """
import asyncio, sys
from pathlib import Path
from mlxserve.engine.encoder import AsyncEncoder

async def main():
    encoder = await AsyncEncoder.start(Path(sys.argv[1]))
    assert len((await encoder.embed([[3, 4]]))[0]) == 32
    if sys.argv[2] == "close":
        await encoder.close()

asyncio.run(main())
"""


class Gated:
    """Stands for a loaded model: a batch is done when the test opens the gate once."""

    name, context = "gated", 100

    def __init__(self) -> None:
        self.gate = threading.Semaphore(0)
        self.batches: list[list[list[int]]] = []

    def embed(self, batch: list[list[int]]) -> list[list[float]]:
        self.batches.append(batch)
        assert self.gate.acquire(timeout=60)
        return [[float(ids[0])] for ids in batch]


def with_gate(work: Callable[[AsyncEncoder, Gated], Awaitable[None]], max_queue: int = 8) -> None:
    async def main() -> None:
        model: Any = Gated()
        tokenizer: Any = None
        encoder = AsyncEncoder(model, tokenizer, encoder_module._Thread(), max_queue)
        try:
            await work(encoder, model)
        finally:
            model.gate.release(1000)
            await encoder.close()

    asyncio.run(main())


async def begun(model: Gated, batches: int) -> None:
    while len(model.batches) < batches:
        await asyncio.sleep(0.001)


LONG = [[i] for i in range(4 * MOST_TOGETHER)]


def test_a_long_call_does_not_hold_up_a_short_one() -> None:
    async def work(encoder: AsyncEncoder, model: Gated) -> None:
        long = asyncio.create_task(encoder.embed(LONG))
        await begun(model, 1)
        short = asyncio.create_task(encoder.embed([[7]]))
        await asyncio.sleep(0)
        assert encoder.stats() == {"queue": 1, "running": 1, "texts": 0}
        model.gate.release(2)
        assert await short == [[7.0]]
        assert not long.done()
        model.gate.release(3)
        assert await long == [[float(i)] for i in range(len(LONG))]
        assert encoder.stats() == {"queue": 0, "running": 0, "texts": len(LONG) + 1}

    with_gate(work)


def test_a_call_whose_caller_leaves_ends_with_its_batch() -> None:
    async def work(encoder: AsyncEncoder, model: Gated) -> None:
        long = asyncio.create_task(encoder.embed(LONG))
        await begun(model, 1)
        long.cancel()
        model.gate.release(1)
        model.gate.release(1)
        assert await encoder.embed([[5]]) == [[5.0]]
        assert [len(batch) for batch in model.batches] == [MOST_TOGETHER, 1]

    with_gate(work)


def test_the_queue_is_bounded() -> None:
    async def work(encoder: AsyncEncoder, model: Gated) -> None:
        calls = [asyncio.create_task(encoder.embed([[i]])) for i in range(3)]
        await begun(model, 1)
        with pytest.raises(Busy, match="gated"):
            await encoder.embed([[9]])
        model.gate.release(3)
        assert await asyncio.gather(*calls) == [[[0.0]], [[1.0]], [[2.0]]]

    with_gate(work, max_queue=2)


def test_closed_in_mid_call() -> None:
    async def work(encoder: AsyncEncoder, model: Gated) -> None:
        long = asyncio.create_task(encoder.embed(LONG))
        await begun(model, 1)
        closing = asyncio.create_task(encoder.close())
        await asyncio.sleep(0)
        model.gate.release(1)
        with pytest.raises(EngineStopped, match="gated"):
            await long
        await closing
        with pytest.raises(EngineStopped):
            await encoder.embed([[1]])

    with_gate(work)


def test_a_language_model_goes_on_with_its_answers_between_two_texts() -> None:
    class Worker:
        """Counts how many texts each of its turns is given."""

        engine: Any = None

        def __init__(self) -> None:
            self.turns: list[int] = []

        def embed(self, batch: list[list[int]], adapter: str | None) -> list[list[float]]:
            self.turns.append(len(batch))
            return [[float(len(ids))] for ids in batch]

        def call(self, work: Callable[[Any], Any]) -> Future[Any]:
            done: Future[Any] = Future()
            done.set_result(work(self))
            return done

    async def work() -> None:
        worker: Any = Worker()
        assert await AsyncLLM(worker).embed([[1], [1, 2], [1, 2, 3]]) == [[1.0], [2.0], [3.0]]
        assert worker.turns == [1, 1, 1]

    asyncio.run(work())


def test_its_thread_is_gone_for_the_system_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where loading fails."""
    gone: list[str] = []

    def join_fully(thread: threading.Thread) -> None:
        thread.join()
        gone.append(thread.name)

    monkeypatch.setattr(encoder_module, "join_fully", join_fully)

    async def work() -> None:
        await (await AsyncEncoder.start(folder)).close()
        assert len(gone) == 1
        with pytest.raises((ModelInvalid, ModelNotFound)):
            await AsyncEncoder.start(tmp_path / "nothing")
        assert len(gone) == 2

    folder = tiny.write_tokenizer(tiny_encoder(tmp_path / "e"))
    asyncio.run(work())
    assert not any(thread.name in gone for thread in threading.enumerate())


@pytest.mark.parametrize("end", ["close", "leave"])
def test_leaving_at_once_is_no_abort(end: str, tmp_path: Path) -> None:
    folder = tiny.write_tokenizer(tiny_encoder(tmp_path / "e"))
    settings = {**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder), end],
        capture_output=True,
        text=True,
        env=settings,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
