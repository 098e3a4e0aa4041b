"""The paged attention kernels, run on this CPU, against NumPy: every size, dtype, order and form of pages."""

from __future__ import annotations

from itertools import cycle
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxserve.errors import UsageError
from mlxserve.kernels_metal import paged_attention as paged
from mlxserve.kernels_metal.plan import Pages, QuantisedPages
from tests.kernels_metal.paged import Problem, attend, check_traffic, pack, problem
from tests.metal import harness

SCALE = 0.125
TOLERANCE = {mx.float32: 1e-5, mx.float16: 4e-3, mx.bfloat16: 3e-2}
DTYPES = list(TOLERANCE)
CASES = list(zip(DTYPES, harness.ORDERS, strict=True))
SINKS = np.array([-2.0, 0.5, 20.0, 0.0], np.float32)
pytestmark = pytest.mark.usefixtures("compiler")


def run(
    case: Problem,
    dtype: mx.Dtype = mx.float32,
    order: harness.Order = "forward",
    sinks: np.ndarray | None = None,
    softcap: float | None = None,
) -> harness.Result:
    """Run the kernels, hold the result to the truth, and the bytes they read to the least possible."""
    q, k_pages, v_pages, rounded = case.in_dtype(dtype)
    result = harness.run(
        paged.paged_attention,
        q,
        k_pages,
        v_pages,
        rounded.plan,
        scale=SCALE,
        sinks=None if sinks is None else mx.array(sinks),
        softcap=softcap,
        order=order,
    )
    truth = attend(rounded.q, rounded.k_pages, rounded.v_pages, rounded.plan, SCALE, sinks, softcap)
    np.testing.assert_allclose(result.outputs[0], truth, atol=TOLERANCE[dtype])
    check_traffic(result, case.plan, q.shape[1], k_pages, v_pages)
    return result


@pytest.mark.parametrize(("dtype", "order"), CASES)
@pytest.mark.parametrize("batch", [1, 7, 9])
def test_decode_of_ragged_batches(batch: int, dtype: mx.Dtype, order: harness.Order) -> None:
    lengths = [1, 16, 17, 15, 33, 128, 127, 130, 40][:batch]
    run(problem([length - 1 for length in lengths], [1] * batch, size=64, seed=batch), dtype, order)


@pytest.mark.parametrize(("size", "dtype"), list(zip(paged.SIZES, cycle(DTYPES))))
def test_decode_of_all_head_sizes(size: int, dtype: mx.Dtype) -> None:
    run(problem([36], [1], heads=3, kv_heads=1, size=size), dtype)


@pytest.mark.parametrize(
    ("size", "dtype"), list(zip(paged.SIZES, cycle([mx.bfloat16, mx.float32, mx.float16])))
)
def test_chunks_of_all_head_sizes(size: int, dtype: mx.Dtype) -> None:
    run(problem([21], [15], heads=3, kv_heads=1, size=size), dtype)


@pytest.mark.parametrize(("dtype", "order"), CASES)
@pytest.mark.parametrize("count", [31, 33, 5])
def test_chunks_off_every_tile_boundary(count: int, dtype: mx.Dtype, order: harness.Order) -> None:
    run(problem([0, 31, 15], [count, 33, 17], size=64, seed=count), dtype, order)


@pytest.mark.parametrize("count", range(1, 9))
def test_verification_of_several_rows(count: int) -> None:
    for heads in (1, 4):
        case = problem([50, 0, 12], [count] * 3, heads=heads, kv_heads=1, size=64, seed=count)
        result = run(case, order="rotating")
        names = {launch.name.split("_plain")[0] for launch in result.launches}
        assert names == {"paged_decode" if heads * count <= 8 else "paged_prefill"}


@pytest.mark.parametrize("softcap", [None, 4.0])
@pytest.mark.parametrize("sinks", [None, SINKS], ids=["no sinks", "sinks"])
@pytest.mark.parametrize("window", [None, 20])
def test_windows_sinks_and_softcap(
    window: int | None, sinks: np.ndarray | None, softcap: float | None
) -> None:
    case = problem([0, 19, 20, 70, 0, 55], [1, 1, 1, 1, 30, 20], size=64, window=window)
    run(case, mx.float32, "reverse", sinks, softcap)


