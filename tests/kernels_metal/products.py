"""What the tests of matrix kernels share: cases, operands, tolerances."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

# Of the largest value: half a unit in the last place of the dtype, and some for the sums.
TOLERANCE = {mx.float32: 2e-6, mx.float16: 1e-3, mx.bfloat16: 8e-3}
# dtype, vectors, thread order: batches below, at and above 8; inputs of fewer than 8 elements are passed
# to a kernel in another address space.
CASES = [
    (mx.float32, 1, "forward"),
    (mx.float16, 3, "reverse"),
    (mx.bfloat16, 9, "rotating"),
]


def vectors(count: int, columns: int, dtype: mx.Dtype, seed: int = 1) -> mx.array:
    values = np.random.default_rng(seed).standard_normal((count, columns)).astype(np.float32)
    return mx.array(values).astype(dtype)


def assert_close(ours: np.ndarray, right: np.ndarray, dtype: mx.Dtype) -> None:
    tolerance = TOLERANCE[dtype] * np.abs(right).max()
    np.testing.assert_allclose(ours.astype(np.float32), right, rtol=0, atol=tolerance)
