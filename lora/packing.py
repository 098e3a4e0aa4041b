"""Packed rows: many sequences behind one another in one row, without seeing each other.

Knows: mlx-lm's cache protocol as models/hooks.py uses it ("every token is a row": tokens (T, 1), a position
for each). Linear layers see one matrix, attention runs sequence by sequence, always causal, and RoPE begins
anew at each. Does not know losses or batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxserve.errors import Unsupported
from mlxserve.models.check import choose_way
from mlxserve.models.hooks import install_attention
from mlxserve.models.layout import read_layout
from mlxserve.models.step import ROWS


class SegmentCache:
    """Stands where a layer's K/V cache would, for one forward pass over packed rows.

    segments: half-open ranges of rows. window: how many tokens a sliding layer sees, None for all.
    """

    rows = True

    def __init__(self, segments: Sequence[tuple[int, int]], positions: mx.array, window: int | None) -> None:
        self.segments = segments
        self.offset = positions  # (T,)
        self.window = window
        self._held: tuple[mx.array, mx.array] | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """keys, values (T, KV, 1, D): kept for `attend`."""
        self._held = (keys, values)
        return keys, values

    def make_mask(self, *_: Any, **__: Any) -> None:
        """Masks are `attend`'s."""
        return

    def attend(self, queries: mx.array, scale: float, sinks: mx.array | None = None) -> mx.array:
        """queries (T, H, 1, D) -> (T, H, 1, D), each sequence for itself."""
        assert self._held is not None
        keys, values = self._held
        parts = [self._one(queries[a:b], keys[a:b], values[a:b], scale, sinks) for a, b in self.segments]
        return mx.concatenate(parts)

    def _one(
        self, queries: mx.array, keys: mx.array, values: mx.array, scale: float, sinks: mx.array | None
    ) -> mx.array:
        q, k, v = (part.transpose(2, 1, 0, 3) for part in (queries, keys, values))  # (1, heads, L, D)
        mask: Any = "causal"
        if self.window is not None and q.shape[2] > self.window:
            place = mx.arange(q.shape[2])
            behind = place[:, None] - place[None]
            mask = (behind >= 0) & (behind < self.window)
        out = mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask, sinks=sinks)
        return out.transpose(2, 1, 0, 3)


def require_packing(config: dict[str, Any]) -> None:
    """Raise Unsupported unless the architecture can run with every token as a row of its own."""
    way, _ = choose_way(config)
    if way != ROWS:
        raise Unsupported(
            f"train.packing does not work with {config.get('model_type')}, whose attention or state needs "
            "whole sequences; set train.packing=false (rows of like length are batched then).",
            param="train.packing",
        )
    install_attention()


def segment_caches(model: nn.Module, segments: Sequence[tuple[int, int]]) -> list[SegmentCache]:
    """One cache a layer for a packed row."""
    positions = mx.concatenate([mx.arange(end - start) for start, end in segments])
    return [SegmentCache(segments, positions, leaf.window) for leaf in read_layout(model).leaves]
