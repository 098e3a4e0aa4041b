"""The sampler's shaping of logits against NumPy, and that settings hold per row and per seed."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlxserve.engine.batch import Admission
from mlxserve.engine.sampler import Sampler, uniforms
from mlxserve.request import SamplingParams
from tests.engine.harness import engine, request, run, solo_logprobs

V = 50


def admitted(*settings: dict[str, object]) -> Sampler:
    """A sampler with one slot a dict of settings; history is tokens 1, 2 (prompt) and 3, 3 (answer)."""
    sampler = Sampler(len(settings))
    for slot, each in enumerate(settings):
        params = SamplingParams(**{"temperature": 0.0, **each}).resolved()  # type: ignore[arg-type]
        sampler.admit(Admission(slot, params, 11, (1, 2, 3, 3), 2))
    return sampler


def draw(sampler: Sampler, logits: np.ndarray, masks: dict[int, np.ndarray] | None = None) -> list[int]:
    slots = np.arange(len(logits), dtype=np.int32)
    tokens, _ = sampler.draw(mx.array(logits), slots, np.zeros(len(logits), np.int64), masks or {})
    return tokens.tolist()  # type: ignore[return-value]


def test_penalties_are_those_of_the_papers() -> None:
    logits = np.random.default_rng(0).normal(0, 3, (3, V)).astype(np.float32)
    sampler = admitted({"repetition_penalty": 1.7}, {"presence_penalty": 1.5}, {"frequency_penalty": 1.2})
    shaped = np.array(sampler._shaped(mx.array(logits), [0, 1, 2], {}))
    expected = logits.copy()
    for token in (1, 2, 3):  # repetition: prompt and answer
        value = expected[0, token]
        expected[0, token] = value / 1.7 if value > 0 else value * 1.7
    expected[1, 3] -= 1.5  # presence: answer only, once
    expected[2, 3] -= 2 * 1.2  # frequency: answer only, twice
    np.testing.assert_allclose(shaped, expected, rtol=1e-6)


def test_what_was_drawn_counts_for_the_next_draw() -> None:
    logits = np.zeros((1, V), np.float32)
    logits[0, 7], logits[0, 8] = 2.0, 1.5
    sampler = admitted({"frequency_penalty": 1.0})
    assert [draw(sampler, logits)[0] for _ in range(4)] == [7, 8, 7, 8]


def test_bias_and_masks_touch_their_own_rows_only() -> None:
    logits = np.tile(np.arange(V, dtype=np.float32), (3, 1))
    sampler = admitted({"logit_bias": {5: 100.0}}, {}, {})
    mask = np.zeros((V + 31) // 32, np.uint32)
    mask[0] = 1 << 9
    assert draw(sampler, logits, {2: mask}) == [5, V - 1, 9]


def test_ids_beyond_a_mask_are_never_drawn() -> None:
    logits = np.zeros((1, V), np.float32)
    logits[0, 40] = 9.0
    assert draw(admitted({}), logits, {0: np.array([0xFFFFFFFF], np.uint32)})[0] < 32


def test_a_slot_forgets_its_last_tenant() -> None:
    sampler = admitted({"logit_bias": {5: 100.0}, "presence_penalty": 2.0, "logprobs": 2})
    sampler.admit(Admission(0, SamplingParams(temperature=0.0).resolved(), 1, (), 0))
    tokens, logprobs = sampler.draw(
        mx.array(np.arange(V, dtype=np.float32)[None]), np.array([0]), np.array([0]), {}
    )
    assert tokens.tolist() == [V - 1] and logprobs is None


def test_uniforms_are_uniform_and_belong_to_seed_and_draw() -> None:
    seeds = np.repeat(np.arange(200, dtype=np.uint64), 100)
    draws = np.tile(np.arange(100), 200)
    u = uniforms(seeds, draws)
    assert u.dtype == np.float32 and u.min() >= 0 and u.max() < 1
    counts = np.histogram(u, bins=20, range=(0, 1))[0]
    chi_square = ((counts - 1000) ** 2 / 1000).sum()
    assert chi_square < 43.8  # 99.9 % of 19 degrees of freedom
    assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.03
    np.testing.assert_array_equal(uniforms(seeds[:5], draws[:5]), u[:5])


def test_case_44_draws_follow_the_distribution() -> None:
    """Logits [2, 1.5, 1, 0.5], temperature 1, 20,000 draws through the engine's own path."""
    logits = np.array([2, 1.5, 1, 0.5], np.float32)
    sampler = Sampler(1)
    sampler.admit(Admission(0, SamplingParams(temperature=1.0).resolved(), 5, (), 0))
    counts = np.zeros(4)
    rows = 2000
    for first in range(0, 20000, rows):
        tokens, _ = sampler.draw(
            mx.array(np.tile(logits, (rows, 1))),
            np.zeros(rows, np.int32),
            np.arange(first, first + rows),
            {},
        )
        counts += np.bincount(np.array(tokens), minlength=4)
    expected = np.exp(logits) / np.exp(logits).sum() * 20000
    assert ((counts - expected) ** 2 / expected).sum() < 16.3  # 99.9 % of 3 degrees of freedom


def test_case_15_settings_hold_per_row_and_a_seed_in_any_batch() -> None:
    greedy = run(engine(), [request([4, 5], 12)])[0].tokens
    seeded = run(engine(), [request([4, 5], 12, temperature=1.0, seed=42)])[0].tokens
    crowd = [
        request([4, 5], 12, temperature=1.0, top_k=1),
        request([4, 5], 12, temperature=1.0, seed=42),
        request([9], 12, temperature=1.3),
        request([4, 5], 12, temperature=1.0, seed=43),
    ]
    first, again, _, other = (answer.tokens for answer in run(engine(), crowd))
    assert first == greedy and again == seeded and other != seeded


def test_case_15_the_models_own_defaults_apply_where_the_request_is_silent() -> None:
    own = {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    silent = SamplingParams(top_p=0.5).resolved(own)
    assert (silent.temperature, silent.top_k, silent.top_p, silent.min_p) == (0.6, 20, 0.5, 0.0)


@pytest.mark.parametrize("top", [0, 3])
def test_case_13_log_probabilities_are_the_models_own(top: int) -> None:
    """Before temperature, penalties and filters; one entry a token, the top list as long as asked."""
    asked = request([4, 5, 6], 6, temperature=0.9, seed=3, logprobs=top, presence_penalty=1.0)
    (answer,) = run(engine(), [asked, request([1], 6)])[:1]
    expected = solo_logprobs("llama", [*asked.prompt, *answer.tokens])
    entries = [entry for delta in answer.deltas for entry in delta.logprobs]
    assert [entry.token_id for entry in entries] == answer.tokens
    for i, entry in enumerate(entries):
        row = expected[len(asked.prompt) - 1 + i]
        assert entry.logprob == pytest.approx(row[entry.token_id], abs=1e-3)
        best = np.argsort(-row)[:top]
        assert [token for token, _ in entry.top] == best.tolist()
        np.testing.assert_allclose([value for _, value in entry.top], row[best], atol=1e-3)
