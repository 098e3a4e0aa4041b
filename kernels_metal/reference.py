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
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlxserve.kernels_metal.plan import AttentionPlan, Pages, QuantisedPages

LOG2_E = math.log2(math.e)
# Measured on a 2-core CPU: a view of fewer tokens than this costs more than gathering them.
MIN_RUN_TOKENS = 128
# Block-diagonal queries multiply the arithmetic by the K/V heads; past this many heads a gather is cheaper.
MAX_SOLO_HEADS = 32
# One more bucket costs about as much as gathering this many tokens.
BUCKET_COST_TOKENS = 256
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
    solo_wanted = q.shape[1] <= MAX_SOLO_HEADS and not packed
    layout = plan.once(("reference", solo_wanted), lambda: _Layout.of(plan, solo_wanted))
    maths = _Maths(q.dtype, scale, sinks, softcap)
    parts = [_solo(q, k_pages, v_pages, solo, maths) for solo in layout.solos]
    parts += [_bucket(q, k_pages, v_pages, bucket, maths) for bucket in layout.buckets]
    parts += [_chunk(q, k_pages, v_pages, chunk, maths) for chunk in layout.chunks]
    if not parts:
        return mx.zeros((0, q.shape[1], v_pages.shape[-1]), q.dtype)
    out = parts[0] if len(parts) == 1 else mx.concatenate(parts)  # [Tq, HQ, DV], in the layout's order
    return (out if layout.restore is None else mx.take(out, layout.restore, axis=0)).astype(q.dtype)


class _Maths:
    """The arithmetic of one call: scores to weights, in float32 and base 2."""

    def __init__(self, dtype: mx.Dtype, scale: float, sinks: mx.array | None, softcap: float | None) -> None:
        self.gpu = mx.default_device() == mx.Device(mx.gpu)
        # A CPU multiplies float16 and bfloat16 one number at a time: float32 and BLAS are many times faster.
        self.dtype = dtype if self.gpu else mx.float32
        self.softcap = softcap
        self.scale = scale if softcap else scale * LOG2_E
        self.sinks = None if sinks is None else sinks.astype(mx.float32) * LOG2_E  # [HQ]

    def weights(self, scores: mx.array, mask: mx.array | None) -> tuple[mx.array, mx.array]:
        """Unnormalised weights, as `scores`, and their sums [..., 1]. scores: [HKV or B.., G, rows.., keys].

        mask is additive, 0 or -inf. With sinks, `scores` must be [..., HQ, rows, keys].
        """
        scores = scores.astype(mx.float32)
        if self.softcap:
            scores = mx.tanh(scores / self.softcap) * (self.softcap * LOG2_E)
        if mask is not None:
            scores = scores + mask
        top = scores.max(axis=-1, keepdims=True)
        if self.sinks is not None:
            top = mx.maximum(top, self.sinks[:, None, None])
        weights = mx.power(2.0, scores - top)
        total = weights.sum(axis=-1, keepdims=True)
        if self.sinks is not None:
            total = total + mx.power(2.0, self.sinks[:, None, None] - top)
        return weights.astype(self.dtype), total


@dataclass(frozen=True)
class _Solo:
    """One decode row and the places of its keys: `runs` of pool slots read in place, `rest` gathered."""

    row: int
    runs: tuple[tuple[int, int], ...]  # half-open ranges of slots
    rest: mx.array | None  # int32 [n] slots


@dataclass(frozen=True)
class _Bucket:
    """Decode rows of similar length. Padding reads a sequence's own first slot again."""

    rows: tuple[int, ...]
    row_index: mx.array | None  # int32 [B]; None where rows are 0 .. Tq-1
    gather: _Gather  # [B, L]
    mask: mx.array | None  # [B, 1, 1, L], None where all lengths agree


