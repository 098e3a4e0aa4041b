"""Numbers out of blocks, against the `gguf` package's own dequantiser."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize, quantize
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxserve.errors import ModelUnsupported
from mlxserve.models.gguf.file import TensorInfo
from mlxserve.models.gguf.quants import REPACKABLE, Packed, dequantise, repack

Kind = GGMLQuantizationType
BLOCKS = [
    *(Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0),
    *(Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K),
    *(Kind.IQ1_S, Kind.IQ1_M, Kind.IQ2_XXS, Kind.IQ2_XS, Kind.IQ2_S, Kind.IQ3_XXS, Kind.IQ3_S),
    *(Kind.IQ4_NL, Kind.IQ4_XS, Kind.TQ1_0, Kind.TQ2_0, Kind.MXFP4),
]
# Where each block type keeps its float16 scales, in bytes; random bytes there would be infinities.
HALVES = {Kind.Q4_0: [0], Kind.Q4_1: [0, 2], Kind.Q5_0: [0], Kind.Q5_1: [0, 2], Kind.Q8_0: [0]}
HALVES |= {Kind.Q4_K: [0, 2], Kind.Q5_K: [0, 2]}


def _random(kind: Kind, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Random bytes of a tensor, with finite scales where their place is known."""
    block_values, block_bytes = GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (int(np.prod(shape)) // block_values, block_bytes), dtype=np.uint8)
    if kind == Kind.MXFP4:
        blocks[:, 0] = rng.integers(100, 140, len(blocks))
    for start in HALVES.get(kind, []):
        scales = rng.normal(0, 0.02, len(blocks)).astype(np.float16)
        blocks[:, start : start + 2] = scales[:, None].view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def _tensor(kind: Kind, shape: tuple[int, ...], data: np.ndarray) -> TensorInfo:
    return TensorInfo("t", kind, shape, data)


def _unpacked(packed: Packed) -> np.ndarray:
    biases = None if packed.biases is None else mx.array(packed.biases)
    form = {"group_size": packed.group_size, "bits": packed.bits, "mode": packed.mode}
    arrays = mx.array(packed.weight), mx.array(packed.scales), biases
    return np.array(mx.dequantize(*arrays, **form, dtype=mx.float32))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("kind", BLOCKS, ids=lambda kind: kind.name)
def test_blocks_equal_the_packages_dequantiser(kind: Kind) -> None:
    shape = (3, 7, 512)
    data = _random(kind, shape)
    expected = dequantize(data, kind)
    np.testing.assert_array_equal(dequantise(_tensor(kind, shape, data)), expected)


def test_large_tensors_are_cut_into_pieces_without_a_seam() -> None:
    shape = (700, 576)  # several pieces, the last one odd
    data = quantize(np.random.default_rng(1).normal(size=shape).astype(np.float32), Kind.Q8_0)
    np.testing.assert_array_equal(dequantise(_tensor(Kind.Q8_0, shape, data)), dequantize(data, Kind.Q8_0))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64])
def test_plain_floats(dtype: type) -> None:
    values = np.random.default_rng(2).normal(size=(3, 5)).astype(dtype)
    kind = {np.float32: Kind.F32, np.float16: Kind.F16, np.float64: Kind.F64}[dtype]
    got = dequantise(_tensor(kind, (3, 5), values.view(np.uint8).reshape(3, -1)))
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, values.astype(np.float32))


def test_a_type_without_dequantiser_is_named() -> None:
    data = np.zeros((1, GGML_QUANT_SIZES[Kind.Q8_K][1]), np.uint8)
    with pytest.raises(ModelUnsupported, match="t is stored as Q8_K"):
        dequantise(_tensor(Kind.Q8_K, (1, 256), data))


def test_case_47_an_8_by_64_q4_1_tensor() -> None:
    values = np.random.default_rng(3).normal(size=(8, 64)).astype(np.float32)
    data = quantize(values, Kind.Q4_1)
    expected = dequantize(data, Kind.Q4_1)
    np.testing.assert_array_equal(dequantise(_tensor(Kind.Q4_1, (8, 64), data)), expected)
    packed = repack(data, Kind.Q4_1, (8, 64))
    assert (packed.weight.shape, packed.scales.shape, packed.bits) == ((8, 8), (8, 2), 4)
    np.testing.assert_array_equal(_unpacked(packed), expected)


@pytest.mark.parametrize("kind", REPACKABLE, ids=lambda kind: kind.name)
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(1, 5), blocks=st.integers(1, 3))
def test_repack_is_exact_in_float32(kind: Kind, seed: int, rows: int, blocks: int) -> None:
    shape = (rows, blocks * 256)
    data = _random(kind, shape, seed)
    np.testing.assert_array_equal(_unpacked(repack(data, kind, shape)), dequantize(data, kind))


@pytest.mark.parametrize("kind", REPACKABLE, ids=lambda kind: kind.name)
def test_repack_keeps_the_files_size(kind: Kind) -> None:
    shape = (4, 8, 256)  # a stack of experts
    packed = repack(_random(kind, shape), kind, shape)
    assert packed.weight.shape == (4, 8, 256 * packed.bits // 32)
    scales = packed.scales.size if packed.biases is None else 2 * (packed.scales.size + packed.biases.size)
    assert packed.weight.nbytes + scales <= 1.25 * _random(kind, shape).nbytes
    np.testing.assert_array_equal(_unpacked(packed), dequantize(_random(kind, shape), kind))


def test_types_without_an_exact_form_are_refused() -> None:
    with pytest.raises(ModelUnsupported, match="Q6_K"):
        repack(_random(Kind.Q6_K, (1, 256)), Kind.Q6_K, (1, 256))
