"""Counters against numbers worked out by hand."""

from __future__ import annotations

import mlx.core as mx
import pytest

from tests.metal import harness
from tests.metal.scratch import run_body

# body, (read, read_once, read_distinct) of x in bytes; 64 threads are two simdgroups of one threadgroup
READS = {
    "each_lane_its_own": ("y[i] = x[i];", (256, 256, 256)),
    "broadcast_counts_once_a_simdgroup": ("y[i] = x[5];", (8, 4, 4)),
    "two_instructions_count_twice": ("y[i] = x[i] + x[i ^ 1];", (512, 256, 256)),
    "lanes_share_half": ("y[i] = x[i / 2];", (128, 128, 128)),
    "overlapping_vectors": (
        "packed_float2 v = ((const device packed_float2*)(x + min(i, 62u)))[0]; y[i] = v.x + v.y;",
        (132 + 128, 256, 256),
    ),
    "loop_of_broadcasts": (
        "float s = 0; for (uint k = i / 32; k < 8; k++) s += x[k]; y[i] = s;",
        (32 + 28, 32, 32),
    ),
    "a_branch_of_some_lanes": ("float s = 0; if (i % 32 < 8) s = x[i]; y[i] = s;", (64, 64, 64)),
}


@pytest.mark.parametrize("name", READS)
@pytest.mark.parametrize("order", harness.ORDERS)
def test_bytes_read(name: str, order: harness.Order) -> None:
    body, expected = READS[name]
    x = run_body(body, order=order).counters.traffic["x"]
    assert (x.read, x.read_once, x.read_distinct) == expected
    assert (x.size, x.written, x.written_distinct) == (256, 0, 0)


def test_bytes_read_by_several_threadgroups() -> None:
    x = run_body("y[i] = x[i % 64];", threads=192).counters.traffic["x"]
    assert (x.read, x.read_once, x.read_distinct, x.size) == (768, 768, 256, 768)


def test_bytes_written() -> None:
    y = run_body("y[i] = x[i]; y[i] += 1;\nif (i < 8) y[i] = 0;").counters.traffic["y"]
    assert y.written_distinct == 256 and 256 < y.written <= 2 * 256 + 32


def test_a_load_is_not_repeated_across_stores_to_other_memory() -> None:
    """An input cannot change, so what the optimiser merges on a GPU is merged here."""
    body = "threadgroup float t[64]; t[i] = x[i]; y[i] = x[i];"
    assert run_body(body).counters.traffic["x"].read == 256


def test_barriers_and_operations_of_the_busiest_thread() -> None:
    body = """for (int k = 0; k < 3; k++) threadgroup_barrier(mem_flags::mem_threadgroup);
        simdgroup_barrier(mem_flags::mem_threadgroup);
        float s = simd_sum(x[i]);
        if (i >= 32) s += simd_max(x[i]) + simd_min(x[i]);
        y[i] = s;"""
    counters = run_body(body).counters
    assert (counters.barriers, counters.simdgroup_barriers, counters.simdgroup_operations) == (3, 1, 3)


def test_threadgroup_bytes() -> None:
    body = (
        "threadgroup float t[64]; threadgroup half u[3][5]; t[i] = x[i]; if (i == 0) u[0][0] = 1; y[i] = 1;"
    )
    assert run_body(body).counters.threadgroup_bytes == 256 + 30


def test_several_launches_of_one_wrapper() -> None:
    def kernel(name: str, body: str) -> object:
        made = mx.fast.metal_kernel(
            name=name,
            input_names=["x"],
            output_names=["y"],
            source=f"uint i = thread_position_in_grid.x; {body}",
        )
        shape = (64, 1, 1)
        return lambda x: made(
            inputs=[x], grid=shape, threadgroup=shape, output_shapes=[(64,)], output_dtypes=[mx.float32]
        )[0]

    first, second = kernel("double_it", "y[i] = 2 * x[i];"), kernel("reverse_it", "y[i] = x[63 - i];")
    result = harness.run(lambda x: second(first(x) + 1), mx.arange(64, dtype=mx.float32))
    assert result.outputs[0][0] == 2 * 63 + 1
    assert [launch.name for launch in result.launches] == ["double_it", "reverse_it"]
    assert result.launch("reverse_it").counters.traffic["x"].read == 256
    with pytest.raises(AssertionError, match="name one"):
        _ = result.counters
