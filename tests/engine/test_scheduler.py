"""The scheduler against a naive model: random lives, with a fake runner that dictates every token.

The naive model knows only what each request must come to: its tokens are a function of the tokens before
them. It also re-reads every batch: a position may be computed only in pages that hold all earlier ones.
"""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mlxserve.cache.pages import GroupSpec
from mlxserve.config import EngineConfig
from mlxserve.engine.batch import Batch
from mlxserve.engine.capacity import Memory
from mlxserve.engine.scheduler import Scheduler
from mlxserve.engine.sequence import Sequence, Status
from mlxserve.request import FinishReason, Priority, Request, SamplingParams

PAGE = 4
EOS = 99


def next_token(tokens: list[int]) -> int:
    """What the pretended model says after `tokens`; now and then it ends."""
    return (sum((i + 1) * t for i, t in enumerate(tokens)) * 31 + len(tokens)) % 100


class FakeRunner:
    """Pages that remember which token sequence each position was computed for."""

    def __init__(self, groups: tuple[GroupSpec, ...]) -> None:
        self.groups = groups
        self.content: list[dict[tuple[int, int], tuple[int, ...]]] = [{} for _ in groups]
        self.tables: list[dict[tuple[int, int], int]] = [{} for _ in groups]
        self.texts: dict[int, list[int]] = {}

    def run(self, batch: Batch, owners: list[Sequence], last: dict[int, int]) -> list[int]:
        for group, slot, index, page in batch.pages:
            self.tables[group][slot, index] = page
        copied = [(g, target, dict(self._page(g, source))) for g, source, target in batch.copies]
        for group, target, places in copied:
            for place, prefix in places.items():
                self.content[group][target, place] = prefix
        drawn = []
        for segment, owner in zip(batch.segments, owners):
            known = owner.tokens[: segment.start + segment.count]
            if segment.tokens is None:
                known = [*owner.tokens[: segment.start], last[segment.slot]]
            self._compute(segment.slot, segment.start, segment.count, known)
            if segment.sample:
                token = next_token(known)
                drawn.append(token)
                last[segment.slot] = token
        for group, slot, index, page in batch.later_pages:
            self.tables[group][slot, index] = page
        return drawn

    def _compute(self, slot: int, start: int, count: int, known: list[int]) -> None:
        for position in range(start, start + count):
            for group in range(len(self.groups)):
                page = self.tables[group][slot, position // PAGE]
                self.content[group][page, position % PAGE] = tuple(known[: position + 1])
        for position in range(start, start + count):
            for group, spec in enumerate(self.groups):
                low = 0 if spec.window is None else max(0, position - spec.window + 1)
                for seen in range(low, position + 1):
                    page = self.tables[group][slot, seen // PAGE]
                    assert self.content[group][page, seen % PAGE] == tuple(known[: seen + 1])

    def _page(self, group: int, page: int) -> dict[int, tuple[int, ...]]:
        return {place: prefix for (p, place), prefix in self.content[group].items() if p == page}


class Lives(RuleBasedStateMachine):
    """Adds, cancels, steps; one step may be on its way while the next is scheduled."""

    groups: tuple[GroupSpec, ...] = (GroupSpec(None, 14), GroupSpec(6, 12))

    def __init__(self) -> None:
        super().__init__()
        config = EngineConfig(page_size=PAGE, max_sequences=4, step_tokens=9, min_chunk=3, max_queue=8)
        self.scheduler = Scheduler(config, Memory(self.groups, 0, 50), frozenset({EOS}), lambda: 7)
        self.runner = FakeRunner(self.groups)
        self.last: dict[int, int] = {}
        self.pending: tuple[Batch, list[int]] | None = None
        self.all: list[Sequence] = []
        self.stems = [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]]

    @rule(
        stem=st.integers(0, 12),
        tail=st.lists(st.integers(0, 3), min_size=1, max_size=9),
        limit=st.integers(1, 12),
        priority=st.sampled_from(list(Priority)),
        client=st.sampled_from("ab"),
    )
    def add(self, stem: int, tail: list[int], limit: int, priority: Priority, client: str) -> None:
        if len(self.scheduler.waiting) >= 8:
            return
        prompt = self.stems[0][:stem] + tail
        params = SamplingParams(max_tokens=limit, temperature=0.0).resolved()
        request = Request(f"r{len(self.all)}", prompt, params, priority, client)
        self.all.append(self.scheduler.add(request))

    @rule(data=st.data())
    @precondition(lambda self: any(s.status is not Status.FINISHED for s in self.all))
    def cancel(self, data: st.DataObject) -> None:
        alive = [s for s in self.all if s.status is not Status.FINISHED]
        self.scheduler.finish(data.draw(st.sampled_from(alive)), FinishReason.CANCELLED)

    @rule()
    def step(self) -> None:
        batch = self.scheduler.schedule()
        drawn = None
        if batch is not None:
            owners = list(self.scheduler._on_the_way[-1])
            drawn = self.runner.run(batch, owners, self.last)
        if self.pending is not None:
            self.scheduler.commit(*self.pending)
        self.pending = None if batch is None or drawn is None else (batch, drawn)

    @invariant()
    def books_balance(self) -> None:
        self.scheduler.check()

    @invariant()
    def answers_are_what_they_must_be(self) -> None:
        for sequence in self.all:
            tokens = list(sequence.request.prompt)
            while len(tokens) < len(sequence.tokens):
                tokens.append(next_token(tokens))
            assert sequence.tokens == tokens

    def teardown(self) -> None:
        for _ in range(600):
            if not self.scheduler.has_work:
                break
            self.step()
        assert not self.scheduler.has_work, "it never came to an end"
        for sequence in self.all:
            if sequence.finish_reason is FinishReason.LENGTH:
                assert len(sequence.tokens) - sequence.prompt_tokens == sequence.request.params.max_tokens
            elif sequence.finish_reason is FinishReason.STOP:
                assert sequence.tokens[-1] == EOS
        self.scheduler.tree.clear()
        assert all(pool.free == pool.total for pool in self.scheduler.pools)


TestLives = Lives.TestCase
TestLives.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


class FullAttentionLives(Lives):
    groups = (GroupSpec(None, 13),)


TestFullAttentionLives = FullAttentionLives.TestCase
TestFullAttentionLives.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_last_token_on_its_way_still_bounds_the_prompts_beside_it() -> None:
    """It is read only when the next step has been begun, so whoever waits for it waits for that step's chunk."""
    config = EngineConfig(page_size=PAGE, max_sequences=4, step_tokens=64, min_chunk=3)
    scheduler = Scheduler(config, Memory((GroupSpec(None, 40),), 0, 120), frozenset({EOS}), lambda: 7)
    scheduler.pace.record(8, 1, 100.0)  # a slow machine: the smallest chunks beside streams
    params = SamplingParams(max_tokens=2, temperature=0.0).resolved()
    scheduler.add(Request("stream", [1, 2, 3], params))
    prompt = scheduler.schedule()
    assert prompt is not None
    last = scheduler.schedule()  # the second and last token, before the first has been read
    assert last is not None and [segment.tokens for segment in last.segments] == [None]
    scheduler.commit(prompt, [5])
    scheduler.add(Request("long", list(range(60)), params))
    beside = scheduler.schedule()
    assert beside is not None and [segment.count for segment in beside.segments] == [config.min_chunk]
    scheduler.commit(last, [6])
    alone = scheduler.schedule()
    assert alone is not None and [segment.count for segment in alone.segments] == [60 - config.min_chunk]
