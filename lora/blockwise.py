"""AdamW whose moments take 8 bits each: blocks of 256 values share a maximum, a code book holds the rest.

Knows: mlx.optimizers, the dynamic code of "8-bit Optimizers via Block-wise Quantization" (arXiv:2110.02861).
Does not know models, groups or files.

Two things differ from the paper, both so that long runs stay near float32:

- What is stored of the second moment is its square root. Straight, its code would end 7 decades below the
  block's largest value, which is only 3.5 decades of gradients: below that a moment becomes 0, and the step,
  divided by its root, explodes. A root that is not 0 is never stored as 0.
- Values are rounded up or down by chance in proportion to how near they are. Rounded to the nearest, a
  moment that moves by a thousandth a step would never leave its code. The chance is drawn from a key in the
  state, so that a resumed run draws the same.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np

BLOCK = 256
SMALLEST = 4096  # parameters of fewer values keep float32 moments: nothing is to be saved there


@cache
def dynamic_code(signed: bool) -> np.ndarray:
    """(256,) float32, rising from 0 (or about -1) to 1: how a byte stands for a number.

    The number of leading zero bits is a decimal exponent, the bits behind the first one a fraction in
    (0.1, 1) that is spaced evenly: fine steps near the block's maximum, 7 decades below it.
    """
    fraction_bits = 6 if signed else 7
    positive: list[float] = []
    for decade in range(7):
        edges = np.linspace(0.1, 1.0, 2 ** (fraction_bits - decade) + 1)
        positive += ((edges[:-1] + edges[1:]) / 2 * 10.0**-decade).tolist()
    negative = [-value for value in positive] if signed else []
    return np.array(sorted([*negative, 0.0, *positive, 1.0]), np.float32)


def pack(values: mx.array, key: mx.array, *, signed: bool) -> tuple[mx.array, mx.array]:
    """values of any shape -> (codes (blocks, 256) uint8, maxima (blocks,) float32); the last block is padded.

    Each value becomes one of its two neighbours in the code, so that the mean over keys is the value. A
    maximum keeps its sign: the value that is farthest from 0 is always exactly 1 of it.
    """
    flat = values.reshape(-1)
    blocks = mx.pad(flat, (0, -flat.size % BLOCK)).reshape(-1, BLOCK)
    farthest = mx.argmax(mx.abs(blocks), axis=1, keepdims=True)  # (blocks, 1)
    maxima = mx.take_along_axis(blocks, farthest, axis=1)[:, 0]
    shares = blocks / mx.where(maxima != 0, maxima, 1.0)[:, None]  # (blocks, 256) in [-1, 1]
    book = mx.array(dynamic_code(signed))
    low = mx.clip(mx.searchsorted(book, shares, side="right").astype(mx.int32) - 1, 0, 254)
    below, above = book[low], book[low + 1]
    codes = low + (mx.random.uniform(shape=shares.shape, key=key) < (shares - below) / (above - below))
    if not signed:
        codes = mx.maximum(codes, (shares > 0).astype(codes.dtype))
    return codes.astype(mx.uint8), maxima


def unpack(codes: mx.array, maxima: mx.array, shape: tuple[int, ...], *, signed: bool) -> mx.array:
    """float32 values of `shape` from what `pack` gave."""
    size = int(np.prod(shape))
    values = mx.array(dynamic_code(signed))[codes.astype(mx.uint32)] * maxima[:, None]
    return values.reshape(-1)[:size].reshape(shape)


class AdamW8bit(optim.AdamW):
    """AdamW with bias correction; 2.03 bytes of state a parameter instead of 8."""

    def __init__(self, learning_rate: float, weight_decay: float = 0.0) -> None:
        super().__init__(learning_rate, weight_decay=weight_decay, bias_correction=True)
        self._seeds = 0

    def init_single(self, parameter: mx.array, state: dict[str, Any]) -> None:
        if parameter.size < SMALLEST:
            super().init_single(parameter, state)
            return
        self._seeds += 1
        blocks = -(-parameter.size // BLOCK)
        state["key"] = mx.random.key(self._seeds)
        for name, zero in (("m", 127), ("root_v", 0)):
            state[name] = mx.full((blocks, BLOCK), zero, mx.uint8)
            state[f"{name}_max"] = mx.zeros(blocks)

    def apply_single(self, gradient: mx.array, parameter: mx.array, state: dict[str, Any]) -> mx.array:
        """One parameter's step: the moments are unpacked, moved on in float32, and packed again."""
        if "key" not in state:
            return super().apply_single(gradient, parameter, state)
        root = unpack(state["root_v"], state["root_v_max"], parameter.shape, signed=False)
        moments = {"m": unpack(state["m"], state["m_max"], parameter.shape, signed=True), "v": root * root}
        updated = super().apply_single(gradient, parameter, moments)
        keys = mx.random.split(state["key"], 3)
        state["key"] = keys[0]
        state["m"], state["m_max"] = pack(moments["m"], keys[1], signed=True)
        state["root_v"], state["root_v_max"] = pack(mx.sqrt(moments["v"]), keys[2], signed=False)
        return updated
