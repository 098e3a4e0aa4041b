"""The definition of `sample` in NumPy, row by row: what a CPU runs.

Knows: the steps that `sample`'s docstring lists. MLX's CPU backend takes about ten times NumPy's time
for exp and sort (1.2 ms and 4.7 ms a row of 49,152 logits), and there is no device to keep busy by being
lazy; so here the logits are awaited and sums are float64.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np


def sample_on_host(logits: mx.array, params: mx.array, u: mx.array) -> tuple[mx.array, mx.array]:
    """As `sample_reference`, with its arguments and results; evaluates `logits`."""
    rows = np.array(logits.astype(mx.float32))  # [B, V]
    tokens = np.empty(len(rows), np.int32)
    logprobs = np.empty(len(rows), np.float32)
    for i, (row, settings, draw) in enumerate(zip(rows, np.array(params), np.array(u))):
        temperature, top_k, top_p, min_p = map(float, settings)
        tokens[i] = _token(row, temperature, top_k, top_p, min_p, float(draw))
        logprobs[i] = _logprob(row, int(tokens[i]))
    return mx.array(tokens), mx.array(logprobs)


def _logprob(x: np.ndarray, token: int) -> float:
    top = x.max()
    return float(x[token] - top) - float(np.log(np.exp(x - top).sum(dtype=np.float64)))


def _token(x: np.ndarray, temperature: float, top_k: float, top_p: float, min_p: float, u: float) -> int:
    if temperature <= 0:
        return int(x.argmax())
    ids = leading_ids(x, int(top_k)) if 0 < top_k < len(x) else np.arange(len(x))
    weights = np.exp((x[ids] - x.max()) / np.float32(temperature))
    if top_p < 1:
        ranked = -np.sort(-weights)
        before = np.cumsum(ranked, dtype=np.float64) - ranked
        inside = leading_ids(x[ids], max(1, int((before < top_p * (before[-1] + ranked[-1])).sum())))
        ids, weights = ids[inside], weights[inside]
    if min_p > 0:
        ids, weights = ids[weights >= min_p], weights[weights >= min_p]
    ends = np.cumsum(weights, dtype=np.float64)
    return int(ids[min(np.searchsorted(ends, u * ends[-1], side="right"), len(ids) - 1)])


def leading_ids(x: np.ndarray, count: int) -> np.ndarray:
    """The `count` leading ids of x [n], in increasing order; among equal values the lower ids lead."""
    if count >= len(x):
        return np.arange(len(x))
    threshold = np.partition(x, len(x) - count)[len(x) - count]
    ids = np.flatnonzero(x >= threshold)
    equal = np.flatnonzero(x[ids] == threshold)
    return np.delete(ids, equal[len(equal) - (len(ids) - count) :])
