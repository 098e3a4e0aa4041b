"""Sampling: temperature, top-k, top-p, min-p and the draw with given uniforms, a token a row.

Knows: logits, four numbers a row and one uniform a row. Does not know: requests, seeds, penalties,
grammars (whoever calls has put -inf where a token is forbidden).

**What is computed**, for a row of logits x with m = max x, in real arithmetic:

1. Tokens are ranked by decreasing logit; equal logits by increasing id. All filters cut this ranking.
2. temperature 0 takes the token of rank 0. Else a token's weight is w = exp((x - m) / temperature).
3. top_k keeps ranks below top_k; 0 keeps all. Exactly top_k tokens stay, ties or not, so 1 is greedy.
4. top_p keeps a token if the weights ranked before it sum to less than top_p times the weights that
   step 3 kept: the smallest set that reaches top_p. 1 or more keeps all; rank 0 always stays.
5. min_p keeps tokens with w >= min_p, which is relative to the most likely token (its w is 1).
6. The draw is by inverse CDF in the order of ids: the smallest kept id whose running sum of kept
   weights exceeds u times their total, u in [0, 1).
7. logprob is x[token] - log sum exp x: the model's own, before temperature and filters.

This is the order of Hugging Face's logits warpers. In float32 a sum may differ in its last bits between
implementations, so two of them agree except where a filter or u falls within rounding of a boundary.
At least one logit of a row must be finite, and none NaN or +inf.

Sources: Fan et al. 2018 (top-k), Holtzman et al. 2020 (top-p), Nguyen et al. 2024 (min-p).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np

from mlxserve.kernels_metal.source import read

KERNEL_THREADS = 1024
# Ids a span of the draw: sums within a span stay accurate where one running sum over V would lose tails.
SPAN = 256
# Largest float32 factor that makes any positive total strictly smaller.
BELOW_ONE = 1.0 - 2.0**-23


def sample_kernel(logits: mx.array, params: mx.array, u: mx.array) -> tuple[mx.array, mx.array]:
    """The module's definition in one launch; arguments and results as of `sample_reference`."""
    _check(logits, params, u)
    rows = logits.shape[0]
    token, logprob = _kernel()(
        inputs=[logits, params.astype(mx.float32), u.astype(mx.float32)],
        grid=(KERNEL_THREADS, rows, 1),
        threadgroup=(KERNEL_THREADS, 1, 1),
        output_shapes=[(rows,), (rows,)],
        output_dtypes=[mx.int32, mx.float32],
    )
    return token, logprob


@cache
def _kernel() -> Any:
    return mx.fast.metal_kernel(
        name="sample_v1",
        input_names=["logits", "params", "u"],
        output_names=["token", "logprob"],
        header=read("ranking"),
        source=read("sample"),
    )


def _check(logits: mx.array, params: mx.array, u: mx.array) -> None:
    """Raises ValueError for operands that do not go together."""
    if logits.ndim != 2 or not logits.size or not mx.issubdtype(logits.dtype, mx.floating):
        raise ValueError(f"logits must be floating [B, V], not {logits.dtype} {logits.shape}")
    rows = logits.shape[0]
    if params.shape != (rows, 4) or u.shape != (rows,):
        raise ValueError(f"{rows} rows of logits do not go with params {params.shape} and u {u.shape}")


def sample_reference(logits: mx.array, params: mx.array, u: mx.array) -> tuple[mx.array, mx.array]:
    """The module's definition in plain operations; lazy but for `params`, which is read on the host.

    logits [B, V] of any floating type; params float32 [B, 4] = (temperature, top_k, top_p, min_p);
    u float32 [B] in [0, 1). Returns token int32 [B] and logprob float32 [B].
    """
    _check(logits, params, u)
    settings = np.array(params)  # [B, 4]
    x = logits.astype(mx.float32)  # [B, V]
    token = mx.argmax(x, axis=-1)  # [B], the lowest id among equals
    if (settings[:, 0] > 0).any():
        drawn = _draw(_kept_weights(x, settings), u)  # [B]
        token = mx.where(mx.array(settings[:, 0] > 0), drawn, token)
    chosen = mx.take_along_axis(x, token[:, None], axis=-1)[:, 0]
    return token.astype(mx.int32), chosen - mx.logsumexp(x, axis=-1)


