"""Paged attention in plain MLX operations: what runs on CPU and CUDA, and what kernels are tested against.

Knows: how to read pages with few operations and few copies. Knows nothing of kernels or of dispatch.

Three ways, chosen per segment when a step's plan is first used:

    solo     one query row whose pages lie in long runs of consecutive ids: keys are read where they lie.
    bucket   one query row each of several sequences of similar length: gathered, padded, batched.
    chunk    several query rows of one sequence: gathered once, then blocks of rows, each up to its own
             last key.

Softmax is taken in float32 and base 2 (the scale carries log2(e)) and divided out after the values are
summed: on MLX's CPU backend `power(2, x)` costs less than half of `exp(x)`, and the division touches
[rows, D] instead of [rows, keys].

Where there are few K/V heads, single rows are "spread": each query head becomes a row of HKV * D columns,
zero outside its own K/V head. Pages seen as matrices [slots, HKV * D] can then be multiplied as they lie,
without bringing the heads to the front, at the price of HKV times the arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate

import mlx.core as mx
import numpy as np

from mlxserve.kernels_metal.plan import AttentionPlan, Pages, QuantisedPages

LOG2_E = math.log2(math.e)
# What follows was measured on a 2-core CPU with SmolLM2's heads (9 and 3 of 64).
MAX_SPREAD_HEADS = 4  # K/V heads; above, the extra arithmetic costs more than the copies it saves
MIN_RUN_TOKENS = 128  # reading a shorter run in place costs more than gathering it
BUCKET_COST_TOKENS = 256  # one more bucket costs about as much as gathering this many tokens
BUCKET_MAX_TOKENS = 2048  # gathered keys should still be in the cache when they are multiplied
CHUNK_ROWS = 128


def paged_attention(
    q: mx.array,
    k_pages: Pages,
    v_pages: Pages,
    plan: AttentionPlan,
    *,
    scale: float,
    sinks: mx.array | None = None,
    softcap: float | None = None,
) -> mx.array:
    """Attention of query rows over paged keys and values.

    q: [Tq, HQ, D]; k_pages: [NB, BS, HKV, D]; v_pages: [NB, BS, HKV, DV], or QuantisedPages. sinks: [HQ],
    a logit a head that takes weight and adds nothing. softcap: scores become softcap * tanh(score /
    softcap). Returns [Tq, HQ, DV] in q's dtype.
    """
    packed = isinstance(k_pages, QuantisedPages) or isinstance(v_pages, QuantisedPages)
    spread = k_pages.shape[2] <= MAX_SPREAD_HEADS and not packed
    layout = plan.once(("reference", spread), lambda: _Layout.of(plan, spread))
    maths = _Maths(q.dtype, scale, sinks, softcap)
    q_type, q = q.dtype, q.astype(maths.dtype)
    parts = []
    if layout.solos or layout.buckets:
        single = _spread_rows if spread else _bucket_rows
        parts.append(single(q, k_pages, v_pages, layout, maths))
    parts += [_chunk(q, k_pages, v_pages, chunk, maths) for chunk in layout.chunks]
    if not parts:
        return mx.zeros((0, q.shape[1], v_pages.shape[-1]), q_type)
    out = _joined(parts)  # [Tq, HQ, DV], in the layout's order
    return (out if layout.restore is None else mx.take(out, layout.restore, axis=0)).astype(q_type)


def _joined(parts: list[mx.array], axis: int = 0) -> mx.array:
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=axis)


class _Maths:
    """The arithmetic of one call: scores to weights, in float32 and base 2."""

    def __init__(self, dtype: mx.Dtype, scale: float, sinks: mx.array | None, softcap: float | None) -> None:
        on_cpu = mx.default_device() == mx.Device(mx.cpu)
        # A CPU multiplies float16 and bfloat16 one number at a time: float32 and BLAS are many times faster.
        self.dtype = mx.float32 if on_cpu else dtype
        self.softcap = softcap
        self.scale = scale if softcap else scale * LOG2_E
        self.sinks = None if sinks is None else sinks.astype(mx.float32)[:, None, None] * LOG2_E

    def weights(self, scores: mx.array, mask: mx.array | None) -> tuple[mx.array, mx.array]:
        """Weights before division, and their sums. scores: [..., HQ, rows, keys]; sums: [..., HQ, rows, 1].

        mask is additive, 0 or -inf, and broadcasts to the scores.
        """
        scores = scores.astype(mx.float32)
        if self.softcap:
            scores = mx.tanh(scores / self.softcap) * (self.softcap * LOG2_E)
        if mask is not None:
            scores = scores + mask
        top = scores.max(axis=-1, keepdims=True)
        if self.sinks is not None:
            top = mx.maximum(top, self.sinks)
        weights = mx.power(2.0, scores - top)
        total = weights.sum(axis=-1, keepdims=True)
        if self.sinks is not None:
            total = total + mx.power(2.0, self.sinks - top)
        return weights.astype(self.dtype), total


@dataclass(frozen=True)
class _Solo:
    """One decode row and the places of its keys: `runs` of pool slots read in place, `rest` gathered."""

    row: int
    runs: tuple[tuple[int, int], ...]  # half-open ranges of slots
    rest: mx.array | None  # int32 [n] slots

    @staticmethod
    def of(row: int, slots: np.ndarray) -> _Solo | None:
        """None unless a run is long enough to be worth it."""
        breaks = np.flatnonzero(np.diff(slots) != 1) + 1
        edges = [0, *breaks.tolist(), len(slots)]
        runs, rest = [], []
        for first, stop in zip(edges[:-1], edges[1:], strict=True):
            if stop - first >= MIN_RUN_TOKENS:
                runs.append((int(slots[first]), int(slots[first]) + stop - first))
            else:
                rest.append(slots[first:stop])
        if not runs:
            return None
        return _Solo(row, tuple(runs), mx.array(np.concatenate(rest).astype(np.int32)) if rest else None)


@dataclass(frozen=True)
class _Bucket:
    """Decode rows of similar length. Padding reads a sequence's own first slot again."""

    rows: tuple[int, ...]
    gather: _Gather  # [B, L]
    mask: mx.array | None  # [B, 1, 1, L] additive, None where all lengths agree

    @staticmethod
    def of(group: list[tuple[int, np.ndarray]]) -> _Bucket:
        lengths = np.array([len(slots) for _, slots in group])
        longest = lengths.max()
        slots = np.stack([np.append(own, np.full(longest - len(own), own[0])) for _, own in group])
        past = np.arange(longest) >= lengths[:, None]  # [B, L]
        mask = _additive(past)[:, None, None] if past.any() else None
        return _Bucket(tuple(row for row, _ in group), _Gather(slots), mask)


