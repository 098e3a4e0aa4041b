"""Sums over all ranks in their cheaper form.

A ring adds up in 2 (n - 1) hops of 1/n of the bytes each: few bytes, many hops. Gathering every rank's part
and adding locally takes n - 1 hops of all the bytes: with a few hundred KB, as a decoding step has them, the
hops are what costs. Which form is faster up to which size is measured once, on the connection there is.

Knows: MLX's collectives. Does not know layers: definitions call `mx.distributed.all_sum` by name, so that
name is what is exchanged.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx

# Sizes at which both forms are tried, in bytes.
SIZES = (4 * 1024, 32 * 1024, 256 * 1024, 2 * 1024 * 1024)
_TRIES = 4


def gather_sum(x: mx.array, group: mx.distributed.Group, stream: Any = None) -> mx.array:
    """The sum of every rank's `x`, gathered and added here; the same bits on every rank."""
    parts = mx.distributed.all_gather(x[None], group=group, stream=stream)  # (n, …)
    return parts.sum(axis=0).astype(x.dtype)


def prepare(group: mx.distributed.Group | None, gathered_bytes: int | None) -> None:
    """Choose the cheaper form for `group`, if there is one; every rank calls it at once."""
    if group is not None:
        install(cheaper_up_to(group) if gathered_bytes is None else gathered_bytes)


def install(gathered_bytes: int) -> None:
    """Sums of up to `gathered_bytes` bytes are gathered from now on, in this process; 0 undoes it."""
    original = _original()
    mx.distributed.all_sum = _choosing(original, gathered_bytes) if gathered_bytes else original


def _original() -> Any:
    return getattr(mx.distributed.all_sum, "original", mx.distributed.all_sum)


def _choosing(original: Any, gathered_bytes: int) -> Any:
    def all_sum(x: mx.array, *, group: Any = None, stream: Any = None) -> mx.array:
        if group is None or x.nbytes > gathered_bytes:
            return original(x, group=group, stream=stream)
        return gather_sum(x, group, stream)

    all_sum.original = original  # type: ignore[attr-defined]
    return all_sum


def cheaper_up_to(group: mx.distributed.Group) -> int:
    """Bytes up to which gathering is the faster form; every rank calls it at once and gets rank 0's answer."""
    ring, faster = _original(), []
    for size in SIZES:
        x = mx.zeros(size // 4)
        faster.append(_best_s(gather_sum, x, group) < _best_s(ring, x, group))
    below = faster.index(False) if False in faster else len(SIZES)  # a larger size never makes up for it
    mine = SIZES[below - 1] if below and group.rank() == 0 else 0
    return int(ring(mx.array(mine), group=group).item())


def _best_s(form: Callable[..., mx.array], x: mx.array, group: mx.distributed.Group) -> float:
    best_s = float("inf")
    for _ in range(_TRIES):
        start = time.perf_counter()
        mx.eval(form(x, group=group))
        best_s = min(best_s, time.perf_counter() - start)
    return best_s
