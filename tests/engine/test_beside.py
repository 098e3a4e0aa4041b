"""Work beside the engine: it takes turns, lets streams through, shares weights, and ends when told."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlxserve.engine.beside import Beside
from mlxserve.engine.worker import Worker
from mlxserve.errors import Cancelled, EngineStopped
from mlxserve.models.adapters import Adapter
from mlxserve.models.multilora import AdapterStack
from mlxserve.models.share import shared_copy
from tests import tiny
from tests.engine import harness


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker(lambda: harness.engine("llama", gap_target_s=0.05))
    yield made
    made.close()


def _submit(worker: Worker, count: int) -> tuple[harness.Answer, threading.Event]:
    answer, ended = harness.Answer(), threading.Event()

    def sink(news: Any) -> None:
        answer(news)
        if getattr(news, "finish_reason", True) is not None:
            ended.set()

    worker.submit(harness.request([1, 2, 3], count), sink)
    return answer, ended


def test_an_answer_beside_work_is_the_same(worker: Worker) -> None:
    limits: list[float | None] = []

    def work(seat: Beside[int]) -> int:
        x = mx.array(0)
        for _ in range(200):
            x = x + 1
            mx.eval(x)
            limits.append(seat.pause())
        return int(x)

    seat = worker.beside(work)
    answer, ended = _submit(worker, 60)
    assert ended.wait(60) and seat.future.result(60) == 200
    assert answer.tokens == harness.solo_tokens("llama", [1, 2, 3], 60)
    assert set(limits) == {0.05, None} or set(limits) == {None}


def test_streams_get_at_least_half_of_the_time(worker: Worker) -> None:
    """A turn of 20 ms is followed by 20 ms of steps, as long as there is something to answer."""
    turns: list[tuple[float, float, bool]] = []

    def work(seat: Beside[None]) -> None:
        limit = seat.pause()
        while len(turns) < 6:
            began = time.monotonic()
            time.sleep(0.02)
            turns.append((began, time.monotonic(), limit is not None))
            limit = seat.pause()

    _, ended = _submit(worker, 1500)
    seat = worker.beside(work)
    seat.future.result(60)
    for (_, end, busy), (begin, _, _) in zip(turns[1:], turns[2:]):
        if busy and not ended.is_set():
            assert begin - end >= 0.019
    assert any(busy for *_, busy in turns)


def test_work_waits_in_line_and_can_be_stopped(worker: Worker) -> None:
    def for_ever(seat: Beside[None]) -> None:
        while True:
            seat.pause(0.001)

    first, second = worker.beside(for_ever), worker.beside(lambda seat: "second")
    time.sleep(0.05)
    assert not second.future.done()
    first.stop()
    with pytest.raises(Cancelled):
        first.future.result(60)
    assert second.future.result(60) == "second"


def test_what_fails_fails_alone(worker: Worker) -> None:
    def fails(seat: Beside[None]) -> None:
        seat.pause()
        raise ValueError("rows")

    with pytest.raises(ValueError, match="rows"):
        worker.beside(fails).future.result(60)
    answer, ended = _submit(worker, 4)
    assert ended.wait(60) and answer.tokens == harness.solo_tokens("llama", [1, 2, 3], 4)


def test_closing_the_engine_ends_the_work() -> None:
    worker = Worker(lambda: harness.engine("llama"))

    def for_ever(seat: Beside[None]) -> None:
        while True:
            seat.pause(0.5)

    seats = [worker.beside(for_ever), worker.beside(for_ever)]
    time.sleep(0.02)
    worker.close()
    for seat in seats:
        with pytest.raises(Cancelled):
            seat.future.result(60)
    with pytest.raises(EngineStopped):
        worker.beside(for_ever)


def test_resting_work_leaves_the_processor_alone(worker: Worker) -> None:
    turns = []

    def rests(seat: Beside[None]) -> None:
        for _ in range(3):
            turns.append(time.monotonic())
            seat.pause(0.05)

    worker.beside(rests).future.result(60)
    assert turns[1] - turns[0] >= 0.045 and turns[2] - turns[1] >= 0.045


def test_a_shared_copy_is_the_same_weights_apart() -> None:
    model = tiny.build("llama")
    tokens = mx.array([[1, 2, 3, 4]])
    plain = np.array(model(tokens))
    stack = AdapterStack(model, mx.float32)
    path = "model.layers.0.self_attn.q_proj"
    factors = {f"{path}.lora_a": mx.ones((64, 2)), f"{path}.lora_b": mx.ones((2, 64))}
    stack.add(Adapter("lora", factors, {path: 1.0}))
    copy = shared_copy(model)
    mine, theirs = dict(tree_flatten(model.parameters())), dict(tree_flatten(copy.parameters()))
    assert mine.keys() == theirs.keys() and all(mine[name] is theirs[name] for name in mine)
    assert not hasattr(copy.model.layers[0].self_attn.q_proj, "_factors")
    copy.freeze()
    copy.train()
    copy.model.layers[0].self_attn.q_proj = nn.Linear(64, 64)
    assert model.trainable_parameters() and not model.training
    np.testing.assert_array_equal(np.array(model(tokens)), plain)
    found: list[Any] = []
    other = shared_copy(model)
    thread = threading.Thread(target=lambda: found.append(np.array(other(tokens))))
    thread.start()
    thread.join()
    np.testing.assert_allclose(found[0], plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["gemma3_text", "qwen3_moe", "mamba2", "gpt_oss"])
def test_shared_copies_of_other_definitions_run_on_another_thread(kind: str) -> None:
    model = tiny.build(kind)
    tokens = mx.array([[1, 2, 3, 4]])
    found: list[Any] = []
    other = shared_copy(model)
    thread = threading.Thread(target=lambda: found.append(np.array(other(tokens))))
    thread.start()
    thread.join()
    np.testing.assert_allclose(found[0], np.array(model(tokens)), rtol=1e-4, atol=1e-4)
