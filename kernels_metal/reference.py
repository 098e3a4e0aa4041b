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
from collections.abc import Callable, Iterator

import mlx.core as mx

from mlxserve.kernels_metal.layout import Block, Bucket, Chunk, Gather, Layout, Solo
from mlxserve.kernels_metal.plan import AttentionPlan, Pages, QuantisedPages

LOG2_E = math.log2(math.e)
# Measured on a 2-core CPU with SmolLM2's heads (9 and 3 of 64).
MAX_SPREAD_HEADS = 4  # K/V heads; above, the extra arithmetic costs more than the copies it saves
SMALL_SCORES = 100_000  # up to this many, five fewer operations are worth more than a cheaper exponential


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
    softcap). Places of these pages that no row sees may hold any key, and any finite value. Returns
    [Tq, HQ, DV] in q's dtype.
    """
    packed = isinstance(k_pages, QuantisedPages) or isinstance(v_pages, QuantisedPages)
    spread = k_pages.shape[2] <= MAX_SPREAD_HEADS and not packed
    layout = plan.once(("reference", spread), lambda: Layout.of(plan, spread))
    out_dtype, q = q.dtype, q.astype(_compute_dtype(q.dtype))
    parts = []
    if layout.single:
        small = q.shape[1] * layout.keys <= SMALL_SCORES
        softmax = _Softmax(scale, sinks, softcap, small)
        parts.append((_spread_rows if spread else _bucket_rows)(q, k_pages, v_pages, plan, layout, softmax))
    for chunk in layout.chunks:
        if _has_fused_attention() and not softcap:
            parts.append(_fused_chunk(q, k_pages, v_pages, chunk, scale, sinks))
        else:
            softmax = _Softmax(scale, sinks, softcap, small=False)
            parts.append(_chunk(q, k_pages, v_pages, chunk, softmax))
    if not parts:
        return mx.zeros((0, q.shape[1], v_pages.shape[-1]), out_dtype)
    out = _joined(parts)  # [Tq, HQ, DV], in the layout's order
    return (out if layout.restore is None else mx.take(out, layout.restore, axis=0)).astype(out_dtype)


def _compute_dtype(dtype: mx.Dtype) -> mx.Dtype:
    """float32 on a CPU, which multiplies float16 and bfloat16 one number at a time, without BLAS."""
    return dtype if _has_fused_attention() else mx.float32


def _has_fused_attention() -> bool:
    """Whether `mx.fast.scaled_dot_product_attention` is a kernel here; a CPU takes its plain operations."""
    return mx.default_device() != mx.Device(mx.cpu)


def _joined(parts: list[mx.array], axis: int = 0) -> mx.array:
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=axis)


class _Softmax:
    """Weighted averages of values, from scores; in float32.

    small: one operation in base e instead of several in base 2, for few scores.
    """

    def __init__(self, scale: float, sinks: mx.array | None, softcap: float | None, small: bool) -> None:
        self.small = small and sinks is None and not softcap
        self.softcap = softcap
        self.scale = scale if softcap or self.small else scale * LOG2_E  # what queries are multiplied by
        self.sinks = None if sinks is None else sinks.astype(mx.float32)[:, None] * LOG2_E  # [HQ, 1]

    def average(
        self,
        scores: mx.array,
        mask: mx.array | None,
        sinks: mx.array | None,
        read: Callable[[mx.array], mx.array],
    ) -> mx.array:
        """read(weights), divided by the weights' sums. scores: [..., keys]; read gives [..., DV].

        mask is additive, 0 or -inf; it and the sinks broadcast to the scores.
        """
        dtype, scores = scores.dtype, scores.astype(mx.float32)
        if self.softcap:
            scores = mx.tanh(scores / self.softcap) * (self.softcap * LOG2_E)
        if mask is not None:
            scores = mx.where(mask == 0, scores, mask)  # not a sum: hidden keys may be NaN
        if self.small:
            return read(mx.softmax(scores, axis=-1, precise=True).astype(dtype))
        top = scores.max(axis=-1, keepdims=True)
        if sinks is not None:
            top = mx.maximum(top, sinks)
        weights = mx.power(2.0, scores - top)
        total = weights.sum(axis=-1, keepdims=True)
        if sinks is not None:
            total = total + mx.power(2.0, sinks - top)
        return read(weights.astype(dtype)) / total


def _spread_rows(
    q: mx.array, k_pages: Pages, v_pages: Pages, plan: AttentionPlan, layout: Layout, softmax: _Softmax
) -> mx.array:
    """All single rows, solos first. q: [Tq, HQ, D]. Returns [n, HQ, DV]."""
    assert isinstance(k_pages, mx.array) and isinstance(v_pages, mx.array), "packed pages cannot be spread"
    heads, kv_heads = q.shape[1], k_pages.shape[2]
    own, own_scaled = plan.once(
        ("own head", heads, kv_heads, q.dtype, softmax.scale),
        lambda: _own_head(heads, kv_heads, q.dtype, softmax.scale),
    )
    rows = layout.take_singles(q)[:, :, None] * own_scaled  # [n, HQ, HKV, D]
    shares = layout.split_singles(rows.reshape(*rows.shape[:2], -1))  # [n, HQ, HKV * D]
    k, v = _matrix(k_pages), _matrix(v_pages)
    outs = [_solo(next(shares), k, v, solo, softmax) for solo in layout.solos]
    outs += [_spread_bucket(next(shares), k_pages, v_pages, bucket, softmax) for bucket in layout.buckets]
    out = _joined(outs)  # [n, HQ, HKV * DV]
    return (out.reshape(*out.shape[:2], kv_heads, -1) * own).sum(axis=2)


def _own_head(heads: int, kv_heads: int, dtype: mx.Dtype, scale: float) -> tuple[mx.array, mx.array]:
    """[HQ, HKV, 1] one where the query head reads the K/V head and zero elsewhere; the same times scale."""
    own = mx.repeat(mx.eye(kv_heads, dtype=dtype), heads // kv_heads, axis=0)[:, :, None]
    return own, own * scale


def _solo(row: mx.array, k: mx.array, v: mx.array, solo: Solo, softmax: _Softmax) -> mx.array:
    """One spread row [1, HQ, HKV * D] over the matrices [slots, HKV * D]. Returns [1, HQ, HKV * DV]."""
    scores = _joined([row @ part.T for part in _parts(k, solo, row.dtype)], axis=-1)  # [1, HQ, L]

    def read(weights: mx.array) -> mx.array:
        first, out = 0, mx.array(0.0, row.dtype)
        for part in _parts(v, solo, row.dtype):  # [keys, HKV * DV]
            share = weights[..., first : first + part.shape[0]] @ part
            out = share if first == 0 else out + share
            first += part.shape[0]
        return out

    return softmax.average(scores, None, softmax.sinks, read)


def _parts(matrix: mx.array, solo: Solo, dtype: mx.Dtype) -> Iterator[mx.array]:
    """The solo's keys or values, [n, HKV * D] each: views of the runs, then the gathered rest."""
    for first, stop in solo.runs:
        yield matrix[first:stop].astype(dtype)
    if solo.rest is not None:
        yield mx.take(matrix, solo.rest, axis=0).astype(dtype)


