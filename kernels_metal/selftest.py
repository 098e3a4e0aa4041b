"""Every kernel beside its reference, at sizes for a check or for a measurement: what `kernels selftest` runs.

Knows: operands, the least bytes and the operations of each launch, and what MLX itself has for the same.
Does not know: how a case is executed (directly on Metal, or by a harness elsewhere) or printed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from mlxserve.kernels_metal import gguf_blocks, gguf_reference, moe, reference
from mlxserve.kernels_metal import paged_attention as paged
from mlxserve.kernels_metal import sample as sampling
from mlxserve.kernels_metal.experts import AffineExperts
from mlxserve.kernels_metal.gguf_formats import FORMATS
from mlxserve.kernels_metal.plan import AttentionPlan, Pages, QuantisedPages

Call = Callable[..., Any]
PAGE_SIZE = 16
# Of the largest value: two units in the last place of the dtype.
TOLERANCE = {mx.float32: 2e-5, mx.float16: 4e-3, mx.bfloat16: 3e-2}


@dataclass(frozen=True, eq=False)
class Case:
    """`kernel` is the switch's name. kernel_call and reference_call take `operands`; own_call is MLX's own way.

    least_bytes: weights or keys and values, read once. operations: multiplications and additions.
    """

    kernel: str
    label: str
    operands: tuple[Any, ...]
    kernel_call: Call
    reference_call: Call
    least_bytes: int
    operations: int
    own_call: Call | None = None


@dataclass(frozen=True)
class Timing:
    """Seconds of a launch, and what that is of work."""

    seconds: float
    gigabytes_per_s: float
    teraflops: float


def cases(large: bool, kernels: frozenset[str]) -> Iterator[Case]:
    """The cases of the kernels named. large: worth measuring on a GPU; else a fraction of a second on a CPU."""
    for name, build in (
        ("paged_decode", _decode_cases),
        ("paged_prefill", _prefill_cases),
        ("gguf", _gguf_cases),
        ("moe", _moe_cases),
        ("sample", _sample_cases),
    ):
        if name in kernels:
            yield from build(large)


def error(ours: list[np.ndarray], right: list[np.ndarray]) -> float:
    """The largest difference, of the largest value; for integers, the share that differs."""
    return max(_error_of_one(a, b) for a, b in zip(ours, right, strict=True))


def _error_of_one(ours: np.ndarray, right: np.ndarray) -> float:
    if np.issubdtype(right.dtype, np.integer):
        return float((ours != right).mean())
    if not np.isfinite(ours).all():
        return float("inf")
    return float(np.abs(ours - right).max() / max(np.abs(right).max(), 1e-30))


def tolerance(case: Case) -> float:
    """What `error` may be."""
    dtypes = [operand.dtype for operand in case.operands if isinstance(operand, mx.array)]
    return next(TOLERANCE[dtype] for dtype in dtypes if dtype in TOLERANCE)


def arrays(outputs: Any) -> list[np.ndarray]:
    """What a call returned, as NumPy arrays."""
    given = outputs if isinstance(outputs, (list, tuple)) else [outputs]
    return [np.array(out.astype(mx.float32) if out.dtype == mx.bfloat16 else out) for out in given]


def measure(case: Case, call: Call) -> Timing:
    """Time of one call among many in a row, on the default device."""
    seconds = _seconds(lambda: call(*case.operands))
    return Timing(seconds, case.least_bytes / seconds / 1e9, case.operations / seconds / 1e12)


def bandwidth() -> float:
    """GB/s of this device: what copying a large array reads and writes."""
    source = mx.ones((64 * 1024 * 1024,))  # 256 MiB
    mx.eval(source)
    return 2 * source.nbytes / _seconds(lambda: source + 1.0) / 1e9


def _seconds(call: Callable[[], Any], least_s: float = 0.2) -> float:
    """Seconds a call, from runs of growing length until one takes `least_s`."""
    mx.eval(call())
    repeats = 1
    while True:
        start = time.perf_counter()
        mx.eval([call() for _ in range(repeats)])
        elapsed = time.perf_counter() - start
        if elapsed >= least_s or repeats >= 1024:
            return elapsed / repeats
        repeats *= 4


# ---- attention


def _decode_cases(large: bool) -> Iterator[Case]:
    shape = (32, 8, 128) if large else (4, 2, 64)
    for lengths in ([8192], [2048] * 16) if large else ([70, 1, 33],):
        for bits in (16, 8, 4):
            yield _attention("paged_decode", lengths, [1] * len(lengths), shape, bits)


def _prefill_cases(large: bool) -> Iterator[Case]:
    shape = (32, 8, 128) if large else (4, 2, 64)
    for length, count in ((2048, 128), (8192, 8)) if large else ((60, 20),):
        for bits in (16, 8, 4):
            yield _attention("paged_prefill", [length], [count], shape, bits)


def _attention(
    kernel: str, lengths: list[int], counts: list[int], shape: tuple[int, int, int], bits: int
) -> Case:
    """Sequences of `lengths` keys whose last `counts` rows ask; shape: heads, K/V heads, head size."""
    heads, kv_heads, size = shape
    plan = _plan(lengths, counts)
    rng = np.random.default_rng(0)
    q = mx.array(rng.standard_normal((plan.rows, heads, size)).astype(np.float32)).astype(mx.bfloat16)
    pool = (int(plan.tables.max()) + 1, PAGE_SIZE, kv_heads, size)
    plain = [mx.array(rng.standard_normal(pool).astype(np.float32)).astype(mx.bfloat16) for _ in range(2)]
    k, v = plain if bits == 16 else (_packed(pages, bits) for pages in plain)
    scale = size**-0.5
    slots = pool[0] * PAGE_SIZE
    scores = sum(length * count for length, count in zip(lengths, counts, strict=True)) * heads
    return Case(
        kernel,
        f"{'bfloat16' if bits == 16 else f'{bits} bits'}, {len(lengths)} x {lengths[0]} keys, {counts[0]} rows",
        (q, k, v, plan),
        lambda *operands: paged.paged_attention(*operands, scale=scale),
        lambda *operands: reference.paged_attention(*operands, scale=scale),
        least_bytes=sum(part.nbytes for part in (*_parts(k), *_parts(v))) // slots * sum(lengths),
        operations=scores * size * 4,
        own_call=_contiguous_attention(q, plain, lengths, bits, scale),
    )


def _contiguous_attention(
    q: mx.array, pages: list[mx.array], lengths: list[int], bits: int, scale: float
) -> Call | None:
    """MLX's own way with as many keys that lie in order, without pages; None for ragged lengths."""
    batch, keys = len(lengths), lengths[0]
    if set(lengths) != {keys}:
        return None
    rows = q.reshape(batch, -1, *q.shape[1:]).swapaxes(1, 2)  # [B, HQ, rows, D]
    kv_heads, size = pages[0].shape[2:]
    k, v = (
        mx.contiguous(part.reshape(-1, kv_heads, size)[: batch * keys].reshape(batch, keys, kv_heads, size))
        for part in pages
    )
    k, v = (mx.contiguous(part.swapaxes(1, 2)) for part in (k, v))  # [B, HKV, keys, D]
    if bits == 16:
        return lambda *_: mx.fast.scaled_dot_product_attention(rows, k, v, scale=scale)
    return _packed_attention(rows.reshape(batch, kv_heads, -1, *rows.shape[2:]) * scale, k, v, bits)


