"""A life in a few seconds: requests come at random, are cancelled, give way, share prefixes, at 16, 8, 4 bits.

`MLXSERVE_SOAK=2000` (what `make soak` sets) runs so many requests a case instead of the small number here.
At 16 bits every greedy answer must equal its solo run, mlx-lm's own loop. At the end every page is back.

At 8 and 4 bits the truth is one pass of the model over prompt and answer, on packed pages of its own. There
the last bit of a sum, which depends on the shapes of a step, may round a key or value to the next level, and
two tokens that are nearly equal then change places. Such a flip is told from a fault by its size: the token
taken must be nearer to the best one than FLIP of what packing as a whole does to that row's logits (against
the same pass on pages that are not packed). And flips must be rare: in a short run none happens.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np
import pytest

from mlxserve.engine.engine import Engine
from mlxserve.models.paged import PagedModel
from mlxserve.models.step import Step
from mlxserve.request import FinishReason, Priority, Request
from tests.engine.harness import Answer, engine, request, solo_tokens, tiny_model

REQUESTS = int(os.environ.get("MLXSERVE_SOAK", "60"))
WIDE = {"head_dim": 32}
FLIP = 0.1
TOKENS_A_FLIP = 2000
LONGEST_PAGES = 18  # of 8 tokens: what the longest request below takes


@dataclass
class Life:
    """What one run asks, and what came of it."""

    engine: Engine
    draw: np.random.Generator
    asked: list[Request] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    cancelled: set[str] = field(default_factory=set)
    stems: list[list[int]] = field(default_factory=list)

    def one_more(self) -> None:
        """A request that often starts like an earlier one, or goes on where one ended."""
        stem: list[int] = []
        if self.stems and self.draw.random() < 0.6:
            stem = self.stems[int(self.draw.integers(len(self.stems)))]
            stem = stem[: int(self.draw.integers(1, len(stem) + 1))]
        prompt = stem + self.draw.integers(0, 256, int(self.draw.integers(1, 40))).tolist()
        self.stems = [*self.stems[-20:], prompt]
        each = request(
            prompt[:120],
            int(self.draw.integers(1, 24)),
            priority=Priority.BATCH if self.draw.random() < 0.3 else Priority.INTERACTIVE,
            client=f"c{int(self.draw.integers(4))}",
        )
        answer = Answer()
        self.engine.add(each, answer)
        self.asked.append(each)
        self.answers.append(answer)

    def cancel_one(self) -> None:
        open_ones = [r for r, a in zip(self.asked, self.answers) if a.reason is None]
        if open_ones:
            chosen = open_ones[int(self.draw.integers(len(open_ones)))]
            self.cancelled.add(chosen.id)
            self.engine.cancel(chosen.id)


def live(subject: Engine, seed: int, *, most_pages: int | None = None) -> Life:
    """The whole life; with `most_pages` the limit of the cache changes again and again, up to so many."""
    life = Life(subject, np.random.default_rng(seed))
    while len(life.asked) < REQUESTS or subject.has_work:
        if len(life.asked) < REQUESTS and life.draw.random() < 0.4:
            life.one_more()
        if life.draw.random() < 0.03:
            life.cancel_one()
        if most_pages is not None and life.draw.random() < 0.05:
            limit_pages(subject, int(life.draw.integers(LONGEST_PAGES, most_pages + 1)))
        subject.step()
    return life


def small(kind: str, bits: int, **settings: int) -> Engine:
    """An engine whose pool is too small for all that run at once."""
    model = WIDE if bits != 16 else None
    pages = 60
    page_bytes = engine(kind, model=model, kv_bits=bits).memory.page_bytes
    return engine(
        kind, model=model, kv_bits=bits, cache_bytes=pages * sum(page_bytes), max_sequences=12, **settings
    )


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_every_answer_equals_its_solo_run(kind: str) -> None:
    subject = small(kind, 16)
    life = live(subject, seed=16)
    for each, answer in zip(life.asked, life.answers):
        assert_it_ended(life, each, answer)
        expected = solo_tokens(kind, each.prompt, each.params.max_tokens)
        assert answer.tokens == expected[: len(answer.tokens)]
    assert_all_is_back(subject)
    assert subject.scheduler.tree.stats.hit_tokens > 0


def limit_pages(subject: Engine, pages: int) -> None:
    """So many bytes that each group may have so many pages."""
    assert subject.sizes is not None
    states = subject.memory.state_slots * subject.sizes.slot_bytes
    subject.limit_cache(pages * sum(subject.memory.page_bytes) + states)


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "qwen3_next"])
def test_a_cache_whose_limit_changes_loses_nothing(kind: str) -> None:
    """Sequences that held pages beyond the limit start anew, and the arrays are no larger than it."""
    subject = engine(kind, max_sequences=12)
    life = live(subject, seed=3, most_pages=60)
    for each, answer in zip(life.asked, life.answers):
        assert_it_ended(life, each, answer)
        assert answer.tokens == solo_tokens(kind, each.prompt, len(answer.tokens))
    assert subject.scheduler.preemptions
    limit_pages(subject, LONGEST_PAGES)
    model = subject.runner.model
    assert [pool.total for pool in subject.scheduler.pools] == [LONGEST_PAGES] * len(model.windows)
    assert all(model.room(group) <= LONGEST_PAGES for group in range(len(model.windows)))
    assert_all_is_back(subject)


@pytest.mark.parametrize("bits", [8, 4])
def test_packed_answers_equal_one_pass_but_for_flips(bits: int) -> None:
    subject = small("qwen3", bits)
    life = live(subject, seed=bits)
    tokens, flips = 0, []
    for each, answer in zip(life.asked, life.answers):
        assert_it_ended(life, each, answer)
        tokens += len(answer.tokens)
        flips += found_flips(subject.way, bits, list(each.prompt), answer.tokens)
    print(f"{len(flips)} flips in {tokens} tokens: {sorted(flips)}")
    assert all(size < FLIP for size in flips), flips
    assert len(flips) <= tokens // TOKENS_A_FLIP, flips
    assert_all_is_back(subject)
    assert subject.scheduler.tree.stats.hit_tokens > 0


def found_flips(way: str, bits: int, prompt: list[int], answer: list[int]) -> list[float]:
    """The size of each flip: how far the token taken is below the best, in parts of what packing changes."""
    fed = [*prompt, *answer][:-1]
    if not answer:
        return []
    packed = one_pass(way, bits, fed)[len(prompt) - 1 :]  # (tokens of the answer, V)
    rows = np.flatnonzero(packed.argmax(-1) != answer)
    if not len(rows):
        return []
    whole = one_pass(way, 16, fed)[len(prompt) - 1 :]
    changed = np.abs(packed - whole).max(-1)
    return [float((packed[r].max() - packed[r][answer[r]]) / changed[r]) for r in rows]


def one_pass(way: str, bits: int, tokens: list[int]) -> np.ndarray:
    """(L, V) logits of all tokens at once, on pages of their own."""
    loaded, _ = tiny_model("qwen3", tuple(WIDE.items()))
    pages = -(-len(tokens) // 8)
    model = PagedModel(loaded.model, way, page_size=8, group_pages=[pages], kv_bits=bits)
    all_of_them = np.array([len(tokens)])
    table = np.arange(pages, dtype=np.int32)[None]
    logits = model.forward(mx.array(tokens), Step(np.array([0]), all_of_them, all_of_them, [table]))
    return np.array(logits, np.float64)


def assert_it_ended(life: Life, each: Request, answer: Answer) -> None:
    if each.id in life.cancelled:
        assert answer.reason in (FinishReason.CANCELLED, FinishReason.LENGTH)
    else:
        assert answer.reason is FinishReason.LENGTH and len(answer.tokens) == each.params.max_tokens


def test_hybrids_too() -> None:
    subject = engine("lfm2", max_sequences=6)
    life = live(subject, seed=5)
    for each, answer in zip(life.asked, life.answers):
        expected = solo_tokens("lfm2", each.prompt, each.params.max_tokens)
        assert answer.tokens == expected[: len(answer.tokens)]
    assert_all_is_back(subject)


def assert_all_is_back(subject: Engine) -> None:
    scheduler = subject.scheduler
    scheduler.tree.clear()
    for pool in (*scheduler.pools, *([scheduler.states] if scheduler.states else [])):
        assert pool.free == pool.total
    assert not scheduler.running and not len(scheduler.waiting) and not len(subject.output)
