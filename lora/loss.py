"""Losses without logits: cross-entropy of chosen rows in chunks, and preference losses on top of it.

Knows: hidden states, targets, a function from hidden rows to logits. Does not know batches, text or steps.

The full logits of a batch and their gradients would be its largest arrays by far. Here a chunk of rows goes
through the head, gives its loss and its gradient, and is let go. Chunks are chained with mx.depends, or MLX
would compute them all at once.

Sources: DPO arXiv:2305.18290, ORPO arXiv:2403.07691.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np

Head = Callable[[mx.array, dict[str, mx.array]], mx.array]


def row_losses(logits: mx.array, targets: mx.array) -> mx.array:
    """Cross-entropy in float32 of each row: logits (N, V), targets (N,) -> (N,)."""
    logits = logits.astype(mx.float32)
    chosen = mx.take_along_axis(logits, targets[:, None], axis=-1)[:, 0]
    return mx.logsumexp(logits, axis=-1) - chosen


def chunked_losses(
    head: Head, hidden: mx.array, targets: mx.array, parameters: dict[str, mx.array], chunk: int
) -> mx.array:
    """Cross-entropy (N,) of hidden (N, H), differentiable in hidden and in `parameters`.

    With a frozen head the forward pass already computes each row's gradient, and the backward pass only
    scales it. A head that trains needs its rows' weights first, so there the backward pass computes again.
    """
    names = sorted(parameters)
    values = [parameters[name] for name in names]

    def losses_of(rows: mx.array, wanted: mx.array, *weights: mx.array) -> mx.array:
        return row_losses(head(rows, dict(zip(names, weights))), wanted)

    if not names:
        return _frozen_head(losses_of, chunk)(hidden, targets)[0]
    return _training_head(losses_of, chunk)(hidden, targets, *values)


def _frozen_head(losses_of: Callable[..., mx.array], chunk: int) -> Callable[..., Any]:
    @mx.custom_function
    def run(hidden: mx.array, targets: mx.array) -> tuple[mx.array, mx.array]:
        losses: list[mx.array] = []
        gradients: list[mx.array] = []
        for rows, wanted in _chained(hidden, targets, chunk, lambda: [losses[-1], gradients[-1]]):
            loss, gradient = mx.vjp(
                lambda r, w=wanted: losses_of(r, w), [rows], [mx.ones(rows.shape[0], mx.float32)]
            )
            losses.append(loss[0])
            gradients.append(gradient[0])
        return mx.concatenate(losses), mx.concatenate(gradients)

    @run.vjp
    def run_vjp(primals: Any, cotangents: Any, outputs: Any) -> Any:
        scaled = outputs[1] * cotangents[0][:, None].astype(outputs[1].dtype)
        return scaled, mx.zeros_like(primals[1])

    return run


def _training_head(losses_of: Callable[..., mx.array], chunk: int) -> Callable[..., Any]:
    @mx.custom_function
    def run(hidden: mx.array, targets: mx.array, *weights: mx.array) -> mx.array:
        losses: list[mx.array] = []
        for rows, wanted in _chained(hidden, targets, chunk, lambda: [losses[-1]]):
            losses.append(losses_of(rows, wanted, *weights))
        return mx.concatenate(losses)

    @run.vjp
    def run_vjp(primals: Any, cotangent: mx.array, _: mx.array) -> Any:
        hidden, targets, *weights = primals
        gradients: list[mx.array] = []
        sums = [mx.zeros_like(weight) for weight in weights]
        start = 0
        for rows, wanted in _chained(hidden, targets, chunk, lambda: [gradients[-1], *sums]):
            part = cotangent[start : start + rows.shape[0]]
            start += rows.shape[0]
            found = mx.vjp(lambda r, *w, t=wanted: losses_of(r, t, *w), [rows, *weights], [part])[1]
            gradients.append(found[0])
            sums[:] = [total + more for total, more in zip(sums, found[1:])]
        return mx.concatenate(gradients), mx.zeros_like(targets), *sums

    return run


def _chained(hidden: mx.array, targets: mx.array, chunk: int, done: Callable[[], list[mx.array]]) -> Any:
    """(rows, targets) of each chunk; each waits for what the one before it gave."""
    for start in range(0, hidden.shape[0], chunk):
        rows = hidden[start : start + chunk]
        if start:
            (rows,) = mx.depends([rows], done())
        yield rows, targets[start : start + chunk]


def sequence_sums(values: mx.array, owners: np.ndarray | mx.array, sequences: int) -> mx.array:
    """(N,) values added up by owner -> (sequences,)."""
    return mx.zeros(sequences, values.dtype).at[mx.array(owners)].add(values)


def dpo(logps: mx.array, reference: mx.array, beta: float) -> tuple[mx.array, mx.array]:
    """(losses (P,), margins (P,)) from summed log-probabilities (2P,), the chosen ones first."""
    pairs = logps.shape[0] // 2
    gains = logps - reference
    margins = beta * (gains[:pairs] - gains[pairs:])
    return mx.logaddexp(0.0, -margins), margins


def orpo(logps: mx.array, counts: mx.array, beta: float) -> tuple[mx.array, mx.array]:
    """(losses (P,), log odds ratios (P,)) from summed log-probabilities and token counts, both (2P,)."""
    pairs = logps.shape[0] // 2
    means = logps / counts
    # log odds = log p - log(1 - p); p < 1 since a mean log-probability is below 0
    odds = means - mx.log1p(-mx.exp(mx.minimum(means, -1e-6)))
    ratio = odds[:pairs] - odds[pairs:]
    return -means[:pairs] + beta * mx.logaddexp(0.0, -ratio), ratio


def default_chunk(vocabulary: int) -> int:
    """Rows a chunk: about 32 MB of float32 logits, so that a product is large and its buffers are small."""
    return int(np.clip(2 ** int(np.log2(max(1, 2**23 // vocabulary))), 32, 1024))
