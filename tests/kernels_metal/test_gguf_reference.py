"""The plain-MLX reading of GGUF blocks against the package `gguf`, and its products against NumPy."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlxserve.errors import ModelInvalid, ModelUnsupported
from mlxserve.kernels_metal import gguf_reference
from mlxserve.kernels_metal.gguf_formats import FORMATS, find_format
from tests.kernels_metal.gguf_samples import random_blocks, truth
from tests.kernels_metal.products import assert_close, vectors


@pytest.mark.parametrize("kind", FORMATS)
def test_dequantise_equals_the_package_bit_for_bit(kind: str) -> None:
    blocks = random_blocks(kind, (2, 5), 512)
    ours = np.array(gguf_reference.dequantize(mx.array(blocks), kind))
    np.testing.assert_array_equal(ours, truth(blocks, kind))


def test_case_47_a_q4_1_tensor_of_8_by_64_equals_the_reference_dequantiser() -> None:
    blocks = random_blocks("Q4_1", (8,), 64)
    ours = np.array(gguf_reference.dequantize(mx.array(blocks), "Q4_1"))
    np.testing.assert_array_equal(ours, truth(blocks, "Q4_1"))


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("slab", [256, 700, 10**6])
def test_matmul_in_slabs_of_any_size(monkeypatch: pytest.MonkeyPatch, slab: int, dtype: mx.Dtype) -> None:
    monkeypatch.setattr(gguf_reference, "SLAB_WEIGHTS", slab)
    blocks, x = random_blocks("Q5_K", (13,), 256), vectors(6, 256, dtype).reshape(2, 3, 256)
    ours = gguf_reference.matmul(x, mx.array(blocks), "Q5_K")
    assert ours.dtype == dtype
    right = np.array(x.astype(mx.float32)) @ truth(blocks, "Q5_K").T
    assert_close(np.array(ours.astype(mx.float32)), right, dtype)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_matmul_of_few_vectors(kind: str, count: int) -> None:
    blocks, x = random_blocks(kind, (13,), 512), vectors(count, 512, mx.float32)
    ours = gguf_reference.matmul(x, mx.array(blocks), kind)
    assert_close(np.array(ours), np.array(x) @ truth(blocks, kind).T, mx.float32)


@pytest.mark.parametrize("share", [1, 3])
def test_gather_matmul_takes_each_rows_expert(share: int) -> None:
    blocks, x = random_blocks("Q3_K", (4, 7), 256), vectors(5, 256, mx.float32)
    indices = np.random.default_rng(0).integers(0, 3, 5 * share)
    ours = gguf_reference.gather_matmul(x, mx.array(blocks), mx.array(indices), "Q3_K")
    right = np.einsum("pk,pnk->pn", np.repeat(np.array(x), share, 0), truth(blocks, "Q3_K")[indices])
    assert_close(np.array(ours), right, mx.float32)


def test_formats_say_what_divides() -> None:
    q6 = find_format("Q6_K")
    assert q6.row_bytes(512) == 420
    assert q6.row_weights(420) == 512
    with pytest.raises(ModelInvalid, match="256 weights; a row of 300"):
        q6.row_bytes(300)
    with pytest.raises(ModelInvalid, match="210 bytes; a row of 0"):
        q6.row_weights(0)
    with pytest.raises(ModelUnsupported, match="TQ1_0"):
        find_format("TQ1_0")
