"""The plain-MLX reading of GGUF blocks against the package `gguf`, and its products against NumPy."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlxserve.kernels_metal import gguf_reference
from mlxserve.kernels_metal.gguf_formats import FORMATS
from tests.kernels_metal.gguf_samples import random_blocks, truth


@pytest.mark.parametrize("kind", FORMATS)
def test_dequantise_equals_the_package_bit_for_bit(kind: str) -> None:
    blocks = random_blocks(kind, (2, 5), 512)
    ours = np.array(gguf_reference.dequantize(mx.array(blocks), kind))
    np.testing.assert_array_equal(ours, truth(blocks, kind))


def test_case_47_a_q4_1_tensor_of_8_by_64_equals_the_reference_dequantiser() -> None:
    blocks = random_blocks("Q4_1", (8,), 64)
    ours = np.array(gguf_reference.dequantize(mx.array(blocks), "Q4_1"))
    np.testing.assert_array_equal(ours, truth(blocks, "Q4_1"))
