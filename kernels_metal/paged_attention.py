"""Paged attention by Metal kernels: checks, the tasks of a step, and launches.

Knows: which kernel serves which rows, how keys are split, and shapes. Does not know: whether Metal is
there (dispatch), or how pages came to hold what they hold.

Three kernels, each for plain pages and for pages in 8 or 4 bits (bodies in the `.metal` files):

    paged_decode    up to 8 queries of a sequence: rows times query heads a K/V head
    paged_prefill   more, in tiles of 32 queries
    paged_reduce    joins shares where few sequences left the GPU idle and keys were split

Keys and values are read once for all heads of a group and all rows of a task; scores and unpacked values
never leave a threadgroup.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import mlx.core as mx
import numpy as np

from mlxserve.kernels_metal import reference
from mlxserve.kernels_metal.plan import AttentionPlan, Pages, QuantisedPages
from mlxserve.kernels_metal.source import read

DTYPES = (mx.float32, mx.float16, mx.bfloat16)
SIZES = (64, 80, 96, 128, 192, 256)
DECODE_QUERIES, DECODE_GROUPS = 8, 4
TILE_QUERIES, TILE_THREADS = 32, 128
# From so many rows on, `mx.fast`'s attention over gathered keys is worth the copy.
LONG_CHUNK_ROWS = 256
# A GPU is kept busy by about so many threadgroups; below, keys are split, but into no less than so many.
ENOUGH_THREADGROUPS = 256
LEAST_KEYS_A_SPLIT = 256
THREADGROUP_BYTES = 32 * 1024
# Arrays of fewer elements are passed to a kernel in another address space.
LEAST_ELEMENTS = 8

Body = Literal["paged_decode", "paged_prefill"]
Form = Literal["plain", "packed"]


@dataclass(frozen=True, eq=False)
class Tasks:
    """Work for one launch. numbers: int32 [N, 8], see `Task` in attention.metal; rows: of the outputs."""

    numbers: mx.array
    rows: int
    longest: int  # keys of the longest task


@dataclass(frozen=True, eq=False)
class Work:
    """A step's rows, shared out: to the two kernels, and the `rest` to the reference.

    query_rows: the rest's rows of q. restore: puts rows in the order decode, prefill, rest back in q's.
    """

    table: mx.array  # int32 [S, MB]
    decode: Tasks | None
    prefill: Tasks | None
    rest: AttentionPlan | None
    query_rows: mx.array | None
    restore: mx.array | None


@dataclass(frozen=True, eq=False)
class Operands:
    """What every launch of one call shares."""

    q: mx.array  # [Tq, HQ, D]
    k: Pages
    v: Pages
    table: mx.array  # int32 [S, MB]
    scale: float
    sinks: mx.array | None  # [HQ]
    softcap: float | None


def paged_attention(
    q: mx.array,
    k_pages: Pages,
    v_pages: Pages,
    plan: AttentionPlan,
    *,
    scale: float,
    sinks: mx.array | None = None,
    softcap: float | None = None,
    kernels: frozenset[str] = frozenset({"paged_decode", "paged_prefill"}),
) -> mx.array:
    """`reference.paged_attention` by the kernels named in `kernels`; rows of the others take the reference.

    Raises ValueError for operands that do not go together or that no kernel serves; see `serves`.
    """
    _check(q, k_pages, v_pages, sinks)
    group = q.shape[1] // k_pages.shape[2]
    fast_chunks = softcap is None and not isinstance(k_pages, QuantisedPages)
    work = plan.once(
        ("tasks", group, fast_chunks, kernels), lambda: share_out(plan, group, kernels, fast_chunks)
    )
    operands = Operands(q.astype(k_pages.dtype), k_pages, v_pages, work.table, scale, sinks, softcap)
    outs = []
    if work.decode is not None:
        outs.append(decode(operands, work.decode))
    if work.prefill is not None:
        outs.append(prefill(operands, work.prefill))
    if work.rest is not None:
        rows = q if work.query_rows is None else mx.take(q, work.query_rows, axis=0)
        outs.append(
            reference.paged_attention(
                rows, k_pages, v_pages, work.rest, scale=scale, sinks=sinks, softcap=softcap
            )
        )
    if not outs:
        return mx.zeros((0, q.shape[1], v_pages.shape[-1]), q.dtype)
    out = outs[0] if len(outs) == 1 else mx.concatenate(outs)
    return (out if work.restore is None else mx.take(out, work.restore, axis=0)).astype(q.dtype)


def serves(q: mx.array, k_pages: Pages, v_pages: Pages) -> bool:
    """Whether the kernels know these head sizes and dtypes."""
    sizes = q.shape[-1] in SIZES and v_pages.shape[-1] in SIZES
    return sizes and k_pages.dtype in DTYPES and k_pages.dtype == v_pages.dtype


def share_out(plan: AttentionPlan, group: int, kernels: frozenset[str], fast_chunks: bool) -> Work:
    """Who computes which rows of the plan. group: query heads a K/V head."""
    decode_rows, prefill_rows, rest = [], [], []
    for s, count in enumerate(plan.counts):
        if not count:
            continue
        few = count * group <= DECODE_QUERIES
        long = fast_chunks and count >= LONG_CHUNK_ROWS
        if few and "paged_decode" in kernels:
            decode_rows.append(s)
        elif not few and not long and "paged_prefill" in kernels:
            prefill_rows.append(s)
        else:
            rest.append(s)
    starts = plan.row_starts
    order = [row for s in decode_rows + prefill_rows + rest for row in range(starts[s], starts[s + 1])]
    rest_rows = order[len(order) - sum(plan.counts[s] for s in rest) :]
    in_order = list(range(plan.rows))
    return Work(
        table=_table(plan),
        decode=_tasks(plan, decode_rows, group, DECODE_QUERIES),
        prefill=_tasks(plan, prefill_rows, group, TILE_QUERIES),
        rest=_part(plan, rest) if rest else None,
        query_rows=None if rest_rows == in_order else mx.array(rest_rows, mx.int32),
        restore=None if order == in_order else mx.array(np.argsort(order).astype(np.int32)),
    )


def _table(plan: AttentionPlan) -> mx.array:
    """The page table with at least LEAST_ELEMENTS columns."""
    missing = max(0, LEAST_ELEMENTS - plan.tables.shape[1])
    return mx.array(np.pad(plan.tables, ((0, 0), (0, missing))).astype(np.int32))


def _tasks(plan: AttentionPlan, segments: list[int], group: int, queries: int) -> Tasks | None:
    """Tasks of up to `queries` (row, head) pairs each."""
    numbers, output_row = [], 0
    for s in segments:
        count, length = plan.counts[s], plan.starts[s] + plan.counts[s]
        fixed = (s, plan.row_starts[s], output_row, count, length, plan.first_pages[s])
        numbers += [(*fixed, pair, plan.window or 0) for pair in range(0, count * group, queries)]
        output_row += count
    if not numbers:
        return None
    longest = max(stop - first for first, stop in map(plan.keys, segments))
    return Tasks(mx.array(numbers, mx.int32), output_row, longest)


def _part(plan: AttentionPlan, segments: list[int]) -> AttentionPlan:
    """The plan of some of its segments."""
    return AttentionPlan(
        tuple(plan.starts[s] for s in segments),
        tuple(plan.counts[s] for s in segments),
        plan.tables[segments],
        tuple(plan.first_pages[s] for s in segments),
        plan.page_size,
        plan.window,
    )


def decode(operands: Operands, tasks: Tasks, splits: int | None = None) -> mx.array:
    """Attention of tasks of at most 8 queries: [tasks.rows, HQ, DV], in the pages' dtype."""
    kv_heads, count = operands.k.shape[2], tasks.numbers.shape[0]
    return _launch(
        "paged_decode",
        operands,
        tasks,
        splits=splits or _splits(kv_heads * count, tasks.longest),
        grid=(kv_heads * 32, count * DECODE_GROUPS),
        threadgroup=(32, DECODE_GROUPS, 1),
        template=[("GROUPS", DECODE_GROUPS)],
    )