@pytest.mark.parametrize("page_size", [1, 33])
def test_page_sizes(page_size: int) -> None:
    run(problem([page_size - 1, page_size, 70], [1, 1, 9], size=64, page_size=page_size))


@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (12, 1)])
def test_head_groups(heads: int, kv_heads: int) -> None:
    run(problem([40, 3], [1, 7], heads=heads, kv_heads=kv_heads, size=64))


def test_values_of_another_size() -> None:
    run(problem([40, 3], [1, 7], size=192, value_size=128), mx.float16)


@pytest.mark.parametrize("launch", [paged.decode, paged.prefill])
@pytest.mark.parametrize("sinks", [None, SINKS], ids=["no sinks", "sinks"])
def test_split_keys_are_joined(launch: Any, sinks: np.ndarray | None) -> None:
    case = problem([299, 0, 40], [2, 2, 2], size=64)  # the shorter ones leave splits without keys
    work = paged.share_out(case.plan, 2, frozenset({"paged_decode"}), True)
    assert work.decode is not None
    truth = attend(case.q, case.k_pages, case.v_pages, case.plan, SCALE, sinks)
    for splits in (2, 7):
        result = harness.run(launch, operands(case, sinks), work.decode, splits)
        np.testing.assert_allclose(result.outputs[0], truth, atol=1e-5)
        assert [launch.name for launch in result.launches][1:] == ["paged_reduce_v1"]


def operands(case: Problem, sinks: np.ndarray | None = None) -> paged.Operands:
    arrays = [mx.array(part) for part in (case.q, case.k_pages, case.v_pages)]
    table = mx.array(np.pad(case.plan.tables, ((0, 0), (0, 8))))
    return paged.Operands(*arrays, table, SCALE, None if sinks is None else mx.array(sinks), None)


def test_long_contexts_are_split_when_few_threadgroups_would_run() -> None:
    result = run(problem([1030], [1], heads=2, kv_heads=1, size=64))
    assert result.launches[0].grid == (32, paged.DECODE_GROUPS, 4)


@pytest.mark.parametrize("launch", [paged.decode, paged.prefill])
@pytest.mark.parametrize("splits", [1, 2])
def test_a_sequence_without_keys_gives_zeros(launch: Any, splits: int) -> None:
    case = problem([9], [1], size=64)
    empty = mx.array([[0, 0, 0, 1, 0, 0, 0, 0]], mx.int32)
    for sinks in (None, SINKS):
        result = harness.run(launch, operands(case, sinks), paged.Tasks(empty, 1, 1), splits)
        np.testing.assert_array_equal(result.outputs[0], np.zeros((1, 4, 64)))


@pytest.mark.parametrize(("dtype", "order"), CASES)
@pytest.mark.parametrize("bits", [8, 4])
def test_packed_pages(bits: int, dtype: mx.Dtype, order: harness.Order) -> None:
    case = problem([40, 0, 30, 15], [1, 1, 12, 1], size=64, window=37)
    check_packed(case, packed(case, "k", bits, 32, dtype), packed(case, "v", bits, 32, dtype), dtype, order)


@pytest.mark.parametrize(("size", "group_size"), [(96, 32), (192, 64), (256, 128)])
def test_packed_pages_of_other_sizes(size: int, group_size: int) -> None:
    case = problem([33, 20], [1, 9], heads=3, kv_heads=1, size=size)
    k_pages, v_pages = (packed(case, side, 4, group_size, mx.float16) for side in "kv")
    check_packed(case, k_pages, v_pages, mx.float16, "forward")


def test_keys_and_values_packed_differently() -> None:
    case = problem([33, 20], [1, 9], size=64)
    v_pages = packed(case, "v", 4, 32, mx.float32)
    check_packed(case, packed(case, "k", 8, 64, mx.float32), v_pages, mx.float32, "reverse")
    check_packed(case, (mx.array(case.k_pages), case.k_pages), v_pages, mx.float32, "reverse")


