"""The harness against an independent truth: MLX's own Metal kernels run clean and match MLX's CPU results.

The text is what the installed MLX ships as Metal headers. It relies on 16-byte aligned buffers.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.metal import harness

QUANTIZED = """#include "mlx/backend/metal/kernels/steel/gemm/gemm.h"
#include "mlx/backend/metal/kernels/quantized_utils.h"
#include "mlx/backend/metal/kernels/quantized.h"
"""
PLACE = "threadgroup_position_in_grid, simdgroup_index_in_threadgroup, thread_index_in_simdgroup"
TOLERANCE = {mx.float32: 2e-5, mx.float16: 5e-3, mx.bfloat16: 3e-2}
N, K = 64, 1024


def launch(
    name: str, header: str, body: str, inputs: dict[str, mx.array], shape: tuple[int, ...], **call: Any
) -> Any:
    """A wrapper around one of MLX's kernels; the output has the dtype of the input `x`."""
    kernel = mx.fast.metal_kernel(
        name=name, input_names=list(inputs), output_names=["y"], header=header, source=body
    )
    dtype = inputs["x"].dtype
    return lambda: kernel(
        inputs=list(inputs.values()),
        template=[("T", dtype)],
        output_shapes=[shape],
        output_dtypes=[dtype],
        **call,
    )


def check(
    wrapper: Any, expected: mx.array, dtype: mx.Dtype, order: harness.Order = "forward"
) -> harness.Result:
    result = harness.run(wrapper, order=order, strict=False, alignment=16)
    truth = np.array(expected)
    error = np.abs(result.outputs[0] - truth).max() / np.abs(truth).max()
    assert error < TOLERANCE[dtype], error
    return result


def quantized(m: int, bits: int, dtype: mx.Dtype) -> tuple[dict[str, mx.array], mx.array]:
    """Inputs of a quantised product with m rows, and its result in float32 from MLX on the CPU."""
    mx.random.seed(m)
    w, scales, biases = mx.quantize((mx.random.normal((N, K)) * 0.05).astype(dtype), group_size=64, bits=bits)
    x = mx.random.normal((m, K)).astype(dtype)
    wide = [array.astype(mx.float32) for array in (x, scales, biases)]
    expected = mx.quantized_matmul(wide[0], w, wide[1], wide[2], True, 64, bits)
    sizes = {"K": mx.array(K), "N": mx.array(N), "M": mx.array(m)}
    return {"w": w, "scales": scales, "biases": biases, "x": x, **sizes}, expected


@pytest.mark.parametrize("order", harness.ORDERS)
@pytest.mark.parametrize(
    ("bits", "dtype"), [(4, mx.float32), (4, mx.float16), (4, mx.bfloat16), (3, mx.bfloat16)]
)
def test_qmv_fast(bits: int, dtype: mx.Dtype, order: harness.Order) -> None:
    inputs, expected = quantized(2, bits, dtype)
    body = f"qmv_fast_impl<T, 64, {bits}>(w, scales, biases, x, y, K, N, {PLACE});"
    grid, threadgroup = (32 * 2, N // 8 * 2, 1), (32, 2, 1)
    wrapper = launch("qmv_fast", QUANTIZED, body, inputs, (2, N), grid=grid, threadgroup=threadgroup)
    result = check(wrapper, expected, dtype, order)
    # Its grid repeats the product for each of the two rows, so every weight is read twice.
    weights = result.counters.traffic["w"]
    assert weights.read == 2 * weights.size and weights.read_distinct == weights.size
    assert result.counters.barriers == 0


@pytest.mark.parametrize("order", harness.ORDERS)
def test_qmm_t(order: harness.Order) -> None:
    inputs, expected = quantized(40, 4, mx.bfloat16)
    body = """constexpr int BK_padded = (32 + 16 / sizeof(T));
        threadgroup T Xs[32 * BK_padded];
        threadgroup T Ws[32 * BK_padded];
        qmm_t_impl<T, 64, 4, true, T, 32, 32, 32>(w, scales, biases, x, y, Xs, Ws, K, N, M, K,
            threadgroup_position_in_grid, thread_index_in_threadgroup, simdgroup_index_in_threadgroup,
            thread_index_in_simdgroup);"""
    grid, threadgroup = (32 * (N // 32), 2 * 2, 2), (32, 2, 2)
    wrapper = launch("qmm_t", QUANTIZED, body, inputs, (40, N), grid=grid, threadgroup=threadgroup)
    result = check(wrapper, expected, mx.bfloat16, order)
    assert result.counters.threadgroup_bytes == 2 * 32 * (32 + 8) * 2
    assert result.counters.barriers == 2 * K // 32 + 1


@pytest.mark.parametrize("order", harness.ORDERS)
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_sdpa_vector(dtype: mx.Dtype, order: harness.Order) -> None:
    heads, kv_heads, length, width = 4, 2, 77, 64
    mx.random.seed(1)
    q = mx.random.normal((1, heads, 1, width)).astype(dtype)
    k, v = (mx.random.normal((1, kv_heads, length, width)).astype(dtype) for _ in range(2))
    wide = [array.astype(mx.float32) for array in (q, k, v)]
    expected = mx.fast.scaled_dot_product_attention(*wide, scale=0.125)
    inputs = {
        "x": q,
        "k": k,
        "v": v,
        "gqa": mx.array(heads // kv_heads),
        "N": mx.array(length),
        "head_stride": mx.array(length * width, mx.uint64),
        "row_stride": mx.array(width, mx.uint64),
        "scale": mx.array(0.125),
    }
    body = """sdpa_vector<T, 64, 64>(x, k, v, y, gqa, N, head_stride, row_stride, head_stride, row_stride,
        scale, (const device bool*)nullptr, (const device T*)nullptr, gqa, gqa, gqa, x, gqa,
        threadgroup_position_in_grid, threadgroups_per_grid, simdgroup_index_in_threadgroup,
        thread_index_in_simdgroup);"""
    header = '#include "mlx/backend/metal/kernels/sdpa_vector.h"\n'
    shape = (heads * 1024, 1, 1)
    wrapper = launch("sdpa_vector", header, body, inputs, q.shape, grid=shape, threadgroup=(1024, 1, 1))
    result = check(wrapper, expected, dtype, order)
    # One threadgroup a query head: K is read once for each of the two heads of a group.
    assert result.counters.traffic["k"].read == 2 * result.counters.traffic["k"].size
