"""A life in a few seconds: requests come at random, are cancelled, give way, share prefixes, at 16, 8, 4 bits.

`MLXSERVE_SOAK=2000` (what `make soak` sets) runs so many requests a case instead of the small number here.
Every greedy result must equal its solo run: mlx-lm's own loop at 16 bits; at 8 and 4 bits the same engine
with that one request alone. At the end every page is back.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import numpy as np
import pytest

from mlxserve.engine.engine import Engine
from mlxserve.request import FinishReason, Priority, Request
from tests.engine.harness import Answer, engine, request, run, solo_tokens

REQUESTS = int(os.environ.get("MLXSERVE_SOAK", "60"))
WIDE = {"head_dim": 32}


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


def live(subject: Engine, seed: int) -> Life:
    life = Life(subject, np.random.default_rng(seed))
    while len(life.asked) < REQUESTS or subject.has_work:
        if len(life.asked) < REQUESTS and life.draw.random() < 0.4:
            life.one_more()
        if life.draw.random() < 0.03:
            life.cancel_one()
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


@pytest.mark.parametrize(("kind", "bits"), [("llama", 16), ("gemma3_text", 16), ("qwen3", 8), ("qwen3", 4)])
def test_every_answer_equals_its_solo_run(kind: str, bits: int) -> None:
    subject = small(kind, bits)
    life = live(subject, seed=bits)
    alone = small(kind, bits)
    for each, answer in zip(life.asked, life.answers):
        if each.id in life.cancelled:
            assert answer.reason in (FinishReason.CANCELLED, FinishReason.LENGTH)
        else:
            assert answer.reason is FinishReason.LENGTH and len(answer.tokens) == each.params.max_tokens
        if bits == 16:
            expected = solo_tokens(kind, each.prompt, each.params.max_tokens)
        else:
            alone.scheduler.tree.clear()
            expected = run(alone, [request(each.prompt, each.params.max_tokens)])[0].tokens
        assert answer.tokens == expected[: len(answer.tokens)]
    assert_all_is_back(subject)
    assert subject.scheduler.tree.stats.hit_tokens > 0


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
    assert not scheduler.running and not len(scheduler.waiting) and not subject._streams