def packed(
    case: Problem, side: str, bits: int, group_size: int, dtype: mx.Dtype
) -> tuple[QuantisedPages, np.ndarray]:
    return pack(getattr(case, f"{side}_pages"), bits, group_size, dtype)


def check_packed(
    case: Problem,
    keys: tuple[Pages, np.ndarray],
    values: tuple[Pages, np.ndarray],
    dtype: mx.Dtype,
    order: harness.Order,
) -> None:
    q = mx.array(case.q).astype(dtype)
    plan = case.plan
    result = harness.run(paged.paged_attention, q, keys[0], values[0], plan, scale=SCALE, order=order)
    truth = attend(np.array(q.astype(mx.float32)), keys[1], values[1], plan, SCALE)
    np.testing.assert_allclose(result.outputs[0], truth, atol=TOLERANCE[dtype])
    check_traffic(result, plan, q.shape[1], keys[0], values[0])


def test_decode_waits_nowhere_in_its_loop_and_prompts_twice_a_block() -> None:
    for length in (40, 400):
        decode = run(problem([length], [1], size=64)).counters
        assert decode.barriers == 2 + paged.DECODE_GROUPS
    prefill = run(problem([0], [64], size=64, heads=2)).counters
    assert prefill.barriers == 2 * (64 // paged.keys_a_block(128, 4))


def test_rows_are_shared_out_and_put_back_in_order() -> None:
    case = problem([3, 0, 9, 0, 30, 2], [1, 300, 12, 0, 2, 1], size=64)
    work = paged.share_out(case.plan, 2, frozenset({"paged_decode", "paged_prefill"}), True)
    assert work.decode is not None and work.prefill is not None and work.rest is not None
    assert (work.decode.rows, work.prefill.rows, work.rest.counts) == (4, 12, (300,))
    run(case)


@pytest.mark.parametrize("kernels", [{"paged_decode"}, {"paged_prefill"}, set()])
def test_rows_of_a_kernel_that_is_off_take_the_reference(kernels: set[str]) -> None:
    case = problem([3, 9, 30], [1, 12, 2], size=64)
    arrays = [mx.array(part) for part in (case.q, case.k_pages, case.v_pages)]
    options = {"scale": SCALE, "kernels": frozenset(kernels)}
    result = harness.run(paged.paged_attention, *arrays, case.plan, **options)
    truth = attend(case.q, case.k_pages, case.v_pages, case.plan, SCALE)
    np.testing.assert_allclose(result.outputs[0], truth, atol=1e-5)
    assert {launch.name.split("_plain")[0] for launch in result.launches} == kernels


def test_a_step_without_rows() -> None:
    case = problem([4], [0], size=64)
    arrays = [mx.array(part) for part in (case.q, case.k_pages, case.v_pages)]
    assert paged.paged_attention(*arrays, case.plan, scale=SCALE).shape == (0, 4, 64)


def test_operands_that_do_not_go_together_are_refused() -> None:
    case = problem([4], [1], size=64)
    q, k, v = (mx.array(part) for part in (case.q, case.k_pages, case.v_pages))
    for wrong in (
        {"q": q[:, :3]},
        {"q": q[..., :32]},
        {"q": q[0]},
        {"q": q.astype(mx.int32)},
        {"v_pages": v[:, :, :1]},
        {"v_pages": v[..., :48]},
        {"v_pages": v.astype(mx.float16)},
        {"sinks": mx.zeros((3,))},
    ):
        arguments: dict[str, Any] = {"q": q, "k_pages": k, "v_pages": v, "plan": case.plan, "scale": SCALE}
        with pytest.raises(ValueError, match=r"must|do not go|no kernel"):
            paged.paged_attention(**{**arguments, **wrong})
    with pytest.raises(UsageError, match="8 or 4 bits"):
        QuantisedPages(k, k, k, 3, 32)


@pytest.mark.parametrize(("sizes", "item_bytes", "keys"), [(128, 2, 32), (512, 2, 16), (512, 4, 8)])
def test_blocks_fit_threadgroup_memory(sizes: int, item_bytes: int, keys: int) -> None:
    assert paged.keys_a_block(sizes, item_bytes) == keys
