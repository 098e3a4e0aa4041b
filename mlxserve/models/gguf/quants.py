"""Tensors as stored, made into numbers: float32, or MLX's own packed form.

Knows: every tensor type of the `gguf` package's dequantiser, and the exact repack of eight block types to
MLX's quantisation (groups of 32; affine ones have unsigned values with one scale and bias a group). Knows
nothing of names, architectures or the MLX runtime: arrays in and out are NumPy's.

    block type   value               MLX: scale      bias            bits
    Q4_0         d (q - 8)           d               -8 d            4
    Q4_1         d q + m             d               m               4
    Q5_0         d (q - 16)          d               -16 d           5
    Q5_1         d q + m             d               m               5
    Q8_0         d q, q signed       d               -128 d          8   (q + 128 stored)
    Q4_K, Q5_K   d s q - dmin m      d s             -dmin m         4, 5
    MXFP4        2^(e-127) fp4       e, as a byte    none            4   (MLX's mode "mxfp4")

Block layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from mlxserve.errors import ModelUnsupported
from mlxserve.models.gguf.file import TensorInfo

GROUP_SIZE = 32  # values a scale, in MLX's form
# The package's dequantiser works on 16 rows at a time: fewer, wider rows are up to three times faster.
_ROWS, _ROW_VALUES = 16, 1 << 13
_PIECE_VALUES = _ROWS * _ROW_VALUES
_PLAIN = {
    GGMLQuantizationType.F32: np.float32,
    GGMLQuantizationType.F16: np.float16,
    GGMLQuantizationType.F64: np.float64,
}
FLOAT_TYPES = frozenset({*_PLAIN, GGMLQuantizationType.BF16})


def dequantise(tensor: TensorInfo) -> np.ndarray:
    """float32 values of any tensor, in `tensor.shape`. Raises ModelUnsupported for an unknown type."""
    if tensor.type in _PLAIN:
        values = tensor.data.reshape(-1).view(_PLAIN[tensor.type]).astype(np.float32, copy=False)
        return values.reshape(tensor.shape)
    return _dequantise_blocks(tensor.name, tensor.type, tensor.data.reshape(-1)).reshape(tensor.shape)


def _dequantise_blocks(name: str, kind: GGMLQuantizationType, raw: np.ndarray) -> np.ndarray:
    """Blocks know nothing of rows, so they are cut into pieces that suit the caches."""
    block_values, block_bytes = GGML_QUANT_SIZES[kind]
    out = np.empty(raw.size // block_bytes * block_values, np.float32)
    step = max(1, _PIECE_VALUES // block_values)  # blocks a piece
    try:
        for start in range(0, raw.size // block_bytes, step):
            piece = raw[start * block_bytes : (start + step) * block_bytes]
            out[start * block_values : (start + step) * block_values] = _piece(piece, kind, block_bytes)
    except NotImplementedError as error:
        raise ModelUnsupported(f"{name} is stored as {kind.name}, which cannot be read.") from error
    return out


def _piece(raw: np.ndarray, kind: GGMLQuantizationType, block_bytes: int) -> np.ndarray:
    rows = _ROWS if raw.size % (_ROWS * block_bytes) == 0 else 1
    return dequantize(raw.reshape(rows, -1), kind).reshape(-1)


@dataclass(frozen=True, slots=True)
class Packed:
    """MLX's quantisation of a (*, rows, columns) tensor.

    weight: uint32 (*, rows, columns * bits / 32), values packed from the lowest bit on. scales, biases:
    float32 (*, rows, columns / group_size); a value is scale * q + bias. In mode "mxfp4" scales are uint8
    exponents and there are no biases.
    """

    weight: np.ndarray
    scales: np.ndarray
    biases: np.ndarray | None
    bits: int
    mode: str = "affine"
    group_size: int = GROUP_SIZE


def repack(raw: np.ndarray, kind: GGMLQuantizationType, shape: tuple[int, ...]) -> Packed:
    """The same numbers in MLX's form, exact in float32.

    raw: uint8 (*shape[:-1], bytes a row). Raises ModelUnsupported for a type outside `REPACKABLE`.
    """
    if kind not in REPACKABLE:
        raise ModelUnsupported(f"{kind.name} has no exact form in MLX's quantisation.")
    bits, unpack = REPACKABLE[kind]
    _, block_bytes = GGML_QUANT_SIZES[kind]
    values, scales, biases = unpack(raw.reshape(-1, block_bytes))  # (groups, 32), (groups,), (groups,)
    groups = (*shape[:-1], shape[-1] // GROUP_SIZE)
    return Packed(
        weight=_pack(values, bits).reshape(*shape[:-1], shape[-1] * bits // 32),
        scales=scales.reshape(groups),
        biases=None if biases is None else biases.reshape(groups),
        bits=bits,
        mode="affine" if biases is not None else "mxfp4",
    )


def _pack(values: np.ndarray, bits: int) -> np.ndarray:
    """uint8 values (groups, 32) as one little-endian stream of `bits` a value, seen as uint32."""
    if bits == 8:
        return np.ascontiguousarray(values).view(np.uint32)
    if bits == 4:
        return np.ascontiguousarray(values[:, 0::2] | values[:, 1::2] << 4).view(np.uint32)
    eights = values.reshape(-1, 8).astype(np.uint64)  # eight values fill `bits` bytes
    stream = np.zeros(len(eights), np.uint64)
    for i in range(8):
        stream |= eights[:, i] << np.uint64(i * bits)
    return np.ascontiguousarray(stream.view(np.uint8).reshape(-1, 8)[:, :bits]).reshape(-1).view(np.uint32)


Unpacked = tuple[np.ndarray, np.ndarray, np.ndarray | None]


def _half(block: np.ndarray, start: int) -> np.ndarray:
    """The float16 at byte `start` of each block, as float32 (blocks,)."""
    return np.ascontiguousarray(block[:, start : start + 2]).view(np.float16)[:, 0].astype(np.float32)


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """(…, n) bytes -> (…, 2n) values: all low halves, then all high halves."""
    return np.concatenate([packed & 0x0F, packed >> 4], axis=-1)


def _fifth_bits(packed: np.ndarray) -> np.ndarray:
    """(blocks, 4) bytes -> (blocks, 32) of 0 or 16, lowest bit first."""
    return np.unpackbits(packed, axis=-1, bitorder="little") << 4


def _q4_0(block: np.ndarray) -> Unpacked:
    scale = _half(block, 0)
    return _nibbles(block[:, 2:]), scale, -8 * scale


def _q4_1(block: np.ndarray) -> Unpacked:
    return _nibbles(block[:, 4:]), _half(block, 0), _half(block, 2)


def _q5_0(block: np.ndarray) -> Unpacked:
    scale = _half(block, 0)
    return _nibbles(block[:, 6:]) | _fifth_bits(block[:, 2:6]), scale, -16 * scale


def _q5_1(block: np.ndarray) -> Unpacked:
    return _nibbles(block[:, 8:]) | _fifth_bits(block[:, 4:8]), _half(block, 0), _half(block, 2)


def _q8_0(block: np.ndarray) -> Unpacked:
    scale = _half(block, 0)
    return block[:, 2:] ^ 0x80, scale, -128 * scale  # flipping the sign bit adds 128 to a signed byte


def _k_scales(block: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scale and bias of the eight groups of each Q4_K or Q5_K super-block, (blocks * 8,) each.

    Twelve bytes hold eight 6-bit scales and minima: the first four of each in the low six bits of bytes
    0-3 and 4-7; the last four in the halves of bytes 8-11, their top bits above the first ones'.
    """
    first, second, third = block[:, 4:8], block[:, 8:12], block[:, 12:16]
    scales = np.concatenate([first & 0x3F, third & 0x0F | first >> 2 & 0x30], axis=1)
    minima = np.concatenate([second & 0x3F, third >> 4 | second >> 2 & 0x30], axis=1)
    scale = _half(block, 0)[:, None] * scales.astype(np.float32)
    bias = -(_half(block, 2)[:, None] * minima.astype(np.float32))
    return scale.reshape(-1), bias.reshape(-1)