def _kept_weights(x: mx.array, settings: np.ndarray) -> mx.array:
    """Weights [B, V] with zeros for what the filters drop."""
    temperature = np.where(settings[:, 0] > 0, settings[:, 0], 1.0)
    temperature_ = mx.array(temperature[:, None])  # [B, 1]
    weights = mx.exp((x - mx.max(x, axis=-1, keepdims=True)) / temperature_)  # [B, V]
    keep = weights >= mx.array(settings[:, 3:4])
    needed = _ranks_needed(settings, x.shape[-1])
    if needed:
        keep = keep & _ranked_before_cut(x, weights, settings, needed)
    return mx.where(keep, weights, 0.0)


def _ranks_needed(settings: np.ndarray, vocabulary: int) -> int:
    """How many leading ranks decide top-k and top-p for every row; 0 if no row has either."""
    drawn = settings[:, 0] > 0
    top_k = np.where((settings[:, 1] > 0) & (settings[:, 1] < vocabulary) & drawn, settings[:, 1], 0)
    nucleus = (settings[:, 2] < 1) & drawn
    if (nucleus & (top_k == 0)).any():
        return vocabulary
    return int(top_k.max(initial=0))


def _ranked_before_cut(x: mx.array, weights: mx.array, settings: np.ndarray, needed: int) -> mx.array:
    """Mask [B, V] of the tokens that top-k and top-p keep."""
    vocabulary = x.shape[-1]
    limit = np.where(settings[:, 1] > 0, np.minimum(settings[:, 1], vocabulary), vocabulary)
    limit_ = mx.array(limit.astype(np.int32)[:, None])  # [B, 1]
    order = mx.argpartition(-x, needed - 1, axis=-1)[:, :needed] if needed < vocabulary else None
    leading = x if order is None else mx.take_along_axis(x, order, axis=-1)
    ranked = -mx.sort(-leading, axis=-1)  # [B, needed], decreasing
    temperature = np.where(settings[:, 0] > 0, settings[:, 0], 1.0)
    ranked_weights = mx.exp((ranked - ranked[:, :1]) / mx.array(temperature[:, None]))
    rank = mx.arange(needed)[None]
    within = rank < limit_
    mass = mx.where(within, ranked_weights, 0.0).sum(axis=-1, keepdims=True)  # what top-k kept
    top_p = mx.array(settings[:, 2:3])
    before = mx.cumsum(ranked_weights, axis=-1, inclusive=False)
    within = within & ((before < top_p * mass) | (top_p >= 1) | (rank == 0))
    kept = within.sum(axis=-1, keepdims=True)  # [B, 1], at least 1: the mask is a prefix
    unlimited = mx.array(((settings[:, 2] >= 1) & (limit >= vocabulary))[:, None])
    threshold = mx.take_along_axis(ranked, kept - 1, axis=-1)
    equal = x == threshold
    ties = kept - (ranked > threshold).sum(axis=-1, keepdims=True)  # how many of the equal ones stay
    return (x > threshold) | (equal & (mx.cumsum(equal.astype(mx.int32), axis=-1) <= ties)) | unlimited


def _draw(weights: mx.array, u: mx.array) -> mx.array:
    """Inverse CDF by id, [B, V] and [B] -> [B]: first the span of ids, then the id within it."""
    rows, vocabulary = weights.shape
    spans = -(-vocabulary // SPAN)
    padded = mx.pad(weights, [(0, 0), (0, spans * SPAN - vocabulary)]).reshape(rows, spans, SPAN)
    ends = mx.cumsum(padded.sum(axis=-1), axis=-1)  # [B, spans]
    target = u.astype(mx.float32)[:, None] * ends[:, -1:]
    span, before = _first_beyond(ends, target)
    inside = mx.take_along_axis(padded, span[:, :, None], axis=1)[:, 0]  # [B, SPAN]
    offset, _ = _first_beyond(mx.cumsum(inside, axis=-1), target - before)
    return (span * SPAN + offset)[:, 0]


def _first_beyond(ends: mx.array, target: mx.array) -> tuple[mx.array, mx.array]:
    """Index [B, 1] of the first of the running sums `ends` [B, n] above `target`, and the sum before it."""
    target = mx.maximum(mx.minimum(target, ends[:, -1:] * BELOW_ONE), 0.0)
    index = (ends <= target).sum(axis=-1, keepdims=True)
    starts = mx.pad(ends[:, :-1], [(0, 0), (1, 0)])
    return index, mx.take_along_axis(starts, index, axis=-1)
