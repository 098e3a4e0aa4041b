"""Random GGUF blocks with sane scales, and the truth about them from the PyPI package `gguf`."""

from __future__ import annotations

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from mlxserve.kernels_metal.gguf_formats import FORMATS

# Byte offsets of the float16 numbers of a block; all other bytes may hold anything.
HALVES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
}


def random_blocks(kind: str, shape: tuple[int, ...], columns: int, seed: int = 0) -> np.ndarray:
    """uint8 [*shape, row bytes]: every code and scale occurs, weights are of order one."""
    layout = FORMATS[kind]
    generator = np.random.default_rng(seed)
    count = columns // layout.weights
    blocks = generator.integers(0, 256, (*shape, count, layout.size_bytes), dtype=np.uint8)
    for start in HALVES[kind]:
        halves = generator.uniform(-1, 1, (*shape, count, 1)) * _scale(kind)
        blocks[..., start : start + 2] = halves.astype(np.float16).view(np.uint8)
    return blocks.reshape(*shape, layout.row_bytes(columns))


def _scale(kind: str) -> float:
    """A factor that brings the format's largest code times scale near one."""
    return {"Q8_0": 1 / 128, "Q2_K": 1 / 32, "Q3_K": 1 / 128, "Q4_K": 1 / 512, "Q5_K": 1 / 1024}.get(
        kind, {"Q6_K": 1 / 2048, "IQ4_NL": 1 / 128, "IQ4_XS": 1 / 2048}.get(kind, 1 / 16)
    )


def truth(blocks: np.ndarray, kind: str) -> np.ndarray:
    """float32 [..., K], as the package `gguf` dequantises."""
    flat = blocks.reshape(-1, blocks.shape[-1])
    weights = dequantize(flat, GGMLQuantizationType[kind])
    return weights.reshape(*blocks.shape[:-1], -1)
