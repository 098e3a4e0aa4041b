"""How loads are run: who waits for whom, what is written down, and what a failure does."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import count

import pytest

from mlxserve.bench.measure import Seen, calibrate, fit, run
from mlxserve.bench.scenarios import NAMES, Sizes
from mlxserve.errors import MlxServeError
from tests.bench.fakes import FakeTarget

SIZES = Sizes(clients=3, requests=7, tokens=8, prompt_tokens=20, prefix_tokens=60, long_tokens=90)


def ran(target: FakeTarget, *names: str, sizes: Sizes = SIZES, **settings: object) -> list[Seen]:
    return asyncio.run(run(target, names, sizes, **settings))  # type: ignore[arg-type]


def test_everything_asked_is_answered_and_told() -> None:
    told: list[tuple[str, int, int]] = []
    found = ran(FakeTarget(), *NAMES, progress=lambda *news: told.append(news))
    assert [one.load.name for one in found] == list(NAMES)
    for one in found:
        assert len(one.traces) == len(one.jobs) == sum(map(len, one.load.phases))
        assert all(t.tokens == job.ask.max_tokens for t, job in zip(one.traces, one.jobs))
        assert told.count((one.load.name, len(one.jobs), len(one.jobs))) == 1


@pytest.mark.parametrize(("name", "at_once"), [("latency", 1), ("throughput", 3), ("long-prompt", 4)])
def test_so_many_run_at_once(name: str, at_once: int) -> None:
    target = FakeTarget()
    ran(target, name)
    assert target.most_running == at_once


def test_the_long_prompt_comes_when_the_streams_are_under_way() -> None:
    ticks = count()
    (one,) = ran(FakeTarget(), "long-prompt", clock=lambda: float(next(ticks)))
    *streams, long = one.traces
    wanted = one.jobs[-1].after_pieces
    heard = [sum(t.began_s + s < long.began_s for s in t.pieces_s) for t in streams]
    assert min(heard) >= wanted
    assert all(t.began_s + t.total_s > long.began_s for t in streams)


def test_phases_follow_each_other() -> None:
    ticks = count()
    (one,) = ran(FakeTarget(), "prefix", clock=lambda: float(next(ticks)))
    first, *behind = one.traces
    assert all(t.began_s > first.began_s + first.total_s for t in behind)


def test_a_request_that_fails_is_written_down_and_the_others_go_on() -> None:
    own = [[{"role": "user", "content": text}] for text in ("please", "refuse")]
    (one,) = ran(FakeTarget(), "throughput", sizes=replace(SIZES, own=own))
    assert one.failures == ["It is refused."] * 3
    assert len(one.answered) == 4


def test_an_empty_answer_is_a_failure() -> None:
    class Silent(FakeTarget):
        async def ask(self, question, heard):  # type: ignore[no-untyped-def]
            return await super().ask(question, lambda text, tokens: None)

    (one,) = ran(Silent(), "latency")
    assert set(one.failures) == {"The answer is empty."}


def test_calibration_finds_the_tokens_a_word() -> None:
    """The fake makes one token of a word and four of the template."""
    assert asyncio.run(calibrate(FakeTarget(), SIZES)).tokens_per_word == 1.0


def test_calibration_fails_where_nobody_answers() -> None:
    class Refusing(FakeTarget):
        async def ask(self, question, heard):  # type: ignore[no-untyped-def]
            raise MlxServeError("It is refused.")

    with pytest.raises(MlxServeError, match="refused"):
        asyncio.run(calibrate(Refusing(), SIZES))


@pytest.mark.parametrize("context", [96, 200, 512, 4096])
def test_lengths_fit_the_context(context: int) -> None:
    sizes = fit(Sizes(), context)
    target = FakeTarget(context)
    ran(target, *NAMES, sizes=replace(sizes, tokens_per_word=1.0))
    longest = max(
        sum(len(m["content"].split()) for m in ask.messages) + (0 if ask.schema else ask.max_tokens)
        for ask in target.asked
    )
    assert longest <= max(context, 130)
