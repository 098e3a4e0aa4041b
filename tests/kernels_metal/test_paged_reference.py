"""The plain-MLX paged attention against NumPy: ragged batches, windows, sinks, soft-cap, packed pages."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxserve.errors import UsageError
from mlxserve.kernels_metal import layout, reference
from mlxserve.kernels_metal.plan import AttentionPlan
from tests.kernels_metal.paged import Problem, attend, pack, problem

SCALE = 0.2


def answer(case: Problem, **options: Any) -> np.ndarray:
    """Places that do not count hold NaN among the keys, and among the values the largest of numbers."""
    values = np.where(np.isnan(case.v_pages), np.finfo(np.float32).max, case.v_pages)
    q, k_pages, v_pages = (mx.array(part) for part in (case.q, case.k_pages, values))
    out = reference.paged_attention(q, k_pages, v_pages, case.plan, scale=SCALE, **options)
    return np.array(out)


def check(case: Problem, sinks: np.ndarray | None = None, softcap: float | None = None) -> None:
    options = {"sinks": None if sinks is None else mx.array(sinks), "softcap": softcap}
    truth = attend(case.q, case.k_pages, case.v_pages, case.plan, SCALE, sinks, softcap)
    np.testing.assert_allclose(answer(case, **options), truth, atol=2e-5)


@pytest.fixture(params=["spread", "heads first"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few K/V heads, read as they lie, and many, brought to the front."""
    if request.param == "heads first":
        monkeypatch.setattr(reference, "MAX_SPREAD_HEADS", 0)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("window", [None, 1, 7, 40])
@pytest.mark.parametrize("shuffled", [True, False])
def test_ragged_decode(window: int | None, shuffled: bool) -> None:
    starts = [0, 15, 16, 17, 31, 200, 333, 5, 210]
    check(problem(starts, [1] * 9, window=window, shuffled=shuffled, seed=1))


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("batch", [1, 2, 7, 8, 9, 17])
def test_batch_sizes(batch: int) -> None:
    check(problem([7 * i for i in range(batch)], [1] * batch, seed=batch))


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("window", [None, 5, 33])
def test_chunks_and_decode_rows_together(window: int | None) -> None:
    check(problem([0, 40, 16, 3, 100], [150, 1, 5, 0, 1], window=window))


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("sinking", [True, False])
def test_sinks_and_softcap(sinking: bool, softcap: float | None) -> None:
    sinks = np.array([-3.0, 0.0, 2.0, 30.0], np.float32) if sinking else None
    check(problem([0, 9, 150, 20], [1, 1, 1, 40]), sinks, softcap)


@pytest.mark.parametrize("size", [64, 80, 96, 128, 192, 256])
def test_head_sizes_and_values_of_another_size(size: int) -> None:
    check(problem([3, 40, 2], [1, 1, 6], size=size, value_size=size // 2))


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (9, 3), (8, 1), (6, 6), (12, 6)])
def test_head_groups(heads: int, kv_heads: int) -> None:
    check(problem([30, 70, 5], [1, 1, 4], heads=heads, kv_heads=kv_heads))