@dataclass(frozen=True)
class _Layout:
    """How a plan's rows are split among the three ways; `restore` puts the output rows back in order."""

    solos: tuple[_Solo, ...]
    buckets: tuple[_Bucket, ...]
    chunks: tuple[_Chunk, ...]
    restore: mx.array | None

    @staticmethod
    def of(plan: AttentionPlan, solo_wanted: bool) -> _Layout:
        solos, singles, chunks = [], [], []
        row_starts = plan.row_starts
        for s, count in enumerate(plan.counts):
            if count > 1:
                chunks.append(_Chunk.of(plan, s))
            elif count == 1:
                slots = plan.slots(s, *plan.keys(s))
                solo = _solo_of(row_starts[s], slots) if solo_wanted else None
                if solo is None:
                    singles.append((row_starts[s], slots))
                else:
                    solos.append(solo)
        buckets = _buckets_of(singles, plan.rows)
        order = [solo.row for solo in solos] + [row for bucket in buckets for row in bucket.rows]
        order += [chunk.row + i for chunk in chunks for i in range(chunk.blocks[-1].stop)]
        return _Layout(tuple(solos), tuple(buckets), tuple(chunks), _inverse(order))


def _inverse(order: list[int]) -> mx.array | None:
    """The index that undoes `order`, None where there is nothing to undo."""
    if order == list(range(len(order))):
        return None
    return mx.array(np.argsort(order).astype(np.int32))


def _solo_of(row: int, slots: np.ndarray) -> _Solo | None:
    """The row as a solo if at least one long run makes that worth it."""
    breaks = np.flatnonzero(np.diff(slots) != 1) + 1
    edges = [0, *breaks.tolist(), len(slots)]
    runs, rest = [], []
    for first, stop in zip(edges[:-1], edges[1:], strict=True):
        if stop - first >= MIN_RUN_TOKENS or len(edges) == 2:
            runs.append((int(slots[first]), int(slots[stop - 1]) + 1))
        else:
            rest.append(slots[first:stop])
    if not runs:
        return None
    return _Solo(row, tuple(runs), mx.array(np.concatenate(rest).astype(np.int32)) if rest else None)


def _buckets_of(singles: list[tuple[int, np.ndarray]], rows: int) -> list[_Bucket]:
    """Group rows, longest first; a new bucket starts where padding would cost more than a bucket does."""
    groups: list[list[tuple[int, np.ndarray]]] = []
    padding = 0
    for item in sorted(singles, key=lambda single: -len(single[1])):
        waste = len(groups[-1][0][1]) - len(item[1]) if groups else 0
        if not groups or padding + waste > BUCKET_COST_TOKENS:
            groups.append([])
            padding = waste = 0
        padding += waste
        groups[-1].append(item)
    return [_bucket_of(sorted(group, key=lambda single: single[0]), rows) for group in groups]


def _bucket_of(group: list[tuple[int, np.ndarray]], rows: int) -> _Bucket:
    lengths = np.array([len(slots) for _, slots in group])
    longest = lengths.max()
    slots = np.stack(
        [np.pad(slots, (0, longest - len(slots)), constant_values=slots[0]) for _, slots in group]
    )
    mask = None
    if (lengths != longest).any():
        past = np.arange(longest) >= lengths[:, None]  # [B, L]
        mask = mx.array(np.where(past, -np.inf, 0).astype(np.float32)[:, None, None])
    index = tuple(row for row, _ in group)
    row_index = None if index == tuple(range(rows)) else mx.array(index, mx.int32)
    return _Bucket(index, row_index, _Gather(slots), mask)


def _solo(q: mx.array, k_pages: Pages, v_pages: Pages, solo: _Solo, maths: _Maths) -> mx.array:
    """One row over keys read in place. Returns [1, HQ, DV].

    Pages seen as [slots, HKV * D] are plain matrices, so that a run of them is a view, if each query head
    is spread over HKV * D columns with zeros outside its own K/V head.
    """
    heads, kv_heads = q.shape[1], k_pages.shape[2]
    own = mx.repeat(mx.eye(kv_heads, dtype=maths.dtype), heads // kv_heads, axis=0)[
        :, :, None
    ]  # [HQ, HKV, 1]
    row = q[solo.row].astype(maths.dtype) * maths.scale  # [HQ, D]
    spread = (row[:, None] * own).reshape(heads, -1)  # [HQ, HKV * D]
    scores = [spread @ part.T for part in _parts(k_pages, solo, maths)]  # [HQ, n] each
    joined = scores[0] if len(scores) == 1 else mx.concatenate(scores, axis=-1)
    weights, total = maths.weights(joined[:, None], None)  # [HQ, 1, L], [HQ, 1, 1]
    first, out = 0, None
    for part in _parts(v_pages, solo, maths):  # [n, HKV * DV]
        share = weights[:, 0, first : first + part.shape[0]] @ part  # [HQ, HKV * DV]
        out = share if out is None else out + share
        first += part.shape[0]
    assert out is not None
    out = (out.reshape(heads, kv_heads, -1) * own).sum(axis=1)  # [HQ, DV]
    return (out / total[:, 0])[None]


