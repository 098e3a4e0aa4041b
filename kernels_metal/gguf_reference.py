"""GGUF blocks in plain MLX operations: unpack to float32, multiply, forget.

Knows: what the bytes of each block format mean. Does not know: kernels, devices, files.
Runs wherever there is no Metal. The unpacked copy never outlives a call, and no more than SLAB_WEIGHTS
weights are unpacked at a time.

In the layouts below `l` counts bytes, d and m are float16; a weight is scale * code + offset.
Source: ggml's block definitions, as restated by the PyPI package `gguf` (gguf.quants), to which
`dequantize` is equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import mlx.core as mx
import numpy as np

from mlxserve.kernels_metal.gguf_formats import find_format

# 32 MiB of float32: large enough for BLAS to be quick, small beside any model.
SLAB_WEIGHTS = 8 * 1024 * 1024
# Up to so many vectors, MLX's product with packed weights beats unpacking them (measured on a CPU).
FEW_VECTORS = 2
# IQ4's sixteen levels (non-linear, denser near zero).
IQ4_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def dequantize(blocks: mx.array, kind: str) -> mx.array:
    """blocks uint8 [..., row bytes] of format `kind` -> float32 [..., K]."""
    layout = find_format(kind)
    weights = layout.row_weights(blocks.shape[-1])
    split = blocks.reshape(*blocks.shape[:-1], -1, layout.size_bytes)  # [..., blocks, bytes]
    return _UNPACK[kind](split).reshape(*blocks.shape[:-1], weights)


def matmul(x: mx.array, blocks: mx.array, kind: str) -> mx.array:
    """x [..., K] times the transpose of blocks uint8 [N, row bytes] -> [..., N] in x's dtype.

    The product is float32 throughout.
    """
    wide = x.astype(mx.float32)
    if kind in _REPACK and x.size <= FEW_VECTORS * x.shape[-1]:
        return _packed_matmul(wide, blocks, kind).astype(x.dtype)
    rows = max(1, SLAB_WEIGHTS // x.shape[-1])
    slabs = [blocks[i : i + rows] for i in range(0, blocks.shape[0], rows)]
    parts = [wide @ dequantize(slab, kind).T for slab in slabs]
    return (mx.concatenate(parts, axis=-1) if len(parts) > 1 else parts[0]).astype(x.dtype)


def transposed_matmul(y: mx.array, blocks: mx.array, kind: str) -> mx.array:
    """y [..., N] times blocks uint8 [N, row bytes] -> [..., K] in y's dtype: the gradient of `matmul`."""
    rows = max(1, SLAB_WEIGHTS // find_format(kind).row_weights(blocks.shape[-1]))
    wide = y.astype(mx.float32)
    total = mx.array(0.0)
    for i in range(0, blocks.shape[0], rows):
        total = total + wide[..., i : i + rows] @ dequantize(blocks[i : i + rows], kind)
    return total.astype(y.dtype)


def gather_matmul(
    x: mx.array, blocks: mx.array, indices: mx.array, kind: str, sorted_indices: bool = False
) -> mx.array:
    """Row p // (P / X) of x [X, K] times the transpose of expert indices[p] of uint8 [E, N, row bytes].

    Returns [P, N] in x's dtype. Only experts that some row asks for are unpacked, one after another, so
    `indices` [P] is awaited. `sorted_indices` helps the kernel only.
    """
    share = indices.size // x.shape[0]
    result = mx.zeros((indices.size, blocks.shape[1]), x.dtype)
    for expert, pairs in _pairs_of_experts(indices):
        result[pairs] = matmul(x[pairs // share], blocks[expert], kind)
    return result


def gather_transposed_matmul(y: mx.array, blocks: mx.array, indices: mx.array, kind: str) -> mx.array:
    """Row p of y [P, N] times expert indices[p] of uint8 [E, N, row bytes] -> [P, K] in y's dtype."""
    result = mx.zeros((indices.size, find_format(kind).row_weights(blocks.shape[-1])), y.dtype)
    for expert, pairs in _pairs_of_experts(indices):
        result[pairs] = transposed_matmul(y[pairs], blocks[expert], kind)
    return result


def _pairs_of_experts(indices: mx.array) -> Iterator[tuple[int, mx.array]]:
    """(expert, its places in `indices` [P]) for each expert that is there."""
    chosen = np.array(indices)
    for expert in np.unique(chosen):
        yield int(expert), mx.array(np.flatnonzero(chosen == expert))


def _packed_matmul(x: mx.array, blocks: mx.array, kind: str) -> mx.array:
    """matmul for types whose codes MLX takes as they lie: x float32 [..., K], blocks [N, row bytes]."""
    split = blocks.reshape(blocks.shape[0], -1, find_format(kind).size_bytes)
    codes, biases = _REPACK[kind](split)  # [N, blocks, bytes], [N, blocks, 1]
    bits = codes.shape[-1] // 4
    if bits == 4:  # a byte holds weights l and l + 16 of its block: bring x into that order
        x = x.reshape(*x.shape[:-1], -1, 2, 16).swapaxes(-1, -2).reshape(x.shape)
    words = mx.contiguous(codes).view(mx.uint32).flatten(-2)
    scales = _half(split, 0)[..., 0]
    return mx.quantized_matmul(x, words, scales, biases[..., 0], transpose=True, group_size=32, bits=bits)


def _half(split: mx.array, start: int) -> mx.array:
    """The float16 at byte `start` of each block, as float32 [..., blocks, 1]."""
    return split[..., start : start + 2].view(mx.float16).astype(mx.float32)


def _nibbles(packed: mx.array) -> mx.array:
    """[..., n] bytes -> [..., 2 n]: all low nibbles, then all high ones."""
    return mx.concatenate([packed & 15, packed >> 4], axis=-1)


def _bit_planes(packed: mx.array, width: int) -> mx.array:
    """[..., n] bytes -> [..., 8 / width, n]: plane p holds bits p * width and up."""
    shifts = mx.arange(0, 8, width, dtype=mx.uint8)[:, None]
    return (packed[..., None, :] >> shifts) & ((1 << width) - 1)


def _high_bits(packed: mx.array) -> mx.array:
    """Four bytes of bits -> [..., 32] of 0 or 16, bit l of the little-endian word for weight l."""
    bits = (packed[..., :, None] >> mx.arange(8, dtype=mx.uint8)) & 1  # [..., 4, 8]
    return bits.flatten(-2) << 4


def _q4_0(split: mx.array) -> mx.array:
    """d, 16 bytes: low nibble of byte l is weight l, high nibble weight l + 16; code - 8."""
    return _half(split, 0) * (_nibbles(split[..., 2:]).astype(mx.float32) - 8)


def _q4_1(split: mx.array) -> mx.array:
    """d, m, 16 bytes of nibbles as in Q4_0."""
    return _half(split, 0) * _nibbles(split[..., 4:]).astype(mx.float32) + _half(split, 2)


def _q5_0(split: mx.array) -> mx.array:
    """d, 4 bytes with the fifth bits, 16 bytes of nibbles; code - 16."""
    codes = _nibbles(split[..., 6:]) | _high_bits(split[..., 2:6])
    return _half(split, 0) * (codes.astype(mx.float32) - 16)


def _q5_1(split: mx.array) -> mx.array:
    """d, m, 4 bytes with the fifth bits, 16 bytes of nibbles."""
    codes = _nibbles(split[..., 8:]) | _high_bits(split[..., 4:8])
    return _half(split, 0) * codes.astype(mx.float32) + _half(split, 2)


def _q8_0(split: mx.array) -> mx.array:
    """d, 32 signed bytes."""
    return _half(split, 0) * split[..., 2:].view(mx.int8).astype(mx.float32)


def _iq4_nl(split: mx.array) -> mx.array:
    """d, 16 bytes of nibbles that index the levels."""
    return _half(split, 0) * _levels(_nibbles(split[..., 2:]))


def _levels(codes: mx.array) -> mx.array:
    return mx.array(IQ4_LEVELS, mx.float32)[codes]


def _q2_k(split: mx.array) -> mx.array:
    """16 bytes (4-bit scale, 4-bit offset) for 16 weights each, 64 bytes of 2-bit codes, d, dmin.

    Bytes 0-31 hold weights 0-127, bit plane p of byte l weight 32 p + l; bytes 32-63 the second half.
    """
    packed = split[..., 16:80].reshape(*split.shape[:-1], 2, 32)
    codes = _bit_planes(packed, 2).reshape(*split.shape[:-1], 16, 16)
    scale = _half(split, 80) * (split[..., :16] & 15).astype(mx.float32)
    offset = _half(split, 82) * (split[..., :16] >> 4).astype(mx.float32)
    return scale[..., None] * codes.astype(mx.float32) - offset[..., None]


def _q3_k(split: mx.array) -> mx.array:
    """32 bytes of third bits, 64 bytes of 2-bit codes as in Q2_K, 12 bytes of scales, d.

    Bit 4 h + p of byte l is the third bit of weight 128 h + 32 p + l; code - 4. The 16 scales have four
    low bits in bytes 0-7 (low nibbles, then high) and two high bits in bytes 8-11; scale - 32.
    """
    packed = split[..., 32:96].reshape(*split.shape[:-1], 2, 32)
    low = _bit_planes(packed, 2).reshape(*split.shape[:-1], 16, 16)
    high = _bit_planes(split[..., :32], 1).reshape(*split.shape[:-1], 16, 16) << 2
    bits = _nibbles(split[..., 96:104]) | (_bit_planes(split[..., 104:108], 2).flatten(-2) << 4)
    scale = _half(split, 108) * (bits.astype(mx.float32) - 32)
    return scale[..., None] * ((low | high).astype(mx.float32) - 4)


def _six_bit_pairs(packed: mx.array) -> tuple[mx.array, mx.array]:
    """The 12 bytes of Q4_K and Q5_K -> 8 scales and 8 offsets of six bits, float32 [..., 8].

    The first four of each lie in the low six bits of bytes 0-3 and 4-7; the others have their low four
    bits in the nibbles of bytes 8-11 and their high two in the top of bytes 0-3 and 4-7.
    """
    first, second, third = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = mx.concatenate([first & 63, (third & 15) | ((first >> 6) << 4)], axis=-1)
    offsets = mx.concatenate([second & 63, (third >> 4) | ((second >> 6) << 4)], axis=-1)
    return scales.astype(mx.float32), offsets.astype(mx.float32)


def _scaled_pairs(split: mx.array, codes: mx.array) -> mx.array:
    """Q4_K and Q5_K: codes [..., 8, 32] under d, dmin and six-bit scales and offsets."""
    scales, offsets = _six_bit_pairs(split[..., 4:16])
    scale, offset = _half(split, 0) * scales, _half(split, 2) * offsets
    return scale[..., None] * codes.astype(mx.float32) - offset[..., None]


def _q4_k(split: mx.array) -> mx.array:
    """d, dmin, 12 bytes of scales, 128 bytes: byte 32 g + l holds weights 64 g + l (low) and 32 on."""
    packed = split[..., 16:].reshape(*split.shape[:-1], 4, 32)
    return _scaled_pairs(split, _bit_planes(packed, 4).flatten(-3, -2))


def _q5_k(split: mx.array) -> mx.array:
    """As Q4_K with 32 bytes before the nibbles: bit j of byte l is the fifth bit of weight 32 j + l."""
    packed = split[..., 48:].reshape(*split.shape[:-1], 4, 32)
    low = _bit_planes(packed, 4).flatten(-3, -2)
    return _scaled_pairs(split, low | (_bit_planes(split[..., 16:48], 1) << 4))


def _q6_k(split: mx.array) -> mx.array:
    """128 bytes of low nibbles, 64 of high bit pairs, 16 signed scales for 16 weights each, d.

    Within a half h of 128 weights, weight 32 p + l has its low bits in byte 64 h + 32 (p % 2) + l, the
    high nibble for p of 2 and 3, and its high bits in pair p of byte 32 h + l; code - 32.
    """
    low = _bit_planes(split[..., :128].reshape(*split.shape[:-1], 2, 64), 4)  # [..., 2, 2, 64]
    high = _bit_planes(split[..., 128:192].reshape(*split.shape[:-1], 2, 32), 2)  # [..., 2, 4, 32]
    codes = low.reshape(*split.shape[:-1], 16, 16) | (high.reshape(*split.shape[:-1], 16, 16) << 4)
    scale = _half(split, 208) * split[..., 192:208].view(mx.int8).astype(mx.float32)
    return scale[..., None] * (codes.astype(mx.float32) - 32)


def _iq4_xs(split: mx.array) -> mx.array:
    """d, 16 bits of high scale pairs, 4 bytes of low scale nibbles, 128 bytes of nibbles.

    Weights 32 j + l and 32 j + 16 + l share byte 16 j + l; sub-block j's scale has its low bits in nibble
    j and its high bits in pair j; scale - 32.
    """
    high = split[..., 2:4, None] >> mx.arange(0, 8, 2, dtype=mx.uint8)  # [..., 2, 4]
    low = split[..., 4:8, None] >> mx.array([0, 4], mx.uint8)  # [..., 4, 2]
    bits = (low.flatten(-2) & 15) | ((high.flatten(-2) & 3) << 4)
    scale = _half(split, 0) * (bits.astype(mx.float32) - 32)
    codes = _nibbles(split[..., 8:].reshape(*split.shape[:-1], 8, 16))
    return scale[..., None] * _levels(codes)


# type -> the block's codes as MLX takes them, and their biases; the scale is d
_REPACK: dict[str, Callable[[mx.array], tuple[mx.array, mx.array]]] = {
    "Q4_0": lambda split: (split[..., 2:], -8 * _half(split, 0)),
    "Q4_1": lambda split: (split[..., 4:], _half(split, 2)),
    "Q8_0": lambda split: (split[..., 2:] ^ 128, -128 * _half(split, 0)),
}
_UNPACK: dict[str, Callable[[mx.array], mx.array]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
}