def _spread_bucket(rows: mx.array, k: mx.array, v: mx.array, bucket: Bucket, softmax: _Softmax) -> mx.array:
    """Spread rows [B, HQ, HKV * D] over whole pages [NB, BS, HKV, D]. Returns [B, HQ, HKV * DV]."""
    keys = _bucket_matrix(k, bucket).astype(rows.dtype)  # [B, L, HKV * D]
    values = _bucket_matrix(v, bucket).astype(rows.dtype)  # [B, L, HKV * DV]
    scores = rows @ keys.swapaxes(-1, -2)  # [B, HQ, L]
    return softmax.average(scores, bucket.mask, softmax.sinks, lambda weights: weights @ values)


def _bucket_matrix(pages: mx.array, bucket: Bucket) -> mx.array:
    """[B, L, HKV * D] gathered keys or values: whole pages, which are copied faster, where that may be."""
    index = bucket.gather.rows()  # [B, L]
    if bucket.pages is None:
        return mx.take(_matrix(pages), index, axis=0)
    whole = mx.take(pages, bucket.pages, axis=0)  # [B, MB, BS, HKV, D]
    return whole.reshape(*bucket.pages.shape[:1], -1, pages.shape[2] * pages.shape[3])[:, : index.shape[1]]


def _matrix(pages: mx.array) -> mx.array:
    """Pages as one row a slot: [NB * BS, HKV * D]."""
    return pages.reshape(pages.shape[0] * pages.shape[1], -1)


