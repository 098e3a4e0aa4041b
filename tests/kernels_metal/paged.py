"""Paged attention in float32 NumPy, one row and one head at a time, and random pools to try it on.

The truth that the reference and the kernels are held to: it shares nothing with them but the plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlxserve.kernels_metal import paged_attention as paged
from mlxserve.kernels_metal.plan import AttentionPlan, Pages, QuantisedPages
from tests.metal import harness

POISON = -123_456  # a page id that no kernel may look up


def attend(
    q: np.ndarray,
    k_pages: np.ndarray,
    v_pages: np.ndarray,
    plan: AttentionPlan,
    scale: float,
    sinks: np.ndarray | None = None,
    softcap: float | None = None,
) -> np.ndarray:
    """[Tq, HQ, DV] from q [Tq, HQ, D] and pages [NB, BS, HKV, D or DV]."""
    heads, group = q.shape[1], q.shape[1] // k_pages.shape[2]
    out = np.zeros((len(q), heads, v_pages.shape[-1]), np.float32)
    row = 0
    for s, count in enumerate(plan.counts):
        for position in range(plan.starts[s], plan.starts[s] + count):
            first = 0 if plan.window is None else max(0, position - plan.window + 1)
            seen = np.arange(first, position + 1)
            page = plan.tables[s, seen // plan.page_size - plan.first_pages[s]]
            slot = seen % plan.page_size
            for head in range(heads):
                keys = k_pages[page, slot, head // group]  # [L, D]
                values = v_pages[page, slot, head // group]  # [L, DV]
                sink = None if sinks is None else float(sinks[head])
                out[row, head] = _one_head(keys @ q[row, head] * np.float32(scale), values, sink, softcap)
            row += 1
    return out


def _one_head(
    scores: np.ndarray, values: np.ndarray, sink: float | None, softcap: float | None
) -> np.ndarray:
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    if sink is not None:
        scores = np.append(scores, np.float32(sink))
        values = np.vstack([values, np.zeros_like(values[:1])])
    weights = np.exp(scores - scores.max())
    return (weights / weights.sum()) @ values


@dataclass(frozen=True)
class Problem:
    """Queries, pages and a plan; every slot that no segment may see holds NaN."""

    q: np.ndarray
    k_pages: np.ndarray
    v_pages: np.ndarray
    plan: AttentionPlan

    def in_dtype(self, dtype: mx.Dtype) -> tuple[mx.array, mx.array, mx.array, Problem]:
        """MLX arrays of `dtype`, and the problem with the values they hold after rounding."""
        arrays = [mx.array(part).astype(dtype) for part in (self.q, self.k_pages, self.v_pages)]
        rounded = [np.array(array.astype(mx.float32)) for array in arrays]
        return arrays[0], arrays[1], arrays[2], Problem(rounded[0], rounded[1], rounded[2], self.plan)


def problem(
    starts: Sequence[int],
    counts: Sequence[int],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    size: int = 32,
    value_size: int | None = None,
    page_size: int = 16,
    window: int | None = None,
    shuffled: bool = True,
    seed: int = 0,
) -> Problem:
    """A pool where each segment has pages of its own, in random order unless `shuffled` is False.

    Table columns past a segment's last page hold POISON; with a window, pages that no row sees are left
    out of the table.
    """
    rng = np.random.default_rng(seed)
    pages_of = [_pages(start, count, page_size, window) for start, count in zip(starts, counts, strict=True)]
    total = sum(stop - first for first, stop in pages_of) + 3
    ids = rng.permutation(total) if shuffled else np.arange(total)
    tables = np.full((len(starts), max([1, *(stop - first for first, stop in pages_of)])), POISON, np.int32)
    k_pages = np.full((total, page_size, kv_heads, size), np.nan, np.float32)
    v_pages = np.full((total, page_size, kv_heads, value_size or size), np.nan, np.float32)
    used = 0
    for s, (first, stop) in enumerate(pages_of):
        tables[s, : stop - first] = ids[used : used + stop - first]
        used += stop - first
        seen = np.arange(_first_key(starts[s], window), starts[s] + counts[s] if counts[s] else 0)
        page, slot = tables[s, seen // page_size - first], seen % page_size
        k_pages[page, slot] = rng.standard_normal((len(seen), kv_heads, size))
        v_pages[page, slot] = rng.standard_normal((len(seen), kv_heads, value_size or size))
    plan = AttentionPlan(
        tuple(starts), tuple(counts), tables, tuple(first for first, _ in pages_of), page_size, window
    )
    q = rng.standard_normal((plan.rows, heads, size)).astype(np.float32)
    return Problem(q, k_pages, v_pages, plan)


def _first_key(start: int, window: int | None) -> int:
    return 0 if window is None else max(0, start - window + 1)


def _pages(start: int, count: int, page_size: int, window: int | None) -> tuple[int, int]:
    """Half-open range of page indices, from position 0, that a segment's rows see."""
    first = _first_key(start, window) // page_size
    return first, max(first, -(-(start + count) // page_size)) if count else first


def pack(
    pages: np.ndarray, bits: int, group_size: int = 32, dtype: mx.Dtype = mx.float32
) -> tuple[QuantisedPages, np.ndarray]:
    """Pages quantised head by head, and the values they stand for; unused slots stay NaN."""
    unused = np.isnan(pages)
    given = mx.array(np.where(unused, 0, pages)).astype(dtype)
    words, scales, biases = mx.quantize(given, group_size=group_size, bits=bits)
    exact = (words, scales.astype(mx.float32), biases.astype(mx.float32))
    values = np.array(mx.dequantize(*exact, group_size=group_size, bits=bits))
    nan = mx.array(np.where(unused[..., ::group_size], np.nan, 0)).astype(dtype)
    return QuantisedPages(words, scales + nan, biases + nan, bits, group_size), np.where(
        unused, np.nan, values
    )


def check_traffic(
    result: harness.Result, plan: AttentionPlan, heads: int, k_pages: Pages, v_pages: Pages
) -> None:
    """Each launch reads each key and value that its tasks see once a K/V head, and fits a threadgroup."""
    kv_heads = k_pages.shape[2]
    group = heads // kv_heads
    for launch in result.launches:
        assert launch.counters.threadgroup_bytes <= paged.THREADGROUP_BYTES
        if launch.name.startswith("paged_reduce"):
            continue
        few = launch.name.startswith("paged_decode")
        queries = paged.DECODE_QUERIES if few else paged.TILE_QUERIES
        served = [s for s, n in enumerate(plan.counts) if n and few == (n * group <= paged.DECODE_QUERIES)]
        keys = sum(_keys_seen(plan, s, group, queries) for s in served)
        for side, pages in (("k", k_pages), ("v", v_pages)):
            buffers = [t for name, t in launch.counters.traffic.items() if name.split("_")[0] == side]
            assert sum(buffer.read for buffer in buffers) <= 1.05 * keys * kv_heads * _vector_bytes(pages)


def _keys_seen(plan: AttentionPlan, s: int, group: int, queries: int) -> int:
    """Keys that the tasks of segment s see, a key once a task of so many queries."""
    total = 0
    for pair in range(0, plan.counts[s] * group, queries):
        last = min(pair + queries, plan.counts[s] * group) - 1
        first = plan.first_key(plan.starts[s] + pair // group)
        total += plan.starts[s] + last // group + 1 - first
    return total


def _vector_bytes(pages: Pages) -> float:
    """Of one head's key or value."""
    size = pages.shape[3]
    if not isinstance(pages, QuantisedPages):
        return size * pages.dtype.size
    return size * pages.bits / 8 + size / pages.group_size * 2 * pages.dtype.size
