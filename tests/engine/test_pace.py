"""The prompt budget against machines whose costs are known: it finds what fits, and keeps finding it."""

from __future__ import annotations

import numpy as np
import pytest

from mlxserve.engine.pace import Pace


def live(
    pace: Pace, base_s: float, per_token_s: float, steps: int, noise: float = 0.0
) -> list[tuple[int, float]]:
    """(budget, time) of steps that take as much as they may, on a machine with these costs."""
    draw = np.random.default_rng(0)
    seen = []
    for _ in range(steps):
        tokens = pace.budget(streams=4)
        took = (base_s + per_token_s * tokens) * float(1 + noise * draw.normal())
        pace.record(tokens, 4, took)
        seen.append((tokens, took))
    return seen


@pytest.mark.parametrize(("base_s", "per_token_s"), [(0.02, 1e-3), (0.1, 5e-4), (0.001, 1e-5), (0.05, 3e-3)])
def test_it_uses_the_target_and_keeps_within_it(base_s: float, per_token_s: float) -> None:
    pace = Pace(0.25, smallest=16, largest=4096)
    pace.record(512, 0, base_s + 512 * per_token_s)  # the first prompt, before there was any stream
    seen = live(pace, base_s, per_token_s, 60, noise=0.05)
    fitting = min(4096, (0.25 - base_s) / per_token_s)
    assert 0.6 * fitting <= np.median([tokens for tokens, _ in seen[10:]]) <= fitting
    assert max(took for _, took in seen) <= 0.5


def test_a_budget_grows_back_after_a_slow_start_and_after_a_hiccup() -> None:
    """A first step that took long, or one in between, must not keep it small."""
    pace = Pace(0.25, smallest=16, largest=512)
    for _ in range(3):
        pace.record(512, 0, 0.6)
    budgets = [tokens for tokens, _ in live(pace, 0.1, 1e-3, 200)]
    assert min(budgets[20:]) >= 70
    pace.record(budgets[-1], 4, 5.0)
    assert max(tokens for tokens, _ in live(pace, 0.1, 1e-3, 8)) >= 70


def test_a_machine_that_becomes_slower_is_noticed_within_a_few_steps() -> None:
    pace = Pace(0.25, smallest=16, largest=4096)
    live(pace, 0.01, 1e-4, 30)
    seen = live(pace, 0.01, 2e-3, 12)
    assert all(took <= 0.3 for _, took in seen[-3:])


def test_without_streams_a_prompt_takes_all_it_can() -> None:
    pace = Pace(0.25, smallest=16, largest=512)
    assert pace.budget(streams=0) == 512 and pace.budget(streams=3) == 16


def test_where_streams_alone_exceed_the_target_prompts_still_get_a_share() -> None:
    """No budget could keep the target: prompts take as long as the streams, not a trickle."""
    pace = Pace(0.25, smallest=16, largest=512)
    pace.record(80, 0, 0.5)
    seen = live(pace, 0.3, 3e-3, 60, noise=0.03)
    settled = [tokens for tokens, _ in seen[20:]]
    assert 70 <= np.median(settled) <= 110, "0.3 s are worth 100 tokens"
    assert max(took for _, took in seen[20:]) <= 0.8
    assert 1 <= sum(tokens == 0 for tokens, _ in seen) <= 2, "a step without prompts shows what streams take"


def test_a_share_that_was_due_to_many_streams_ends_with_them() -> None:
    pace = Pace(0.25, smallest=16, largest=512)
    pace.record(0, 16, 0.3)
    for _ in range(20):
        pace.record(pace.budget(16), 16, 0.3 + 3e-3 * pace.budget(16))
    assert pace.budget(16) >= 30
    for _ in range(20):
        tokens = pace.budget(4)
        pace.record(tokens, 4, 0.1 + 3e-3 * tokens)
    assert 20 <= pace.budget(4) <= 36, "0.2 s, of which 0.1 are left"


def test_nobody_looks_while_the_target_can_be_kept() -> None:
    pace = Pace(0.25, smallest=16, largest=512)
    assert all(tokens > 0 for tokens, _ in live(pace, 0.1, 1e-3, 60))