def prefill(operands: Operands, tasks: Tasks, splits: int | None = None) -> mx.array:
    """Attention of tiles of 32 queries: [tasks.rows, HQ, DV], in the pages' dtype."""
    kv_heads, count = operands.k.shape[2], tasks.numbers.shape[0]
    sizes = operands.k.shape[3] + operands.v.shape[3]
    return _launch(
        "paged_prefill",
        operands,
        tasks,
        splits=splits or _splits(kv_heads * count, tasks.longest),
        grid=(kv_heads * TILE_THREADS, count),
        threadgroup=(TILE_THREADS, 1, 1),
        template=[("KEYS_A_BLOCK", keys_a_block(sizes, operands.k.dtype.size))],
    )


def keys_a_block(sizes: int, item_bytes: int) -> int:
    """Keys that fit a threadgroup's memory, where a key and its value have `sizes` elements together."""
    padding = 2 * 16 // item_bytes
    return next(keys for keys in (32, 16, 8) if keys * (sizes + padding) * item_bytes <= THREADGROUP_BYTES)


def _splits(threadgroups: int, keys: int) -> int:
    """Into how many shares the keys go."""
    wanted = -(-ENOUGH_THREADGROUPS // threadgroups)
    return max(1, min(wanted, keys // LEAST_KEYS_A_SPLIT))


def _launch(
    body: Body,
    operands: Operands,
    tasks: Tasks,
    *,
    splits: int,
    grid: tuple[int, int],
    threadgroup: tuple[int, int, int],
    template: list[tuple[str, Any]],
) -> mx.array:
    """One launch over the tasks, and where keys are split the one that joins the shares."""
    q, k, v = operands.q, operands.k, operands.v
    heads, size, kv_heads = q.shape[1], v.shape[3], k.shape[2]
    whole = splits == 1
    scale = operands.scale if operands.softcap else operands.scale * reference.LOG2_E
    out, top, total = _kernel(body, _form(k), _form(v))(
        inputs=[
            q,
            *_arrays(k),
            *_arrays(v),
            operands.table,
            tasks.numbers,
            _sinks(operands.sinks),
            mx.array(scale, mx.float32),
            mx.array(operands.softcap or 1.0, mx.float32),
        ],
        template=[
            ("T", q.dtype),
            ("O", q.dtype if whole else mx.float32),
            ("D", k.shape[3]),
            ("DV", size),
            ("HKV", kv_heads),
            ("G", heads // kv_heads),
            ("BS", k.shape[1]),
            ("SPLIT", not whole),
            ("CAPPED", operands.softcap is not None),
            ("SINKING", operands.sinks is not None),
            *template,
            *_packing("K", k),
            *_packing("V", v),
        ],
        grid=(*grid, splits),
        threadgroup=threadgroup,
        output_shapes=[(tasks.rows, heads, splits, size), *[(tasks.rows, heads, splits)] * 2],
        output_dtypes=[q.dtype if whole else mx.float32, mx.float32, mx.float32],
    )
    return out[:, :, 0] if whole else reduce(out, top, total, operands.sinks, q.dtype)


def reduce(
    out: mx.array, top: mx.array, total: mx.array, sinks: mx.array | None, dtype: mx.Dtype
) -> mx.array:
    """Join shares: out float32 [rows, HQ, P, DV], top and total [rows, HQ, P] -> [rows, HQ, DV] in `dtype`."""
    rows, heads, _, size = out.shape
    return _reduce_kernel()(
        inputs=[out, top, total, _sinks(sinks)],
        template=[("T", dtype), ("DV", size), ("SINKING", sinks is not None)],
        grid=(heads * 32, rows, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[(rows, heads, size)],
        output_dtypes=[dtype],
    )[0]


def _sinks(sinks: mx.array | None) -> mx.array:
    """float32, at least LEAST_ELEMENTS of them."""
    if sinks is None:
        return mx.zeros((LEAST_ELEMENTS,))
    return mx.pad(sinks.astype(mx.float32), (0, max(0, LEAST_ELEMENTS - sinks.size)))


def _form(pages: Pages) -> Form:
    return "packed" if isinstance(pages, QuantisedPages) else "plain"


def _arrays(pages: Pages) -> list[mx.array]:
    return [pages.weight, pages.scales, pages.biases] if isinstance(pages, QuantisedPages) else [pages]


def _packing(side: str, pages: Pages) -> list[tuple[str, int]]:
    if not isinstance(pages, QuantisedPages):
        return []
    return [(f"{side}_BITS", pages.bits), (f"{side}_GROUP", pages.group_size)]


@cache
def _kernel(body: Body, k: Form, v: Form) -> Any:
    """The kernel `body` for pages of these forms, made once."""
    return mx.fast.metal_kernel(
        name=f"{body}_{k}_{v}_v1",
        input_names=["q", *_names("k", k), *_names("v", v), "table", "tasks", "sinks", "scale", "softcap"],
        output_names=["out", "top", "total"],
        header=read("pages", "attention") + _loader("KEYS", "k", "D", k) + _loader("VALUES", "v", "DV", v),
        source=read(body),
    )


@cache
def _reduce_kernel() -> Any:
    return mx.fast.metal_kernel(
        name="paged_reduce_v1",
        input_names=["out", "top", "total", "sinks"],
        output_names=["result"],
        header=read("pages", "attention"),
        source=read("paged_reduce"),
    )


def _names(side: str, form: Form) -> list[str]:
    return [side] if form == "plain" else [side, f"{side}_scales", f"{side}_biases"]


def _loader(macro: str, side: str, size: str, form: Form) -> str:
    """The definition of KEYS or VALUES: the loader of the pages that a launch names `side`."""
    if form == "plain":
        return f"#define {macro} PlainPages<T, {size}>{{{side}}}\n"
    upper = side.upper()
    names = f"(const device uchar*){side}, {side}_scales, {side}_biases"
    return f"#define {macro} PackedPages<T, {size}, {upper}_BITS, {upper}_GROUP>{{{names}}}\n"


def _check(q: mx.array, k_pages: Pages, v_pages: Pages, sinks: mx.array | None) -> None:
    """Raises ValueError for operands that do not go together or that no kernel serves."""
    k, v = k_pages.shape, v_pages.shape
    if q.ndim != 3 or len(k) != 4 or len(v) != 4:
        raise ValueError(f"q must have 3 axes and pages 4, not {q.shape}, {k} and {v}")
    if k[:3] != v[:3] or q.shape[2] != k[3] or q.shape[1] % k[2]:
        raise ValueError(f"q {q.shape}, keys {k} and values {v} do not go together")
    if not serves(q, k_pages, v_pages):
        raise ValueError(f"no kernel for head sizes {k[3]} and {v[3]} in {k_pages.dtype} and {v_pages.dtype}")
    if q.dtype not in DTYPES:
        raise ValueError(f"q must be floating, not {q.dtype}")
    if sinks is not None and sinks.shape != (q.shape[1],):
        raise ValueError(f"sinks must be one a head, [{q.shape[1]}], not {sinks.shape}")