def _bucket_rows(
    q: mx.array, k_pages: Pages, v_pages: Pages, plan: AttentionPlan, layout: Layout, softmax: _Softmax
) -> mx.array:
    """All single rows over keys gathered heads first. q: [Tq, HQ, D]. Returns [n, HQ, DV]."""
    shares = layout.split_singles(layout.take_singles(q) * softmax.scale)  # [n, HQ, D]
    return _joined([_bucket(next(shares), k_pages, v_pages, bucket, softmax) for bucket in layout.buckets])


def _bucket(rows: mx.array, k_pages: Pages, v_pages: Pages, bucket: Bucket, softmax: _Softmax) -> mx.array:
    """Rows [B, HQ, D] of several sequences. Returns [B, HQ, DV]."""
    batch, heads, size = rows.shape
    kv_heads = k_pages.shape[2]
    k = _heads_first(k_pages, bucket.gather, rows.dtype)  # [B, HKV, L, D]
    v = _heads_first(v_pages, bucket.gather, rows.dtype)  # [B, HKV, L, DV]
    grouped = rows.reshape(batch, kv_heads, -1, size)  # [B, HKV, G, D]
    scores = (grouped @ k.swapaxes(-1, -2)).reshape(batch, heads, -1)  # [B, HQ, L]

    def read(weights: mx.array) -> mx.array:
        return (weights.reshape(batch, kv_heads, heads // kv_heads, -1) @ v).reshape(batch, heads, -1)

    return softmax.average(scores, bucket.mask, softmax.sinks, read)


def _heads_first(pages: Pages, gather: Gather, dtype: mx.Dtype) -> mx.array:
    """[..., HKV, L, D] gathered keys or values, dequantised where they are packed."""
    index = gather.heads_first(pages.shape[2])
    if not isinstance(pages, QuantisedPages):
        return mx.take(pages.reshape(-1, pages.shape[-1]), index, axis=0).astype(dtype)
    weight, scales, biases = (
        mx.take(part.reshape(-1, part.shape[-1]), index, axis=0)
        for part in (pages.weight, pages.scales, pages.biases)
    )
    values = mx.dequantize(weight, scales, biases, group_size=pages.group_size, bits=pages.bits)
    return values.astype(dtype)


def _chunk(q: mx.array, k_pages: Pages, v_pages: Pages, chunk: Chunk, softmax: _Softmax) -> mx.array:
    """Rows of one sequence over its gathered keys. Returns [count, HQ, DV]."""
    k = _heads_first(k_pages, chunk.gather, q.dtype).swapaxes(-1, -2)  # [HKV, D, L]
    v = _heads_first(v_pages, chunk.gather, q.dtype)  # [HKV, L, DV]
    return _joined([_block(q, k, v, chunk.row, block, softmax) for block in chunk.blocks])


def _fused_chunk(
    q: mx.array, k_pages: Pages, v_pages: Pages, chunk: Chunk, scale: float, sinks: mx.array | None
) -> mx.array:
    """Rows of one sequence over its gathered keys, by MLX's own kernel. Returns [count, HQ, DV]."""
    rows = q[chunk.row : chunk.row + chunk.count].swapaxes(0, 1)[None]  # [1, HQ, count, D]
    k = _heads_first(k_pages, chunk.gather, q.dtype)[None]  # [1, HKV, L, D]
    v = _heads_first(v_pages, chunk.gather, q.dtype)[None]  # [1, HKV, L, DV]
    sinks = None if sinks is None else sinks.astype(q.dtype)
    out = mx.fast.scaled_dot_product_attention(rows, k, v, scale=scale, mask=chunk.mask, sinks=sinks)
    return out[0].swapaxes(0, 1)


def _block(q: mx.array, k: mx.array, v: mx.array, row: int, block: Block, softmax: _Softmax) -> mx.array:
    kv_heads, count = k.shape[0], block.stop - block.first
    rows = q[row + block.first : row + block.stop] * softmax.scale  # [count, HQ, D]
    heads = rows.shape[1]
    grouped = rows.swapaxes(0, 1).reshape(kv_heads, -1, rows.shape[-1])  # [HKV, G * count, D]
    scores = grouped @ k[..., block.key_first : block.key_stop]  # [HKV, G * count, keys]
    values = v[:, block.key_first : block.key_stop]  # [HKV, keys, DV]

    def read(weights: mx.array) -> mx.array:
        return (weights.reshape(scores.shape) @ values).reshape(heads, count, -1)

    sinks = None if softmax.sinks is None else softmax.sinks[:, :, None]  # [HQ, 1, 1]
    out = softmax.average(scores.reshape(heads, count, -1), block.mask, sinks, read)  # [HQ, count, DV]
    return out.swapaxes(0, 1)
