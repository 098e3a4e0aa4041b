"""Several steps in flight at once: the lives of tests/engine/test_scheduler.py, led through a pipeline."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import settings
from hypothesis.stateful import rule

from mlxserve.cache.pages import GroupSpec
from mlxserve.config import EngineConfig
from mlxserve.engine.batch import Batch
from mlxserve.engine.capacity import Memory
from mlxserve.engine.scheduler import Scheduler
from mlxserve.engine.sequence import Sequence
from mlxserve.request import Request, SamplingParams
from tests.engine import test_scheduler as plain

STAGES = 3


def scheduler(micro_batches: int, groups: tuple[GroupSpec, ...] = (GroupSpec(None, 60),)) -> Scheduler:
    config = EngineConfig(page_size=plain.PAGE, max_sequences=12, step_tokens=12, min_chunk=3, max_queue=20)
    memory = Memory(groups, 0, 50)
    return Scheduler(config, memory, frozenset({plain.EOS}), lambda: 7, micro_batches=micro_batches)


class PipelineLives(plain.Lives):
    """A step is committed when STAGES steps are in flight, or nobody else can be scheduled."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = scheduler(STAGES, self.groups)
        self.flying: deque[tuple[Batch, list[int], list[Sequence]]] = deque()

    @rule()
    def step(self) -> None:
        while len(self.flying) < STAGES and (batch := self.scheduler.schedule()) is not None:
            owners = list(self.scheduler._on_the_way[-1])
            self._apart(batch, owners)
            drawn = self.runner.run(batch, owners, self.last)
            self.flying.append((batch, drawn, owners))
        if self.flying:
            batch, drawn, _ = self.flying.popleft()
            self.scheduler.commit(batch, drawn)

    def _apart(self, batch: Batch, owners: list[Sequence]) -> None:
        """Every token is known, and nobody waits for a token that is still on its way."""
        waiting = {
            owner
            for earlier, _, theirs in self.flying
            for segment, owner in zip(earlier.segments, theirs)
            if segment.sample
        }
        for segment, owner in zip(batch.segments, owners):
            assert segment.tokens is not None and owner not in waiting


TestPipelineLives = PipelineLives.TestCase
TestPipelineLives.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize(("streams", "stages", "shares"), [(4, 2, [2, 2]), (5, 3, [2, 2, 1]), (1, 4, [1])])
def test_streams_are_shared_out_evenly(streams: int, stages: int, shares: list[int]) -> None:
    ready = scheduler(stages)
    params = SamplingParams(max_tokens=9, temperature=0.0).resolved()
    for number in range(streams):
        ready.add(Request(f"r{number}", [number + 1, 2], params))
    while (batch := ready.schedule()) is not None:  # prompts, 12 tokens a step
        ready.commit(batch, [1] * sum(segment.sample for segment in batch.segments))
        if all(sequence.decoding for sequence in ready.running) and len(ready.running) == streams:
            break
    flying = [batch for _ in range(stages) if (batch := ready.schedule()) is not None]
    assert [len(batch.segments) for batch in flying] == shares
    slots = [segment.slot for batch in flying for segment in batch.segments]
    assert len(set(slots)) == streams
    assert ready.schedule() is None
    ready.commit(flying[0], [1] * shares[0])
    again = ready.schedule()
    assert again is not None
    assert [s.slot for s in again.segments] == [s.slot for s in flying[0].segments]


def test_without_micro_batches_a_step_goes_on_with_tokens_nobody_has_read() -> None:
    ready = scheduler(0)
    ready.add(Request("r", [1, 2], SamplingParams(max_tokens=9, temperature=0.0).resolved()))
    assert ready.schedule() is not None
    ahead = ready.schedule()
    assert ahead is not None and ahead.segments[0].tokens is None
