"""Products with GGUF blocks as they lie in the file: checks, and launches of the Metal kernels.

Knows: shapes, and which body serves which call. Does not know: what the bytes mean (formats/*.metal),
whether Metal is there (dispatch), or where the blocks came from.

Blocks are uint8, [N, row bytes] or, for experts, [E, N, row bytes]; x has float32, float16 or bfloat16 and
the result has x's dtype; sums are float32. Kernels read blocks as 16-bit words, which is what all formats
are aligned to. Weights are read once for each 8 (`qmv`) or 32 (`qmm`) vectors.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.core as mx

from mlxserve.kernels_metal.gguf_formats import find_format
from mlxserve.kernels_metal.source import read

DTYPES = (mx.float32, mx.float16, mx.bfloat16)
# Up to so many vectors, one threadgroup takes all of them; beyond, the matrix kernel takes 32 at a time.
MATVEC_VECTORS = 8
# From so many (row, expert) pairs on, rows sorted by expert share their weights in the matrix kernel.
GATHER_TILE_PAIRS = 64
TILE_VECTORS, TILE_ROWS, TILE_THREADS = 32, 64, 128
# Where each format's unit is defined: the file in formats/ and the type.
UNITS = {
    "Q4_0": ("nibbles", "Nibbles<false, false>"),
    "Q4_1": ("nibbles", "Nibbles<false, true>"),
    "Q5_0": ("nibbles", "Nibbles<true, false>"),
    "Q5_1": ("nibbles", "Nibbles<true, true>"),
    "Q8_0": ("q8_0", "Bytes"),
    "Q2_K": ("q2_k", "BitPairs"),
    "Q3_K": ("q3_k", "BitTriples"),
    "Q4_K": ("q4_k", "ScaledNibbles<false>"),
    "Q5_K": ("q4_k", "ScaledNibbles<true>"),
    "Q6_K": ("q6_k", "SixBits"),
    "IQ4_NL": ("iq4", "Levels<false>"),
    "IQ4_XS": ("iq4", "Levels<true>"),
}


def matmul(x: mx.array, blocks: mx.array, kind: str) -> mx.array:
    """x [..., K] times the transpose of blocks [N, row bytes] -> [..., N]."""
    flat = x.reshape(-1, x.shape[-1])
    product = qmv if flat.shape[0] <= MATVEC_VECTORS else qmm
    return product(flat, blocks, kind).reshape(*x.shape[:-1], blocks.shape[0])


def gather_matmul(
    x: mx.array, blocks: mx.array, indices: mx.array, kind: str, sorted_indices: bool = False
) -> mx.array:
    """Row p // (P / X) of x [X, K] times the transpose of expert indices[p] of blocks [E, N, row bytes].

    Returns [P, N]. `sorted_indices` says that `indices` [P] do not decrease, which saves a sort.
    """
    pairs = indices.shape[0]
    if pairs < GATHER_TILE_PAIRS:
        return gather_qmv(x, blocks, indices, kind)
    x = mx.repeat(x, pairs // x.shape[0], axis=0) if x.shape[0] != pairs else x
    if sorted_indices:
        return gather_qmm(x, blocks, indices, kind)
    order = mx.argsort(indices)
    return gather_qmm(x[order], blocks, indices[order], kind)[mx.argsort(order)]


def qmv(x: mx.array, blocks: mx.array, kind: str) -> mx.array:
    """matmul of x [V, K], meant for V of 1 to 8."""
    _check(x, blocks, kind, experts=False)
    vectors, rows = x.shape[0], blocks.shape[0]
    together = min(MATVEC_VECTORS, 1 << (vectors - 1).bit_length())
    return _launch(
        _kernel("qmv", kind),
        [blocks.view(mx.uint16), x],
        template=[("T", x.dtype), ("M", together)],
        grid=(32, -(-rows // 8) * 2, -(-vectors // together)),
        threadgroup=(32, 2, 1),
        shape=(vectors, rows),
    )


def qmm(x: mx.array, blocks: mx.array, kind: str) -> mx.array:
    """matmul of x [V, K] for prompts."""
    _check(x, blocks, kind, experts=False)
    vectors, rows = x.shape[0], blocks.shape[0]
    return _launch(
        _kernel("qmm", kind),
        [blocks.view(mx.uint16), x],
        template=[("T", x.dtype)],
        grid=(-(-rows // TILE_ROWS) * TILE_THREADS, -(-vectors // TILE_VECTORS), 1),
        threadgroup=(TILE_THREADS, 1, 1),
        shape=(vectors, rows),
    )


def gather_qmv(x: mx.array, blocks: mx.array, indices: mx.array, kind: str) -> mx.array:
    """gather_matmul for few pairs: each pair reads its expert's weights."""
    _check(x, blocks, kind, experts=True)
    pairs, rows = indices.shape[0], blocks.shape[1]
    if pairs % x.shape[0]:
        raise ValueError(f"{pairs} indices cannot be shared out among {x.shape[0]} rows of x")
    return _launch(
        _kernel("gather_qmv", kind),
        [blocks.view(mx.uint16), x, indices.astype(mx.int32)],
        template=[("T", x.dtype)],
        grid=(32, -(-rows // 8) * 2, pairs),
        threadgroup=(32, 2, 1),
        shape=(pairs, rows),
    )


def gather_qmm(x: mx.array, blocks: mx.array, indices: mx.array, kind: str) -> mx.array:
    """gather_matmul of x [P, K] with non-decreasing indices [P], in tiles of 32 rows of one expert."""
    _check(x, blocks, kind, experts=True)
    pairs, rows = indices.shape[0], blocks.shape[1]
    if x.shape[0] != pairs:
        raise ValueError(f"{pairs} indices do not go with {x.shape[0]} rows of x")
    tiles = expert_tiles(indices, blocks.shape[0])
    return _launch(
        _kernel("gather_qmm", kind),
        [blocks.view(mx.uint16), x, tiles],
        template=[("T", x.dtype)],
        grid=(-(-rows // TILE_ROWS) * TILE_THREADS, tiles.shape[0], 1),
        threadgroup=(TILE_THREADS, 1, 1),
        shape=(pairs, rows),
    )


def expert_tiles(indices: mx.array, experts: int) -> mx.array:
    """Tiles of at most 32 rows of one expert each, int32 [TILES, 3] = (expert, first row, rows).

    indices [P] do not decrease. TILES depends on P and the number of experts alone, so nothing is awaited;
    the tiles too many have no rows.
    """
    pairs = indices.shape[0]
    ids = mx.arange(experts)
    counts = (indices[None] == ids[:, None]).sum(axis=1)  # [E]
    starts = mx.cumsum(counts, inclusive=False)
    tiles_of = (counts + TILE_VECTORS - 1) // TILE_VECTORS
    ends = mx.cumsum(tiles_of)  # [E], tiles up to and with each expert
    tile = mx.arange(pairs // TILE_VECTORS + min(experts, pairs))
    expert = (ends[None] <= tile[:, None]).sum(axis=1)  # [TILES], `experts` for tiles too many
    held = mx.minimum(expert, experts - 1)
    inside = (tile - (ends - tiles_of)[held]) * TILE_VECTORS
    rows = mx.where(expert < experts, mx.minimum(counts[held] - inside, TILE_VECTORS), 0)
    return mx.stack([held, starts[held] + inside, rows], axis=1).astype(mx.int32)


def header(kind: str) -> str:
    """Helper text that defines the type `Block` of a format."""
    file, unit = UNITS[kind]
    return f"{read('matvec', 'matmat', 'formats/blocks', f'formats/{file}')}\ntypedef {unit} Block;\n"


@cache
def _kernel(body: str, kind: str) -> Any:
    """The kernel gguf_{body} of a format, made once."""
    inputs = {"gather_qmv": ["w", "x", "indices"], "gather_qmm": ["w", "x", "tiles"]}
    return mx.fast.metal_kernel(
        name=f"gguf_{body}_{kind.lower()}_v1",
        input_names=inputs.get(body, ["w", "x"]),
        output_names=["y"],
        header=header(kind),
        source=read(f"gguf_{body}"),
    )


def _launch(kernel: Any, inputs: list[mx.array], *, shape: tuple[int, int], **call: Any) -> mx.array:
    """One launch with one output of x's dtype; x is the second input."""
    outputs = kernel(inputs=inputs, output_shapes=[shape], output_dtypes=[inputs[1].dtype], **call)
    return outputs[0]


def _check(x: mx.array, blocks: mx.array, kind: str, *, experts: bool) -> None:
    """Raises ValueError for operands that do not go together."""
    rank = 3 if experts else 2
    if x.ndim != 2 or blocks.ndim != rank:
        raise ValueError(f"x must have 2 axes and blocks {rank}, not {x.ndim} and {blocks.ndim}")
    if x.dtype not in DTYPES or blocks.dtype != mx.uint8:
        raise ValueError(f"x must be floating and blocks uint8, not {x.dtype} and {blocks.dtype}")
    columns = find_format(kind).row_weights(blocks.shape[-1])
    if x.shape[1] != columns:
        raise ValueError(f"x is {x.shape[1]} wide and the blocks are {columns} wide")
    if not x.shape[0] or not blocks.shape[-2]:
        raise ValueError("x and blocks must have at least one row")