@pytest.mark.parametrize("window", [None, 5, 33, 400])
@pytest.mark.parametrize("sinking", [True, False])
def test_chunks_by_mlx_attention(window: int | None, sinking: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU takes; MLX's own attention runs anywhere."""
    monkeypatch.setattr(reference, "_has_fused_attention", lambda: True)
    sinks = np.array([-3.0, 0.0, 2.0, 30.0], np.float32) if sinking else None
    check(problem([0, 40, 16, 3], [150, 1, 5, 2], window=window), sinks)


def test_long_runs_are_read_in_place_and_the_rest_gathered() -> None:
    case = problem([399, 300], [1, 1], shuffled=False)
    table = case.plan.tables.copy()
    table[0, [3, 24]] = table[0, [24, 3]]  # runs of 3, 1, 20 and 1 pages
    case.k_pages[table[0, [3, 24]]] = case.k_pages[table[0, [24, 3]]]
    case.v_pages[table[0, [3, 24]]] = case.v_pages[table[0, [24, 3]]]
    moved = AttentionPlan(case.plan.starts, case.plan.counts, table, (0, 0), 16)
    solos = layout.Layout.of(moved, solo_wanted=True).solos
    assert [solo.runs for solo in solos] == [((64, 384),), ((400, 701),)]
    check(Problem(case.q, case.k_pages, case.v_pages, moved))


def test_buckets_waste_little_and_stay_small() -> None:
    plan = problem([500] * 9 + [499, 400, 20, 10], [1] * 13).plan
    buckets = layout.Layout.of(plan, solo_wanted=False).buckets
    for bucket in buckets:
        batch, longest = bucket.gather.slots.shape
        assert batch == 1 or batch * longest <= layout.BUCKET_MAX_TOKENS
        own = [plan.starts[row] + 1 for row in bucket.rows]
        assert batch * longest - sum(own) <= layout.BUCKET_COST_TOKENS
    assert sorted(row for bucket in buckets for row in bucket.rows) == list(range(13))


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_half_precision(dtype: mx.Dtype) -> None:
    q, k_pages, v_pages, rounded = problem([3, 99, 10], [1, 1, 20]).in_dtype(dtype)
    v_pages = mx.where(mx.isnan(v_pages), 1000, v_pages)
    out = reference.paged_attention(q, k_pages, v_pages, rounded.plan, scale=SCALE)
    assert out.dtype == dtype
    truth = attend(rounded.q, rounded.k_pages, rounded.v_pages, rounded.plan, SCALE)
    np.testing.assert_allclose(
        np.array(out.astype(mx.float32)), truth, atol=2e-2 if dtype == mx.bfloat16 else 3e-3
    )


@pytest.mark.parametrize(("k_bits", "v_bits"), [(8, 8), (4, 4), (8, 4)])
def test_packed_pages(k_bits: int, v_bits: int) -> None:
    case = problem([3, 99, 10], [1, 1, 20], size=64)
    k_pages, k_values = pack(case.k_pages, k_bits)
    v_pages, v_values = pack(case.v_pages, v_bits)
    out = reference.paged_attention(mx.array(case.q), k_pages, v_pages, case.plan, scale=SCALE)
    truth = attend(case.q, k_values, v_values, case.plan, SCALE)
    np.testing.assert_allclose(np.array(out), truth, atol=2e-5)


def test_one_side_packed() -> None:
    case = problem([30], [1], size=64)
    v_pages, v_values = pack(case.v_pages, 8)
    out = reference.paged_attention(mx.array(case.q), mx.array(case.k_pages), v_pages, case.plan, scale=SCALE)
    truth = attend(case.q, case.k_pages, v_values, case.plan, SCALE)
    np.testing.assert_allclose(np.array(out), truth, atol=2e-5)


@pytest.mark.parametrize("length", [255, 256, 257])
def test_case_52_boundary_lengths_batched_equal_solo(length: int) -> None:
    together = problem([4, length - 1, 4], [1, 1, 1], heads=9, kv_heads=3, size=64)
    out = answer(together)
    assert np.isfinite(out).all()
    for s in range(3):
        plan = together.plan
        alone = AttentionPlan((plan.starts[s],), (1,), plan.tables[s : s + 1], (0,), 16)
        solo = answer(Problem(together.q[s : s + 1], together.k_pages, together.v_pages, alone))
        np.testing.assert_allclose(out[s], solo[0], atol=1e-5)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_ragged_step(data: st.DataObject) -> None:
    segments = data.draw(st.integers(0, 6))
    starts = data.draw(st.lists(st.integers(0, 90), min_size=segments, max_size=segments))
    counts = data.draw(
        st.lists(st.sampled_from([0, 1, 1, 1, 2, 8, 30]), min_size=segments, max_size=segments)
    )
    kv_heads = data.draw(st.integers(1, 6))
    case = problem(
        starts,
        counts,
        kv_heads=kv_heads,
        heads=kv_heads * data.draw(st.integers(1, 3)),
        size=8,
        page_size=data.draw(st.sampled_from([1, 4, 16, 32])),
        window=data.draw(st.none() | st.integers(1, 50)),
        shuffled=data.draw(st.booleans()),
        seed=data.draw(st.integers(0, 2**16)),
    )
    check(case)


def test_a_step_without_rows() -> None:
    assert answer(problem([], [])).shape == (0, 4, 32)


def test_index_arrays_are_built_once_a_step() -> None:
    case = problem([50, 60], [1, 12])
    answer(case)
    before = dict(case.plan._built)
    answer(case)
    assert case.plan._built == before


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"counts": (1,)}, "one start, count"),
        ({"window": 0}, "at least 1"),
        ({"starts": (3, 64)}, "Segment 1 sees positions 0 to 64, but its table holds 0 to 63"),
        ({"first_pages": (1, 0)}, "Segment 0"),
        ({"starts": (-1, 5)}, "Segment 0"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(change: dict[str, Any], words: str) -> None:
    right: dict[str, Any] = {
        "starts": (3, 5),
        "counts": (1, 1),
        "tables": np.zeros((2, 4), np.int32),
        "first_pages": (0, 0),
        "page_size": 16,
    }
    AttentionPlan(**right)
    with pytest.raises(UsageError, match=words):
        AttentionPlan(**{**right, **change})