def _additive(hidden: np.ndarray) -> mx.array:
    return mx.array(np.where(hidden, -np.inf, 0).astype(np.float32))


@dataclass(frozen=True)
class _Layout:
    """How a plan's rows are split among the three ways; `restore` puts the output rows back in order."""

    solos: tuple[_Solo, ...]
    buckets: tuple[_Bucket, ...]
    chunks: tuple[_Chunk, ...]
    single_rows: mx.array | None  # int32, rows of solos and then buckets; None where they are 0 .. Tq-1
    restore: mx.array | None
    _own_head: dict[tuple[int, int, float], tuple[mx.array, mx.array]] = field(default_factory=dict)

    @staticmethod
    def of(plan: AttentionPlan, solo_wanted: bool) -> _Layout:
        solos, rest = [], []
        row_starts = plan.row_starts
        for s in range(len(plan.counts)):
            if plan.counts[s] != 1:
                continue
            slots = plan.slots(s, *plan.keys(s))
            solo = _Solo.of(row_starts[s], slots) if solo_wanted else None
            if solo is None:
                rest.append((row_starts[s], slots))
            else:
                solos.append(solo)
        buckets = _buckets_of(rest)
        chunks = [_Chunk.of(plan, s) for s in range(len(plan.counts)) if plan.counts[s] > 1]
        singles = [solo.row for solo in solos] + [row for bucket in buckets for row in bucket.rows]
        order = singles + [chunk.row + i for chunk in chunks for i in range(chunk.blocks[-1].stop)]
        taken = None if singles == list(range(plan.rows)) else mx.array(singles, mx.int32)
        restore = None if order == list(range(plan.rows)) else mx.array(np.argsort(order).astype(np.int32))
        return _Layout(tuple(solos), tuple(buckets), tuple(chunks), taken, restore)

    def take_singles(self, q: mx.array) -> mx.array:
        return q if self.single_rows is None else mx.take(q, self.single_rows, axis=0)

    def split_singles(self, rows: mx.array) -> Iterator[mx.array]:
        """The rows of each solo, then of each bucket."""
        sizes = [1] * len(self.solos) + [len(bucket.rows) for bucket in self.buckets]
        if len(sizes) == 1:
            return iter([rows])
        edges = [0, *accumulate(sizes)]
        return (rows[first:stop] for first, stop in zip(edges[:-1], edges[1:], strict=True))

    def own_head(self, heads: int, kv_heads: int, maths: _Maths) -> tuple[mx.array, mx.array]:
        """[HQ, HKV, 1] one where the query head reads the K/V head and zero elsewhere; the same scaled."""
        key = (heads, kv_heads, maths.scale)
        if key not in self._own_head:
            own = mx.repeat(mx.eye(kv_heads, dtype=maths.dtype), heads // kv_heads, axis=0)[:, :, None]
            self._own_head[key] = (own, own * maths.scale)
        return self._own_head[key]


def _buckets_of(singles: list[tuple[int, np.ndarray]]) -> list[_Bucket]:
    """Group rows, longest first; a new bucket starts where padding would cost more than a bucket does."""
    groups: list[list[tuple[int, np.ndarray]]] = []
    padding = 0
    for item in sorted(singles, key=lambda single: -len(single[1])):
        longest = len(groups[-1][0][1]) if groups else 0
        waste = longest - len(item[1])
        full = not groups or (len(groups[-1]) + 1) * longest > BUCKET_MAX_TOKENS
        if full or padding + waste > BUCKET_COST_TOKENS:
            groups.append([])
            padding = waste = 0
        padding += waste
        groups[-1].append(item)
    return [_Bucket.of(sorted(group, key=lambda single: single[0])) for group in groups]


def _spread_rows(q: mx.array, k_pages: Pages, v_pages: Pages, layout: _Layout, maths: _Maths) -> mx.array:
    """All single rows, solos first. q: [Tq, HQ, D]. Returns [n, HQ, DV]."""
    assert isinstance(k_pages, mx.array) and isinstance(v_pages, mx.array), "packed pages cannot be spread"
    heads, kv_heads = q.shape[1], k_pages.shape[2]
    own, own_scaled = layout.own_head(heads, kv_heads, maths)
    rows = layout.take_singles(q)[:, :, None] * own_scaled  # [n, HQ, HKV, D]
    rows = rows.reshape(*rows.shape[:2], -1)  # [n, HQ, HKV * D]
    k = k_pages.reshape(-1, rows.shape[-1])  # [NB * BS, HKV * D]
    v = v_pages.reshape(k.shape[0], -1)  # [NB * BS, HKV * DV]
    shares = layout.split_singles(rows)
    outs = [_solo(next(shares), k, v, solo, maths) for solo in layout.solos]
    outs += [_spread_bucket(next(shares), k, v, bucket, maths) for bucket in layout.buckets]
    out = _joined(outs)  # [n, HQ, HKV * DV]
    return (out.reshape(*out.shape[:2], kv_heads, -1) * own).sum(axis=2)


def _solo(row: mx.array, k: mx.array, v: mx.array, solo: _Solo, maths: _Maths) -> mx.array:
    """One spread row [1, HQ, HKV * D] over the matrices [slots, HKV * D]. Returns [1, HQ, HKV * DV]."""
    scores = _joined([row @ part.T for part in _parts(k, solo, maths)], axis=-1)  # [1, HQ, L]
    weights, total = maths.weights(scores[:, :, None], None)  # [1, HQ, 1, L], [1, HQ, 1, 1]
    first, out = 0, None
    for part in _parts(v, solo, maths):  # [keys, HKV * DV]
        share = weights[:, :, 0, first : first + part.shape[0]] @ part
        out = share if out is None else out + share
        first += part.shape[0]
    assert out is not None
    return out / total[:, :, 0]


def _parts(matrix: mx.array, solo: _Solo, maths: _Maths) -> Iterator[mx.array]:
    """The solo's keys or values, [n, HKV * D] each: views of the runs, then the gathered rest."""
    for first, stop in solo.runs:
        yield matrix[first:stop].astype(maths.dtype)
    if solo.rest is not None:
        yield mx.take(matrix, solo.rest, axis=0).astype(maths.dtype)


def _spread_bucket(rows: mx.array, k: mx.array, v: mx.array, bucket: _Bucket, maths: _Maths) -> mx.array:
    """Spread rows [B, HQ, HKV * D] over gathered keys. Returns [B, HQ, HKV * DV]."""
    scores = rows @ bucket.gather.rows(k, maths.dtype).swapaxes(-1, -2)  # [B, HQ, L]
    weights, total = maths.weights(scores[:, :, None], bucket.mask)  # [B, HQ, 1, L], [B, HQ, 1, 1]
    return weights[:, :, 0] @ bucket.gather.rows(v, maths.dtype) / total[:, :, 0]


def _bucket_rows(q: mx.array, k_pages: Pages, v_pages: Pages, layout: _Layout, maths: _Maths) -> mx.array:
    """All single rows over keys gathered heads first. q: [Tq, HQ, D]. Returns [n, HQ, DV]."""
    shares = layout.split_singles(layout.take_singles(q) * maths.scale)  # [n, HQ, D]
    return _joined([_bucket(next(shares), k_pages, v_pages, bucket, maths) for bucket in layout.buckets])


def _bucket(rows: mx.array, k_pages: Pages, v_pages: Pages, bucket: _Bucket, maths: _Maths) -> mx.array:
    """Rows [B, HQ, D] of several sequences. Returns [B, HQ, DV]."""
    batch, heads, size = rows.shape
    kv_heads = k_pages.shape[2]
    k = bucket.gather.heads_first(k_pages, maths.dtype)  # [B, HKV, L, D]
    v = bucket.gather.heads_first(v_pages, maths.dtype)  # [B, HKV, L, DV]
    grouped = rows.reshape(batch, kv_heads, -1, size)  # [B, HKV, G, D]
    scores = (grouped @ k.swapaxes(-1, -2)).reshape(batch, heads, 1, -1)
    weights, total = maths.weights(scores, bucket.mask)  # [B, HQ, 1, L], [B, HQ, 1, 1]
    out = weights.reshape(batch, kv_heads, heads // kv_heads, -1) @ v  # [B, HKV, G, DV]
    return out.reshape(batch, heads, -1) / total[:, :, 0]


class _Gather:
    """Pool slots [..., L] whose keys or values are wanted; index arrays are built once."""

    def __init__(self, slots: np.ndarray) -> None:
        self.slots = slots
        self._index: dict[int, mx.array] = {}  # by K/V heads; 0: whole rows

    def rows(self, matrix: mx.array, dtype: mx.Dtype) -> mx.array:
        """Rows of a matrix [NB * BS, n]: [..., L, n] in `dtype`."""
        if 0 not in self._index:
            self._index[0] = mx.array(self.slots.astype(np.int32))
        return mx.take(matrix, self._index[0], axis=0).astype(dtype)

    def heads_first(self, pages: Pages, dtype: mx.Dtype) -> mx.array:
        """[..., HKV, L, D] in `dtype`."""
        heads = pages.shape[2]
        if heads not in self._index:
            index = self.slots[..., None, :] * heads + np.arange(heads)[:, None]  # [..., HKV, L]
            self._index[heads] = mx.array(index.astype(np.int32))
        return _take_heads(pages, self._index[heads]).astype(dtype)


def _take_heads(pages: Pages, index: mx.array) -> mx.array:
    """index.shape + [D]: single heads' vectors, dequantised where they are packed."""
    if not isinstance(pages, QuantisedPages):
        return mx.take(pages.reshape(-1, pages.shape[-1]), index, axis=0)
    weight, scales, biases = (
        mx.take(part.reshape(-1, part.shape[-1]), index, axis=0)
        for part in (pages.weight, pages.scales, pages.biases)
    )
    return mx.dequantize(weight, scales, biases, group_size=pages.group_size, bits=pages.bits)


@dataclass(frozen=True)
class _Block:
    """Rows first .. stop of a chunk, and the keys they see, counted from the chunk's first key."""

    first: int
    stop: int
    key_first: int
    key_stop: int
    mask: mx.array | None  # [stop - first, key_stop - key_first], additive


@dataclass(frozen=True)
class _Chunk:
    """Several rows of one sequence, in blocks."""

    row: int
    gather: _Gather
    blocks: tuple[_Block, ...]

    @staticmethod
    def of(plan: AttentionPlan, s: int) -> _Chunk:
        first_key, stop_key = plan.keys(s)
        count = plan.counts[s]
        blocks = [
            _block_of(plan, plan.starts[s], first, min(first + CHUNK_ROWS, count), first_key)
            for first in range(0, count, CHUNK_ROWS)
        ]
        return _Chunk(plan.row_starts[s], _Gather(plan.slots(s, first_key, stop_key)), tuple(blocks))


def _block_of(plan: AttentionPlan, start: int, first: int, stop: int, origin: int) -> _Block:
    key_first, key_stop = plan.first_key(start + first), start + stop
    position = np.arange(start + first, start + stop)[:, None]
    key = np.arange(key_first, key_stop)
    hidden = key > position  # [rows, keys]
    if plan.window is not None:
        hidden |= key <= position - plan.window
    mask = _additive(hidden) if hidden.any() else None
    return _Block(first, stop, key_first - origin, key_stop - origin, mask)


def _chunk(q: mx.array, k_pages: Pages, v_pages: Pages, chunk: _Chunk, maths: _Maths) -> mx.array:
    """Rows of one sequence over its gathered keys. Returns [count, HQ, DV]."""
    k = chunk.gather.heads_first(k_pages, maths.dtype).swapaxes(-1, -2)  # [HKV, D, L]
    v = chunk.gather.heads_first(v_pages, maths.dtype)  # [HKV, L, DV]
    outs = [_block(q, k, v, chunk.row, block, maths) for block in chunk.blocks]
    return outs[0] if len(outs) == 1 else mx.concatenate(outs)


def _block(q: mx.array, k: mx.array, v: mx.array, row: int, block: _Block, maths: _Maths) -> mx.array:
    kv_heads, count = k.shape[0], block.stop - block.first
    rows = q[row + block.first : row + block.stop] * maths.scale  # [count, HQ, D]
    heads = rows.shape[1]
    grouped = rows.swapaxes(0, 1).reshape(kv_heads, -1, rows.shape[-1])  # [HKV, G * count, D]
    scores = grouped @ k[..., block.key_first : block.key_stop]  # [HKV, G * count, keys]
    weights, total = maths.weights(scores.reshape(heads, count, -1), block.mask)  # [HQ, count, keys]
    out = weights.reshape(scores.shape) @ v[:, block.key_first : block.key_stop]  # [HKV, G * count, DV]
    return (out.reshape(heads, count, -1) / total).swapaxes(0, 1)
