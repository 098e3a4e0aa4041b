"""Products with GGUF blocks as they lie in the file: checks, launches of the Metal kernels.

Knows: shapes, which body serves which call. Does not know: what the bytes mean (formats/*.metal), when
Metal is there (dispatch), or where the blocks came from.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlxserve.kernels_metal.gguf_formats import FORMATS

FOLDER = Path(__file__).parent
# The file of each format and its type there.
BLOCK_TYPES = {
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


def header(kind: str) -> str:
    file, block_type = BLOCK_TYPES[kind]
    texts = [(FOLDER / name).read_text() for name in ("matvec.metal", "formats/blocks.metal", f"formats/{file}.metal")]
    return "\n".join([*texts, f"typedef {block_type} Block;\n"])


@cache
def _qmv(kind: str) -> Any:
    return mx.fast.metal_kernel(
        name=f"gguf_qmv_{kind.lower()}_v1",
        input_names=["w", "x"],
        output_names=["y"],
        header=header(kind),
        source=(FOLDER / "gguf_qmv.metal").read_text(),
    )


def qmv(x: mx.array, blocks: mx.array, kind: str) -> mx.array:
    vectors, rows = x.shape[0], blocks.shape[0]
    m = min(8, 1 << (vectors - 1).bit_length())
    return _qmv(kind)(
        inputs=[blocks.view(mx.uint16), x],
        template=[("T", x.dtype), ("M", m)],
        grid=(32, -(-rows // 8) * 2, -(-vectors // m)),
        threadgroup=(32, 2, 1),
        output_shapes=[(vectors, rows)],
        output_dtypes=[x.dtype],
    )[0]
