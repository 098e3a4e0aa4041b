"""Sampling in its three forms (plain MLX, NumPy on the host, the kernel) against a sort in float64."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest

from mlxserve.kernels_metal.dispatch import sample
from mlxserve.kernels_metal.sample import sample_kernel, sample_reference
from mlxserve.kernels_metal.sample_host import leading_ids, sample_on_host
from tests.kernels_metal.products import CASES
from tests.metal import harness

Sampler = Callable[[mx.array, mx.array, mx.array], tuple[mx.array, mx.array]]
# How far float32 sums may move a boundary: of the distribution function, and of the mass that top-p keeps.
NEAR = 2e-6

plain_forms = pytest.mark.parametrize(
    "sampler", [pytest.param(sample_reference, id="mlx"), pytest.param(sample_on_host, id="numpy")]
)
needs_compiler = pytest.mark.usefixtures("compiler")


def on_kernel(order: harness.Order = "forward") -> Sampler:
    def run(logits: mx.array, params: mx.array, u: mx.array) -> tuple[mx.array, mx.array]:
        result = harness.run(sample_kernel, logits, params, u, order=order)
        assert result.counters.threadgroup_bytes <= 8 * 1024
        token, logprob = result.outputs
        return mx.array(token), mx.array(logprob)

    return run


def distribution(x: np.ndarray, temperature: float, top_k: float, top_p: float, min_p: float) -> np.ndarray:
    """Probabilities [V] by the definition, from a full sort in float64."""
    weights = np.exp((x - x.max()) / temperature)
    order = np.lexsort((np.arange(len(x)), -x))
    ranked = weights[order]
    keep = np.arange(len(x)) < (top_k or len(x))
    before = np.cumsum(ranked) - ranked
    if top_p < 1:
        keep &= (before < top_p * ranked[keep].sum()) | (np.arange(len(x)) == 0)
    keep &= ranked >= np.float32(min_p)
    kept = np.zeros(len(x))
    kept[order[keep]] = ranked[keep]
    return kept / kept.sum()


def possible(x: np.ndarray, settings: np.ndarray, u: float) -> set[int]:
    """The tokens that u may draw, given that boundaries within NEAR may fall to either side."""
    temperature, top_k, top_p, min_p = settings.astype(np.float64)
    if temperature == 0:
        return {int(x.argmax())}
    tokens = set()
    for mass in {top_p, *((top_p * (1 - NEAR), top_p * (1 + NEAR)) if top_p < 1 else ())}:
        ends = np.cumsum(distribution(x, temperature, top_k, mass, min_p))
        for draw in (max(u - NEAR, 0), u, min(u + NEAR, ends[-1] * (1 - 1e-12))):
            tokens.add(int(np.argmax(ends > draw)))
    return tokens


def check_draws(sampler: Sampler, x: np.ndarray, params: np.ndarray, u: np.ndarray, dtype: mx.Dtype) -> None:
    logits = mx.array(x).astype(dtype)
    token, logprob = sampler(logits, mx.array(params), mx.array(u))
    assert (token.dtype, logprob.dtype) == (mx.int32, mx.float32)
    x = np.array(logits.astype(mx.float32)).astype(np.float64)
    right = x - x.max(1, keepdims=True)
    right -= np.log(np.exp(right).sum(1, keepdims=True))
    for i, (chosen, likelihood) in enumerate(zip(token.tolist(), logprob.tolist())):
        assert chosen in possible(x[i], params[i], u[i]), (params[i], u[i])
        assert likelihood == pytest.approx(right[i, chosen], abs=2e-5)


def random_settings(generator: np.random.Generator, rows: int, vocabulary: int) -> np.ndarray:
    columns = [
        generator.choice([0, 0.5, 1, 2], rows, p=[0.1, 0.3, 0.3, 0.3]),
        generator.choice([0, 1, 5, 50, vocabulary // 2, vocabulary], rows),
        generator.choice([1, 0.95, 0.5, 0.05], rows),
        generator.choice([0, 0.02, 0.3], rows),
    ]
    return np.stack(columns, axis=1).astype(np.float32)


def check_random(sampler: Sampler, rows: int, vocabulary: int, dtype: mx.Dtype, steps: int | None) -> None:
    """Draw for random logits; `steps` a unit, where given, make many of them equal."""
    generator = np.random.default_rng(rows + vocabulary)
    x = generator.normal(0, 3, (rows, vocabulary)).astype(np.float32)
    x = np.round(x * steps) / steps if steps else x
    u = generator.random(rows, dtype=np.float32)
    check_draws(sampler, x, random_settings(generator, rows, vocabulary), u, dtype)


@plain_forms
@pytest.mark.parametrize("steps", [None, 2])
@pytest.mark.parametrize("vocabulary", [1, 2, 33, 1025, 3001])
@pytest.mark.parametrize("rows", [1, 7, 40])
def test_draws(sampler: Sampler, rows: int, vocabulary: int, steps: int | None) -> None:
    check_random(sampler, rows, vocabulary, mx.float32, steps)


@needs_compiler
@pytest.mark.parametrize(("dtype", "rows", "order"), CASES)
@pytest.mark.parametrize("vocabulary", [1, 31, 1025, 3001])
def test_kernel_draws(dtype: mx.Dtype, rows: int, order: harness.Order, vocabulary: int) -> None:
    check_random(on_kernel(order), rows, vocabulary, dtype, None)


@needs_compiler
@pytest.mark.parametrize(
    "x",
    [
        pytest.param(np.zeros(1300), id="all equal"),
        pytest.param(np.where(np.arange(1300) == 7, 3e38, -3e38), id="the widest range"),
        pytest.param(np.where(np.arange(1300) % 3 == 0, 1.5, -np.inf), id="two thirds forbidden"),
        pytest.param(np.where(np.arange(1300) == 1234, 0.25, -np.inf), id="one allowed"),
        pytest.param(np.tile([0.0, -0.0], 650), id="two zeros"),
        pytest.param(1 + np.arange(1300) * 2.0**-23, id="neighbours"),
        pytest.param(-np.geomspace(1e-30, 1e3, 1300), id="many magnitudes"),
    ],
)
def test_kernel_searches_any_logits(x: np.ndarray) -> None:
    """Where the range of values does not help, the search goes on by bits, to single ids."""
    filters = [(0, 0.999), (0, 0.4), (600, 0.999), (600, 0.4), (1299, 0.4)]
    params = np.array([[1, top_k, top_p, 0] for top_k, top_p in filters], np.float32)
    u = np.linspace(0, 1 - 2**-24, len(params), dtype=np.float32)
    rows = np.tile(x.astype(np.float32), (len(params), 1))
    check_draws(on_kernel(), rows, params, u, mx.float32)


@plain_forms
def test_logits_in_float16_and_bfloat16(sampler: Sampler) -> None:
    for dtype in (mx.float16, mx.bfloat16):
        check_random(sampler, 9, 517, dtype, None)


@plain_forms
def test_top_k_of_one_is_greedy_even_among_equals(sampler: Sampler) -> None:
    x = mx.array([[1.0, 3.0, 3.0, 3.0]] * 2)
    params = mx.array([[2.0, 1, 1, 0], [0, 0, 1, 0]])
    assert sampler(x, params, mx.array([0.99, 0.99]))[0].tolist() == [1, 1]


@plain_forms
def test_settings_hold_per_row(sampler: Sampler) -> None:
    """A row's token does not depend on its neighbours' settings."""
    generator = np.random.default_rng(3)
    x = generator.normal(0, 2, (8, 300)).astype(np.float32)
    params, u = random_settings(generator, 8, 300), generator.random(8, dtype=np.float32)
    together = sampler(mx.array(x), mx.array(params), mx.array(u))[0].tolist()
    alone = [sampler(*(mx.array(part[i : i + 1]) for part in (x, params, u)))[0].item() for i in range(8)]
    assert together == alone


def chi_square(sampler: Sampler, draws: int) -> float:
    """Of `draws` evenly random draws from logits [2, 1.5, 1, 0.5] at temperature 1; 3 degrees of freedom."""
    x = np.array([2, 1.5, 1, 0.5], np.float32)
    u = np.random.default_rng(44).random(draws, dtype=np.float32)
    params = mx.array(np.tile(np.array([1, 0, 1, 0], np.float32), (draws, 1)))
    token, _ = sampler(mx.array(np.tile(x, (draws, 1))), params, mx.array(u))
    counts = np.bincount(np.array(token), minlength=4)
    expected = draws * distribution(x.astype(np.float64), 1, 0, 1, 0)
    return float(((counts - expected) ** 2 / expected).sum())


# The 99.9 % point of the chi-square distribution with 3 degrees of freedom.
CHI_SQUARE_LIMIT = 16.27


@plain_forms
def test_case_44_draws_follow_the_distribution(sampler: Sampler) -> None:
    assert chi_square(sampler, 20_000) < CHI_SQUARE_LIMIT


@needs_compiler
def test_case_44_draws_of_the_kernel_follow_the_distribution() -> None:
    assert chi_square(on_kernel(), 200) < CHI_SQUARE_LIMIT


def test_sample_here_is_one_of_the_forms() -> None:
    check_random(sample, 5, 100, mx.float32, None)


@pytest.mark.parametrize("count", [1, 3, 4, 9])
def test_leading_ids_take_lower_ids_among_equals(count: int) -> None:
    x = np.array([1, 5, 3, 5, 3, 3, 0, 5, 3], np.float32)
    right = sorted(sorted(range(9), key=lambda i: (-x[i], i))[:count])
    assert leading_ids(x, count).tolist() == right


@pytest.mark.parametrize("sampler", [sample_reference, sample_kernel])
def test_operands_that_do_not_go_together_are_refused(sampler: Sampler) -> None:
    x, params, u = mx.zeros((2, 5)), mx.zeros((2, 4)), mx.zeros((2,))
    for wrong in ((x[0], params, u), (x, params[:1], u), (x, params, u[:1]), (x.astype(mx.int32), params, u)):
        with pytest.raises(ValueError, match=r"must be|do not go"):
            sampler(*wrong)
