"""The loss without logits against plain autograd in float32, for frozen, training and packed heads."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlxserve.lora.loss import chunked_losses, default_chunk, dpo, orpo, row_losses, sequence_sums
from mlxserve.lora.split import Split
from tests import tiny

ROWS, WIDTH, VOCABULARY = 23, 16, 50


def _arrays() -> tuple[mx.array, mx.array, mx.array, mx.array]:
    mx.random.seed(3)
    targets = mx.array(np.random.default_rng(0).integers(0, VOCABULARY, ROWS))
    return (
        mx.random.normal((ROWS, WIDTH)),
        mx.random.normal((VOCABULARY, WIDTH)),
        targets,
        mx.random.uniform(shape=(ROWS,)),
    )


def test_row_losses_against_numpy() -> None:
    hidden, weight, targets, _ = _arrays()
    logits = np.array(hidden @ weight.T).astype(np.float64)
    expected = np.log(np.exp(logits).sum(1)) - logits[np.arange(ROWS), np.array(targets)]
    np.testing.assert_allclose(np.array(row_losses(hidden @ weight.T, targets)), expected, rtol=1e-5)


@pytest.mark.parametrize("chunk", [1, 5, 23, 100])
@pytest.mark.parametrize("trains", [False, True])
def test_gradients_against_autograd(chunk: int, trains: bool) -> None:
    hidden, weight, targets, shares = _arrays()

    def plain(hidden: mx.array, weight: mx.array) -> mx.array:
        return (shares * nn.losses.cross_entropy(hidden @ weight.T, targets)).sum()

    def chunked(hidden: mx.array, weight: mx.array) -> mx.array:
        parameters = {"w": weight} if trains else {}

        def head(rows: mx.array, own: dict[str, mx.array]) -> mx.array:
            return rows @ own.get("w", frozen).T

        return (shares * chunked_losses(head, hidden, targets, parameters, chunk)).sum()

    frozen = weight
    wanted = (0, 1) if trains else (0,)
    value, gradients = mx.value_and_grad(chunked, argnums=wanted)(hidden, weight)
    expected, expected_gradients = mx.value_and_grad(plain, argnums=wanted)(hidden, weight)
    np.testing.assert_allclose(value.item(), expected.item(), rtol=1e-6)
    for mine, other in zip(gradients, expected_gradients):
        np.testing.assert_allclose(np.array(mine), np.array(other), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["llama", "gemma2", "cohere2", "granite", "qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_split_is_the_model(kind: str, checkpointing: bool) -> None:
    """Head scaling and soft caps stay in; nothing is left changed; checkpointed gradients are the plain ones."""
    model = tiny.build(kind, logits_scaling=3.0) if kind == "granite" else tiny.build(kind)
    ids = mx.array([[5, 6, 7, 8, 9], [1, 2, 3, 4, 5]])
    expected = model(ids)
    split = Split(model, checkpointing=checkpointing)
    hidden = split.hidden(ids)
    assert hidden.shape == (2, 5, 64)
    got = split.logits(hidden.reshape(10, -1)).reshape(expected.shape)
    np.testing.assert_allclose(np.array(got), np.array(expected), atol=1e-4)
    gradients = _block_gradient(model, lambda: split.hidden(ids))
    plain = _block_gradient(model, lambda: Split(model).hidden(ids))
    np.testing.assert_allclose(np.array(gradients), np.array(plain), rtol=1e-3, atol=1e-4)
    np.testing.assert_array_equal(np.array(model(ids)), np.array(expected))


def _block_gradient(model: Any, hidden: Any) -> mx.array:
    """Gradient of the first block's query weight, or of the first weight there is."""
    model.freeze()
    layer = model.layers[0].self_attn
    layer.unfreeze(recurse=False)
    name = "q_proj" if "q_proj" in layer else next(k for k in layer if k.endswith("proj"))
    layer[name].unfreeze(recurse=False)
    before = layer[name].weight

    def loss(weight: mx.array) -> mx.array:
        layer[name].weight = weight
        return (hidden() ** 2).mean()

    gradient = mx.grad(loss)(before)
    layer[name].weight = before
    return gradient


def test_checkpointing_changes_no_class() -> None:
    model = tiny.build("llama")
    before = type(model.layers[0]).__call__
    Split(model, checkpointing=True).hidden(mx.array([[1, 2]]))
    assert type(model.layers[0]).__call__ is before
    assert type(model.layers[0]).__name__ == "TransformerBlock"


def test_chunks_bound_memory() -> None:
    """Peak memory grows with the chunk, not with the number of rows."""
    vocabulary, width = 4096, 32
    weight = mx.random.normal((vocabulary, width))

    def peak(rows: int) -> int:
        hidden, targets = mx.random.normal((rows, width)), mx.zeros(rows, mx.int32)
        mx.eval(hidden, targets, weight)

        def loss(hidden: mx.array) -> mx.array:
            return chunked_losses(lambda r, _: r @ weight.T, hidden, targets, {}, 32).sum()

        start = mx.get_active_memory()
        mx.reset_peak_memory()
        mx.eval(mx.grad(loss)(hidden))
        return mx.get_peak_memory() - start

    few, many = peak(64), peak(1024)
    assert many < 2 * few + 4 * 1024 * width * 4
    assert many < 1024 * vocabulary * 4  # not even one array of all logits


def test_dpo_against_the_paper() -> None:
    logps, reference = np.array([-3.0, -5.0, -4.0, -4.5]), np.array([-3.5, -5.0, -3.0, -4.0])
    ratios = (logps - reference)[:2] - (logps - reference)[2:]
    expected = -np.log(1 / (1 + np.exp(-0.3 * ratios)))
    losses, margins = dpo(mx.array(logps), mx.array(reference), 0.3)
    np.testing.assert_allclose(np.array(losses), expected, rtol=1e-5)
    np.testing.assert_allclose(np.array(margins), 0.3 * ratios, rtol=1e-5)


def test_orpo_against_the_paper() -> None:
    logps, counts = np.array([-3.0, -5.0, -4.0, -9.0]), np.array([3.0, 4.0, 2.0, 3.0])
    p = np.exp(logps / counts)
    ratio = np.log((p / (1 - p))[:2] / (p / (1 - p))[2:])
    expected = -np.log(p[:2]) - 0.2 * np.log(1 / (1 + np.exp(-ratio)))
    losses, found = orpo(mx.array(logps), mx.array(counts), 0.2)
    np.testing.assert_allclose(np.array(losses), expected, rtol=1e-5)
    np.testing.assert_allclose(np.array(found), ratio, rtol=1e-4)


def test_sequence_sums() -> None:
    sums = sequence_sums(mx.array([1.0, 2.0, 4.0]), np.array([0, 2, 2]), 3)
    assert sums.tolist() == [1.0, 0.0, 6.0]


def test_chunks_suit_the_vocabulary() -> None:
    assert default_chunk(288) == 1024
    assert default_chunk(152_000) * 152_000 * 4 <= 64 * 2**20