def _k_nibbles(packed: np.ndarray) -> np.ndarray:
    """(blocks, 128) bytes -> (blocks, 8, 32): each 32 bytes hold one group low and the next one high."""
    return _nibbles(packed.reshape(-1, 4, 32)).reshape(-1, 8, 32)


def _q4_k(block: np.ndarray) -> Unpacked:
    return _k_nibbles(block[:, 16:]).reshape(-1, 32), *_k_scales(block)


def _q5_k(block: np.ndarray) -> Unpacked:
    high = np.unpackbits(block[:, 16:48, None], axis=2, bitorder="little")  # (blocks, 32, 8): bit j, group j
    values = _k_nibbles(block[:, 48:]) | high.transpose(0, 2, 1) << 4
    return values.reshape(-1, 32), *_k_scales(block)


def _mxfp4(block: np.ndarray) -> Unpacked:
    return _nibbles(block[:, 1:]), np.ascontiguousarray(block[:, 0]), None


REPACKABLE: dict[GGMLQuantizationType, tuple[int, Callable[[np.ndarray], Unpacked]]] = {
    GGMLQuantizationType.Q4_0: (4, _q4_0),
    GGMLQuantizationType.Q4_1: (4, _q4_1),
    GGMLQuantizationType.Q5_0: (5, _q5_0),
    GGMLQuantizationType.Q5_1: (5, _q5_1),
    GGMLQuantizationType.Q8_0: (8, _q8_0),
    GGMLQuantizationType.Q4_K: (4, _q4_k),
    GGMLQuantizationType.Q5_K: (5, _q5_k),
    GGMLQuantizationType.MXFP4: (4, _mxfp4),
}