def _parts(pages: Pages, solo: _Solo, maths: _Maths) -> list[mx.array]:
    """The solo's keys or values as matrices [n, HKV * D]: views of the runs, then the gathered rest."""
    assert isinstance(pages, mx.array), "packed pages cannot be read in place"
    flat = pages.reshape(pages.shape[0] * pages.shape[1], -1)
    parts = [flat[first:stop] for first, stop in solo.runs]
    if solo.rest is not None:
        parts.append(mx.take(flat, solo.rest, axis=0))
    return [part.astype(maths.dtype) for part in parts]


def _bucket(q: mx.array, k_pages: Pages, v_pages: Pages, bucket: _Bucket, maths: _Maths) -> mx.array:
    """A batch of single rows over gathered keys. Returns [B, HQ, DV]."""
    rows = q if bucket.row_index is None else mx.take(q, bucket.row_index, axis=0)  # [B, HQ, D]
    batch, heads, size = rows.shape
    kv_heads = k_pages.shape[2]
    k = bucket.gather(k_pages, maths.dtype)  # [B, HKV, L, D]
    v = bucket.gather(v_pages, maths.dtype)  # [B, HKV, L, DV]
    grouped = (rows.astype(maths.dtype) * maths.scale).reshape(batch, kv_heads, -1, size)  # [B, HKV, G, D]
    scores = (grouped @ k.swapaxes(-1, -2)).reshape(batch, heads, 1, -1)
    weights, total = maths.weights(scores, bucket.mask)  # [B, HQ, 1, L], [B, HQ, 1, 1]
    out = weights.reshape(batch, kv_heads, heads // kv_heads, -1) @ v  # [B, HKV, G, DV]
    return out.reshape(batch, heads, -1) / total[:, :, 0]


class _Gather:
    """Pool slots [..., L] whose keys or values are wanted heads first; index arrays are built once."""

    def __init__(self, slots: np.ndarray) -> None:
        self.slots = slots
        self._index: dict[int, mx.array] = {}

    def __call__(self, pages: Pages, dtype: mx.Dtype) -> mx.array:
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
    mask = mx.array(np.where(hidden, -np.inf, 0).astype(np.float32)) if hidden.any() else None
    return _Block(first, stop, key_first - origin, key_stop - origin, mask)


def _chunk(q: mx.array, k_pages: Pages, v_pages: Pages, chunk: _Chunk, maths: _Maths) -> mx.array:
    """Rows of one sequence over its gathered keys. Returns [count, HQ, DV]."""
    k = chunk.gather(k_pages, maths.dtype).swapaxes(-1, -2)  # [HKV, D, L]
    v = chunk.gather(v_pages, maths.dtype)  # [HKV, L, DV]
    outs = [_block(q, k, v, chunk.row, block, maths) for block in chunk.blocks]
    return outs[0] if len(outs) == 1 else mx.concatenate(outs)


def _block(q: mx.array, k: mx.array, v: mx.array, row: int, block: _Block, maths: _Maths) -> mx.array:
    kv_heads, count = k.shape[0], block.stop - block.first
    rows = q[row + block.first : row + block.stop].astype(maths.dtype) * maths.scale  # [count, HQ, D]
    heads = rows.shape[1]
    grouped = rows.swapaxes(0, 1).reshape(kv_heads, -1, rows.shape[-1])  # [HKV, G * count, D]
    scores = grouped @ k[..., block.key_first : block.key_stop]  # [HKV, G * count, keys]
    weights, total = maths.weights(scores.reshape(heads, count, -1), block.mask)  # [HQ, count, keys]
    out = weights.reshape(scores.shape) @ v[:, block.key_first : block.key_stop]  # [HKV, G * count, DV]
    return (out.reshape(heads, count, -1) / total).swapaxes(0, 1)
