"""The K/V arrays: one pool of pages a layer, written in place, read by attention.

    keys    (pages, page_size, kv_heads, key_dim)     floating, or packed 8/4 bits with scales and biases
    values  (pages, page_size, kv_heads, value_dim)

Knows: MLX arrays, and where this step's rows go. Does not know sequences, tokens or who owns a page.

`LayerPages` stands where mlx-lm's `KVCache` would. A definition calls, in this order, `make_mask`,
`offset` and `update_and_fetch`; what they answer depends on the way the step runs:

- *rows*: tokens are shaped (T, 1), every token its own row. Attention is the paged one, which the
  definition reaches through its module's `scaled_dot_product_attention` (see models/hooks.py).
- *sequences*: tokens are shaped (B, L). `update_and_fetch` returns gathered keys and values, so that a
  definition may do whatever attention it has; `make_mask` says which of them each query may see.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from mlxserve.kernels_metal.dispatch import paged_attention
from mlxserve.kernels_metal.plan import AttentionPlan, QuantisedPages

HOLE = -1


@dataclass(slots=True)
class GroupStep:
    """One step's rows for the layers of one page group.

    positions: (T,) of each row in its sequence. pages, places: (T,) where each row is written: page id
    and place inside it. plan: what attention reads. batch, length: the shape the tokens have when the
    step runs as sequences; (T, 1) as rows.
    """

    positions: mx.array
    pages: mx.array
    places: mx.array
    plan: AttentionPlan
    batch: int
    length: int
    offset: mx.array | int = 0
    _masks: dict[tuple[int, int | None], mx.array] = field(default_factory=dict)
    _gather: mx.array | None = None

    @property
    def key_length(self) -> int:
        """Keys gathered for each sequence: up to the longest one's end, from its table's first page."""
        plan = self.plan
        ends = [start + count for start, count in zip(plan.starts, plan.counts)]
        return max(end - first * plan.page_size for end, first in zip(ends, plan.first_pages))

    def table(self) -> mx.array:
        """(B, MB) page ids; unused entries are page 0, masked out."""
        if self._gather is None:
            self._gather = mx.array(np.maximum(self.plan.tables, 0))
        return self._gather

    def mask(self, length: int, window: int | None, grouped: bool) -> mx.array:
        """Booleans: which gathered key each query of a sequence sees.

        (L, keys) for one sequence, (B, 1, L, keys) for several; `grouped` puts one more axis in for
        definitions that keep the heads of a K/V group apart: (B, 1, 1, L, keys).
        """
        known = self._masks.get((length, window))
        if known is None:
            plan = self.plan
            first = np.array(plan.first_pages)[:, None] * plan.page_size
            keys = first + np.arange(self.key_length)  # (B, keys) positions
            queries = np.array(plan.starts)[:, None] + np.arange(length)  # (B, L)
            seen = keys[:, None, :] <= queries[:, :, None]
            if window is not None:
                seen &= keys[:, None, :] > queries[:, :, None] - window
            axes = () if self.batch == 1 else (1, 2) if grouped else (1,)
            seen = seen[0] if self.batch == 1 else np.expand_dims(seen, axes)
            known = self._masks[length, window] = mx.array(seen)
        return known


class LayerPages:
    """One layer's pages of K and V, and mlx-lm's cache protocol on top of them.

    Allocated at the first write, when the definition shows head counts and widths, with room for `pages`
    ids; `grow` makes more. `kv_bits` 16 keeps
    the dtype the definition computes in; 8 or 4 packs in groups of `group_size` (mx.quantize).
    """

    def __init__(
        self, pages: int, page_size: int, window: int | None, *, kv_bits: int = 16, group_size: int = 32
    ) -> None:
        self.page_count = pages
        self.page_size = page_size
        self.window = window
        self.kv_bits = kv_bits
        self.group_size = group_size
        self.keys: mx.array | QuantisedPages | None = None
        self.values: mx.array | QuantisedPages | None = None
        self.step: GroupStep | None = None
        self.rows = True
        self.grouped_mask = False

    # -- mlx-lm's cache protocol -------------------------------------------------------------------

    @property
    def offset(self) -> mx.array | int:
        """Positions of this step's first token of each batch row: (T,) as rows, (B,) or a number else."""
        return self._now().offset

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write (B, H, L, D) keys and values to their places; return what attention shall read."""
        step = self._now()
        self.keys = self._write(self.keys, keys, step)
        self.values = self._write(self.values, values, step)
        if self.rows:
            return keys, values  # paged attention reads the pages, not these
        return self._gathered(self.keys, step, keys.dtype), self._gathered(self.values, step, values.dtype)

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:  # noqa: N803
        """What mlx-lm's definitions hand to their attention; None where nothing is hidden."""
        if self.rows:
            return None
        step = self._now()
        window = window_size or self.window
        plain = step.batch == 1 and (window is None or step.key_length <= window) and not return_array
        if plain:
            return "causal" if N > 1 else None
        return step.mask(N, window, self.grouped_mask)

    def attend(self, queries: mx.array, scale: float, sinks: mx.array | None) -> mx.array:
        """Paged attention for rows: queries (T, HQ, 1, D) → (T, HQ, 1, value_dim)."""
        assert self.keys is not None and self.values is not None
        out = paged_attention(
            queries[:, :, 0], self.keys, self.values, self._now().plan, scale=scale, sinks=sinks
        )
        return out[:, :, None]

    def empty(self) -> bool:
        return self.keys is None

    def is_trimmable(self) -> bool:
        return True

    # -- pages ---------------------------------------------------------------------------------------

    @property
    def kept_whole(self) -> bool:
        """True where packing was asked for and keys or values have a width that the group does not divide."""
        pools = (self.keys, self.values)
        return self.kv_bits != 16 and any(isinstance(pool, mx.array) for pool in pools)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays())

    def arrays(self) -> list[mx.array]:
        """Every array this layer holds, keys first."""
        return [array for pool in (self.keys, self.values) if pool is not None for array in _parts(pool)]

    def grow(self, pages: int) -> None:
        """Make room for page ids below `pages`; what is written stays."""
        extra = pages - self.page_count
        self.page_count = pages
        self.keys = _grown(self.keys, extra)
        self.values = _grown(self.values, extra)
        mx.eval(self.arrays())  # layer by layer, so that only one is held twice

    def cut(self, pages: int) -> None:
        """Give back the memory of page ids from `pages` on."""
        self.page_count = pages
        self.keys = _cut(self.keys, pages)
        self.values = _cut(self.values, pages)
        mx.eval(self.arrays())

    def clear(self) -> None:
        """Drop the arrays; the next write allocates them anew."""
        self.keys = self.values = None

    def put(self, pages: mx.array, arrays: list[mx.array]) -> None:
        """Write whole pages: (n,) ids, and for each of this layer's arrays, keys first, (n, page_size, …).

        A layer that another stage of a pipeline holds has no arrays: then nothing is written.
        """
        if not arrays:
            return
        half = len(arrays) // 2
        self.keys = self._with_room(self.keys, arrays[:half])
        self.values = self._with_room(self.values, arrays[half:])
        for pool, new in zip(self.arrays(), arrays):
            pool[pages] = new

    def _with_room(
        self, pool: mx.array | QuantisedPages | None, like: list[mx.array]
    ) -> mx.array | QuantisedPages:
        """The pool, allocated in the form of `like` if nothing was written yet."""
        if pool is not None:
            return pool
        parts = [mx.zeros((self.page_count, *part.shape[1:]), part.dtype) for part in like]
        if len(parts) == 1:
            return parts[0]
        weight, scales, biases = parts
        return QuantisedPages(weight, scales, biases, self.kv_bits, self.group_size)

    def copy_pages(self, sources: mx.array, targets: mx.array, places: mx.array) -> None:
        """Copy the first `places` (n,) of pages, (n,) ids onto (n,) other ids; zeros behind them."""
        kept = mx.arange(self.page_size) < places[:, None]  # (n, page_size)
        for pool in self.arrays():
            pool[targets] = mx.where(kept[..., None, None], mx.take(pool, sources, axis=0), 0)

    def clear_pages(self, pages: mx.array) -> None:
        """Zero whole pages, (n,) ids."""
        for pool in self.arrays():
            pool[pages] = 0

    def _now(self) -> GroupStep:
        assert self.step is not None, "a step must be set before the model runs"
        return self.step

    # `pool[...] = rows` changes the array object itself; nothing else may hold a reference to its data
    # when the scatter runs, or MLX copies the whole pool instead of writing in place.
    def _write(
        self, pool: mx.array | QuantisedPages | None, new: mx.array, step: GroupStep
    ) -> mx.array | QuantisedPages:
        heads, width = new.shape[1], new.shape[3]
        rows = new.transpose(0, 2, 1, 3).reshape(-1, heads, width)  # (T, H, D), batch-major
        if pool is None:
            pool = self._allocate(rows)
        if isinstance(pool, QuantisedPages):
            packed = mx.quantize(rows, group_size=pool.group_size, bits=pool.bits)
            for target, part in zip(_parts(pool), packed):
                target[step.pages, step.places] = part
            return pool
        pool[step.pages, step.places] = rows
        return pool

    def _allocate(self, rows: mx.array) -> mx.array | QuantisedPages:
        shape = (self.page_count, self.page_size, rows.shape[1])
        if self.kv_bits == 16 or rows.shape[2] % self.group_size:
            return mx.zeros((*shape, rows.shape[2]), rows.dtype)
        parts = mx.quantize(rows[:1], group_size=self.group_size, bits=self.kv_bits)
        pools = [mx.zeros((*shape, part.shape[-1]), part.dtype) for part in parts]
        weight, scales, biases = pools
        return QuantisedPages(weight, scales, biases, self.kv_bits, self.group_size)

    def _gathered(self, pool: mx.array | QuantisedPages, step: GroupStep, dtype: mx.Dtype) -> mx.array:
        """(B, H, keys, D): each sequence's pages in order, cut after the longest one's last key."""
        parts = [
            mx.take(part, step.table(), axis=0).flatten(1, 2) for part in _parts(pool)
        ]  # (B, MB*ps, H, D)
        if isinstance(pool, QuantisedPages):
            weight, scales, biases = parts
            whole = mx.dequantize(weight, scales, biases, pool.group_size, pool.bits).astype(dtype)
        else:
            (whole,) = parts
        return whole[:, : step.key_length].transpose(0, 2, 1, 3)


def _parts(pool: mx.array | QuantisedPages) -> list[mx.array]:
    return [pool.weight, pool.scales, pool.biases] if isinstance(pool, QuantisedPages) else [pool]


def _cut(pool: mx.array | QuantisedPages | None, pages: int) -> mx.array | QuantisedPages | None:
    if pool is None:
        return None
    kept = mx.arange(pages)  # taken, since a slice would hold on to the whole
    parts = [mx.take(part, kept, axis=0) for part in _parts(pool)]
    if isinstance(pool, QuantisedPages):
        weight, scales, biases = parts
        return QuantisedPages(weight, scales, biases, pool.bits, pool.group_size)
    return parts[0]


def _grown(pool: mx.array | QuantisedPages | None, extra: int) -> mx.array | QuantisedPages | None:
    if pool is None:
        return None
    parts = [mx.concatenate([part, mx.zeros((extra, *part.shape[1:]), part.dtype)]) for part in _parts(pool)]
    if isinstance(pool, QuantisedPages):
        weight, scales, biases = parts
        return QuantisedPages(weight, scales, biases, pool.bits, pool.group_size)
    return parts[0]
