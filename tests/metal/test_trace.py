"""What MLX's experimental trace holds, pinned: a new MLX that changes it fails here, not somewhere inside."""

from __future__ import annotations

import mlx.core as mx

from tests.metal import harness  # noqa: F401  kernels below are real ones outside harness.run
from tests.metal.signature import read_signature
from tests.metal.trace import trace

GOLDEN = """inline float twice(float v) { return 2 * v; }
template <typename T, int N, bool B>
[[kernel]] void custom_kernel_golden__float16_t_4_1_int32_tc_floats_float_float_float(
  const constant int32_t* lens [[buffer(0)]],
  const constant float& scale [[buffer(1)]],
  const device float* big [[buffer(2)]],
  const constant int* big_shape [[buffer(3)]],
  device float* y [[buffer(4)]],
  device float* z [[buffer(5)]],
  uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
  uint3 thread_position_in_grid [[thread_position_in_grid]]) {
uint i = thread_position_in_grid.x;
y[i] = T(twice(lens[i % 7]) * scale + big[0] + big_shape[0]);
z[i] = thread_index_in_simdgroup;
}

template [[host_name("custom_kernel_golden__float16_t_4_1_int32_tc_floats_float_float_float")]] [[kernel]] \
decltype(custom_kernel_golden__float16_t_4_1_int32_tc_floats_float_float_float<float16_t, 4, 1>) \
custom_kernel_golden__float16_t_4_1_int32_tc_floats_float_float_float<float16_t, 4, 1>;
"""
BODY = """uint i = thread_position_in_grid.x;
y[i] = T(twice(lens[i % 7]) * scale + big[0] + big_shape[0]);
z[i] = thread_index_in_simdgroup;"""


def test_golden_text_and_launch() -> None:
    kernel = mx.fast.metal_kernel(
        name="golden",
        input_names=["lens", "scale", "big"],
        output_names=["y", "z"],
        header="inline float twice(float v) { return 2 * v; }\n",
        source=BODY,
    )
    got = trace(
        kernel,
        [mx.arange(7), mx.array(3.0), mx.zeros((9, 3))],
        grid=(70, 2, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[(140,), (140,)],
        output_dtypes=[mx.float32, mx.float32],
        template=[("T", mx.float16), ("N", 4), ("B", True)],
    )
    assert got.source == GOLDEN
    assert got.name == "custom_kernel_golden__float16_t_4_1_int32_tc_floats_float_float_float"
    assert (got.grid, got.threadgroup) == ((70, 2, 1), (32, 1, 1))
    assert got.shape_arguments == ((False, False, False), (False, False, False), (True, False, False))
    assert got.row_contiguous


def test_signature_of_the_golden_text() -> None:
    name = "custom_kernel_golden__float16_t_4_1_int32_tc_floats_float_float_float"
    signature = read_signature(GOLDEN, name)
    assert signature.buffers == ("lens", "scale", "big", "big_shape", "y", "z")
    assert signature.call == (
        f"{name}<float16_t, 4, 1>((const constant int32_t*)buffers[0], *(const constant float*)buffers[1], "
        "(const device float*)buffers[2], (const constant int*)buffers[3], (device float*)buffers[4], "
        "(device float*)buffers[5], (uint)(t->lane), uint3{(uint)t->position_in_grid[0], "
        "(uint)t->position_in_grid[1], (uint)t->position_in_grid[2]})"
    )
