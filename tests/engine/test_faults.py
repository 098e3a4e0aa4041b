"""Case 22 and its kind: what fails is contained, what goes on is right, and a dead engine says so."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from mlxserve.engine.aio import AsyncLLM
from mlxserve.engine.engine import Engine
from mlxserve.engine.worker import Worker
from mlxserve.errors import DoesNotFit, EngineFailed, EngineStopped, ModelNotFound
from mlxserve.request import FinishReason
from tests.engine.harness import Answer, engine, finish, request, run, solo_tokens


class Breaking:
    """Wraps a model so that one chosen forward pass raises."""

    def __init__(self, inner: Any, at: int, error: Exception) -> None:
        self.inner, self.at, self.error, self.calls = inner, at, error, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def forward(self, *args: Any) -> Any:
        self.calls += 1
        if self.calls == self.at:
            raise self.error
        return self.inner.forward(*args)


def broken(at: int, error: Exception, kind: str = "llama", **settings: Any) -> Engine:
    subject = engine(kind, **settings)
    subject.runner.model = Breaking(subject.runner.model, at, error)  # type: ignore[assignment]
    return subject


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "lfm2"])
@pytest.mark.parametrize("at", [1, 2, 5])
def test_case_22_a_step_that_raises_fails_those_it_touched(kind: str, at: int) -> None:
    subject = broken(at, ValueError("boom"), kind, max_sequences=2)
    touched, waiting = [request([i, i + 1], 6) for i in (1, 5)], request([9, 8], 6)
    answers = [Answer() for _ in range(3)]
    for each, answer in zip([*touched, waiting], answers):
        subject.add(each, answer)
    finish(subject)
    for answer in answers[:2]:
        assert isinstance(answer.error, EngineFailed) and "boom" in answer.error.message
    assert answers[2].tokens == solo_tokens(kind, waiting.prompt, 6)
    assert subject.stats()["failed"] == 2 and subject.stats()["running"] == 0


def test_case_22_nothing_computed_before_a_failure_is_reused() -> None:
    subject = broken(6, RuntimeError("a write failed"))
    prompt = list(range(60))
    run(subject, [request(prompt, 2)])
    (lost,) = run(subject, [request([*prompt, 1], 9)])
    assert isinstance(lost.error, EngineFailed)
    (after,) = run(subject, [request([*prompt, 2], 9)])
    assert after.tokens == solo_tokens("llama", [*prompt, 2], 9)


@pytest.mark.parametrize("at", [1, 3, 6])
def test_a_listener_that_raises_costs_nobody_else(at: int) -> None:
    """As one whose event loop is closed: at its first word, in between, and at its last."""
    subject, told = engine(), []

    def deaf(news: Any) -> None:
        told.append(news)
        if len(told) >= at:
            raise RuntimeError("Event loop is closed")

    others = [request([i, i + 1], 6) for i in (1, 5)]
    answers = [Answer(), Answer()]
    subject.add(others[0], answers[0])
    subject.add(request([9, 8], 6), deaf)
    subject.add(others[1], answers[1])
    finish(subject)
    for each, answer in zip(others, answers):
        assert answer.tokens == solo_tokens("llama", each.prompt, 6)
    stats = subject.stats()
    assert len(told) == at and stats["running"] == 0
    assert subject.counters.errors == {"RuntimeError": 1}


@pytest.mark.parametrize("kind", ["llama", "gemma2", "deepseek_v3", "gemma3_text", "qwen3_next", "lfm2"])
def test_what_is_not_a_number_in_one_answer_is_not_in_the_next(kind: str) -> None:
    """Whoever had the pages before may have left NaN there; sequences of different lengths are padded."""
    subject = engine(kind, prefix_cache=False)
    run(subject, [request([7] * 50, 9) for _ in range(3)])
    for store in subject.runner.model.stores:  # type: ignore[union-attr]
        for array in store.arrays():
            array[:] = float("nan")
    asked = [request(prompt, 9) for prompt in ([1, 2, 3], [4] * 30, [9] * 17)]
    for each, answer in zip(asked, run(subject, asked)):
        assert answer.tokens == solo_tokens(kind, each.prompt, 9)


def test_out_of_memory_sheds_the_largest_and_keeps_the_others() -> None:
    subject = broken(4, RuntimeError("[metal::malloc] Unable to allocate 123 bytes"))
    small, large = request([1, 2], 10), request(list(range(40)), 10)
    few, many = run(subject, [small, large])
    assert few.tokens == solo_tokens("llama", small.prompt, 10)
    assert isinstance(many.error, DoesNotFit) and many.error.http_status == 507


def test_an_array_that_cannot_be_evaluated_is_survived() -> None:
    """The error comes from the device, after the step was built: pools must not stay poisoned."""
    import mlx.core as mx

    subject = engine()
    inner = subject.runner.model
    poisoned = []

    class Poisoned(Breaking):
        def forward(self, ids: mx.array, step: Any) -> mx.array:
            if not poisoned:
                poisoned.append(True)
                self.inner.forward(ids, step)
                raise RuntimeError("device lost the step")
            return self.inner.forward(ids, step)

    subject.runner.model = Poisoned(inner, -1, RuntimeError())  # type: ignore[assignment]
    (lost,) = run(subject, [request([1, 2, 3], 5)])
    (after,) = run(subject, [request([1, 2, 3], 5)])
    assert lost.error is not None and after.tokens == solo_tokens("llama", [1, 2, 3], 5)


# -- the worker ----------------------------------------------------------------------------------------------------


def collected(worker: Worker, asked: Any) -> Answer:
    """Submit and wait for the end."""
    answer, done = Answer(), threading.Event()

    def sink(news: Any) -> None:
        answer(news)
        if answer.error is not None or answer.reason is not None:
            done.set()

    worker.submit(asked, sink)
    assert done.wait(60), "no end came"
    return answer


def test_the_worker_builds_serves_and_closes() -> None:
    worker = Worker(engine)
    asked = request([1, 2, 3], 6)
    assert collected(worker, asked).tokens == solo_tokens("llama", [1, 2, 3], 6)
    assert worker.call(lambda e: e.stats()["finished"]).result(10) == 1
    worker.close()
    assert not worker.healthy
    with pytest.raises(EngineStopped):
        worker.submit(request([1], 2), Answer())


def test_what_building_raises_is_raised_here() -> None:
    def build() -> Engine:
        raise ModelNotFound("No model called x.")

    with pytest.raises(ModelNotFound, match="called x"):
        Worker(build)


def test_case_22_a_loop_that_dies_tells_everybody() -> None:
    """Those who run, who came while it died, who cannot hear, and who wait for a call to be made."""
    deaths: list[BaseException] = []
    worker = Worker(engine, on_death=deaths.append)
    stepping, more = threading.Event(), threading.Event()

    def step() -> None:
        stepping.set()
        assert more.wait(10)
        raise SystemError("gone")

    def deaf(news: Any) -> None:
        raise RuntimeError("Event loop is closed")

    worker.call(lambda subject: setattr(subject, "step", step)).result(10)
    answers = [Answer(), Answer()]
    worker.submit(request([1], 50), answers[0])
    assert stepping.wait(10)
    worker.submit(request([2], 50), deaf)
    worker.submit(request([3], 50), answers[1])
    call = worker.call(lambda subject: subject.stats())
    more.set()
    with pytest.raises(EngineStopped, match="gone"):
        call.result(10)
    worker._thread.join(10)
    for answer in answers:
        assert isinstance(answer.error, EngineStopped) and "gone" in answer.error.message
    assert not worker.healthy and len(deaths) == 1
    with pytest.raises(EngineStopped, match="gone"):
        worker.submit(request([1], 2), Answer())


def test_closing_answers_those_who_wait() -> None:
    worker = Worker(engine)
    answer = Answer()
    worker.submit(request([1], 4000), answer)
    worker.close()
    assert isinstance(answer.error, EngineStopped) or answer.reason is FinishReason.LENGTH


# -- asyncio ---------------------------------------------------------------------------------------------------------


def test_async_streams_run_together_and_leaving_cancels() -> None:
    async def live() -> None:
        llm = AsyncLLM(await asyncio.to_thread(Worker, engine))
        asked = [request([i, i], 8) for i in range(5)]

        async def tokens(each: Any) -> list[int]:
            return [token async for delta in llm.generate(each) for token in delta.token_ids]

        answers = await asyncio.gather(*map(tokens, asked))
        assert list(answers) == [solo_tokens("llama", each.prompt, 8) for each in asked]

        stream = llm.generate(request([7], 3000))
        async for _ in stream:
            break
        await stream.aclose()  # type: ignore[attr-defined]
        for _ in range(500):
            if llm.stats()["running"] == 0:
                break
            await asyncio.sleep(0.01)
        assert llm.stats()["running"] == 0
        (vector,) = await llm.embed([[1, 2, 3]])
        assert sum(x * x for x in vector) == pytest.approx(1.0, abs=1e-4)
        await llm.close()
        assert not llm.healthy

    asyncio.run(live())