def _packed_attention(q: mx.array, k: mx.array, v: mx.array, bits: int) -> Call:
    """Two quantised products around a softmax. q [B, HKV, G, rows, D], scaled; k and v [B, HKV, keys, D]."""
    form: dict[str, Any] = {"group_size": 32, "bits": bits}
    k_words, k_scales, k_biases = (part[:, :, None] for part in mx.quantize(k, **form))
    v_words, v_scales, v_biases = (part[:, :, None] for part in mx.quantize(v, **form))

    def attend(*_: Any) -> mx.array:
        scores = mx.quantized_matmul(q, k_words, k_scales, k_biases, transpose=True, **form)
        weights = mx.softmax(scores, axis=-1, precise=True)
        return mx.quantized_matmul(weights, v_words, v_scales, v_biases, transpose=False, **form)

    return attend


def _parts(pages: Pages) -> list[mx.array]:
    return [pages.weight, pages.scales, pages.biases] if isinstance(pages, QuantisedPages) else [pages]


def _plan(lengths: list[int], counts: list[int]) -> AttentionPlan:
    """Sequences of so many keys, of which the last rows ask, on pages in random order."""
    pages = [-(-length // PAGE_SIZE) for length in lengths]
    ids = np.random.default_rng(1).permutation(sum(pages)).astype(np.int32)
    tables = np.zeros((len(pages), max(pages)), np.int32)
    used = 0
    for s, count in enumerate(pages):
        tables[s, :count] = ids[used : used + count]
        used += count
    starts = tuple(length - count for length, count in zip(lengths, counts, strict=True))
    return AttentionPlan(starts, tuple(counts), tables, (0,) * len(pages), PAGE_SIZE)


def _packed(pages: mx.array, bits: int) -> QuantisedPages:
    words, scales, biases = mx.quantize(pages, group_size=32, bits=bits)
    return QuantisedPages(words, scales, biases, bits, 32)


# ---- products


def _gguf_cases(large: bool) -> Iterator[Case]:
    rows, columns = (4096, 4096) if large else (13, 512)
    kinds = FORMATS if large else ("Q4_K", "Q6_K", "Q8_0", "IQ4_XS")
    for kind in kinds:
        for vectors in (1, 8, 512) if large else (1, 9):
            yield _gguf(kind, rows, columns, vectors)


def _gguf(kind: str, rows: int, columns: int, vectors: int) -> Case:
    blocks = _blocks(kind, (rows,), columns)
    x = mx.random.normal((vectors, columns), key=mx.random.key(2)).astype(mx.float16)
    weights = mx.random.normal((rows, columns), key=mx.random.key(3)).astype(mx.float16)
    packed = mx.quantize(weights, group_size=32, bits=8 if kind == "Q8_0" else 4)

    def own(x: mx.array, blocks: mx.array) -> mx.array:
        bits = 8 if kind == "Q8_0" else 4
        return mx.quantized_matmul(x, *packed, transpose=True, group_size=32, bits=bits)

    return Case(
        "gguf",
        f"{kind}, {rows} x {columns}, {vectors} vectors",
        (x, blocks),
        lambda x, blocks: gguf_blocks.matmul(x, blocks, kind),
        lambda x, blocks: gguf_reference.matmul(x, blocks, kind),
        least_bytes=blocks.nbytes,
        operations=2 * rows * columns * vectors,
        own_call=own,
    )


def _blocks(kind: str, outer: tuple[int, ...], columns: int) -> mx.array:
    """Random blocks: any codes, and float16 numbers of moderate size where a block keeps its scales."""
    layout = FORMATS[kind]
    rng = np.random.default_rng(4)
    blocks = rng.integers(0, 256, (*outer, columns // layout.weights, layout.size_bytes), dtype=np.uint8)
    # Scales are float16 at even offsets: with the high byte below 0x20 they are positive and below 2^-7.
    blocks[..., 1::2] &= 0x1F
    return mx.array(blocks.reshape(*outer, layout.row_bytes(columns)))


def _moe_cases(large: bool) -> Iterator[Case]:
    experts, hidden, inner = (64, 2048, 1024) if large else (5, 192, 64)
    for tokens in (1, 4) if large else (3,):
        yield from _moe(experts, hidden, inner, tokens, chosen=8 if large else 2)


def _moe(experts: int, hidden: int, inner: int, tokens: int, chosen: int) -> Iterator[Case]:
    gate, up, down = (
        _affine((experts, *shape), seed)
        for seed, shape in enumerate([(inner, hidden)] * 2 + [(hidden, inner)])
    )
    x = mx.random.normal((tokens, hidden), key=mx.random.key(5)).astype(mx.float16) / 8
    h = mx.random.normal((tokens, chosen, inner), key=mx.random.key(6)).astype(mx.float16) / 8
    rng = np.random.default_rng(7)
    indices = mx.array(np.stack([rng.permutation(experts)[:chosen] for _ in range(tokens)]))
    scores = mx.softmax(mx.random.normal((tokens, chosen), key=mx.random.key(8)), axis=-1)
    label = f"{experts} experts, 4 bits, {tokens} tokens x {chosen}"
    pairs, expert_bytes = tokens * chosen, down.words.nbytes // experts * 5 // 4
    operations = 2 * pairs * inner * hidden
    yield Case(
        "moe",
        f"gate and up of {label}",
        (x, indices, gate, up),
        moe.gate_up,
        lambda x, *rest: moe.gate_up_reference(x.astype(mx.float32), *rest),
        least_bytes=2 * pairs * expert_bytes,
        operations=2 * operations,
        own_call=moe.gate_up_reference,
    )
    yield Case(
        "moe",
        f"down of {label}",
        (h, indices, scores, down),
        moe.down,
        lambda h, *rest: moe.down_reference(h.astype(mx.float32), *rest),
        least_bytes=pairs * expert_bytes,
        operations=operations,
        own_call=moe.down_reference,
    )


def _affine(shape: tuple[int, int, int], seed: int) -> AffineExperts:
    weights = mx.random.normal(shape, key=mx.random.key(seed)).astype(mx.float16)
    return AffineExperts(*mx.quantize(weights, group_size=32, bits=4), group_size=32, bits=4)


# ---- sampling


def _sample_cases(large: bool) -> Iterator[Case]:
    vocabulary, rows = (151_936, 8) if large else (3000, 3)
    logits = mx.random.normal((rows, vocabulary), key=mx.random.key(9)) * 3
    u = mx.random.uniform(shape=(rows,), key=mx.random.key(10))
    for label, row in (
        ("greedy", [0, 0, 1, 0]),
        ("temperature alone", [0.8, 0, 1, 0]),
        ("top-k 40, top-p 0.9, min-p 0.05", [0.8, 40, 0.9, 0.05]),
    ):
        yield Case(
            "sample",
            f"{label}, {rows} x {vocabulary}",
            (logits, mx.array([row] * rows, mx.float32), u),
            sampling.sample_kernel,
            sampling.sample_reference,
            least_bytes=logits.nbytes,
            operations=0,
        )
