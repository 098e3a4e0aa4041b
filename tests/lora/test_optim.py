"""Schedules, clipping, groups, AdamW beside NumPy, and states that come back."""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxserve.lora.config import from_dict
from mlxserve.lora.optim import Optimizer, clip_by_norm, schedule


def _rates(total: int, **train: Any) -> list[float]:
    rate = schedule(from_dict({"train": {"lr": 1.0, **train}}).train, total)
    return [rate(step) for step in range(total)]


def test_warmup_reaches_the_rate_and_starts_above_zero() -> None:
    assert _rates(10, warmup=4, schedule="constant")[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert _rates(10, warmup=0.2, schedule="constant")[:3] == [0.5, 1.0, 1.0]


def test_shapes_of_schedules() -> None:
    assert _rates(4, warmup=0, schedule="linear") == [1.0, 0.75, 0.5, 0.25]
    cosine = [(1 + math.cos(math.pi * i / 4)) / 2 for i in range(4)]
    assert _rates(4, warmup=0, schedule="cosine") == pytest.approx(cosine)
    assert min(_rates(50, warmup=0, schedule="cosine", min_lr_ratio=0.1)) >= 0.1


def test_clipping_against_numpy() -> None:
    draw = np.random.default_rng(0)
    arrays = {name: draw.normal(size=(5, 3)) for name in "ab"}
    norm = math.sqrt(sum((value**2).sum() for value in arrays.values()))
    clipped, found = clip_by_norm({name: mx.array(value) for name, value in arrays.items()}, 1.0)
    assert found.item() == pytest.approx(norm, rel=1e-5)
    for name, value in arrays.items():
        np.testing.assert_allclose(np.array(clipped[name]), value / norm, rtol=1e-4)
    same, _ = clip_by_norm({"a": mx.ones(3)}, 0)
    assert same["a"].tolist() == [1, 1, 1]


def _adamw(values: np.ndarray, gradients: list[np.ndarray], rate: float) -> np.ndarray:
    m, v, w = np.zeros_like(values), np.zeros_like(values), values.copy()
    for step, g in enumerate(gradients, 1):
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        w -= rate * (m / (1 - 0.9**step)) / (np.sqrt(v / (1 - 0.999**step)) + 1e-8)
    return w


def test_adamw_against_numpy() -> None:
    """Gradients over six orders of magnitude."""
    draw = np.random.default_rng(1)
    scales = 10.0 ** draw.uniform(-6, 0, (40, 20))
    gradients = [draw.normal(size=(40, 20)) * scales for _ in range(10)]
    start = draw.normal(size=(40, 20))
    values = {"x.lora_a": mx.array(start.astype(np.float32))}
    optimizer = Optimizer(from_dict({"train": {"optimizer": "adamw"}}), values)
    for gradient in gradients:
        values = optimizer.apply(values, {"x.lora_a": mx.array(gradient.astype(np.float32))}, 0.01)
    moved = _adamw(start, gradients, 0.01) - start
    error = np.linalg.norm(np.array(values["x.lora_a"]) - start - moved) / np.linalg.norm(moved)
    assert error < 1e-5


def test_lora_plus_moves_b_faster() -> None:
    """Adam's first step is the learning rate itself, whatever the gradient."""
    values = {"l.lora_a": mx.zeros((4, 4)), "l.lora_b": mx.zeros((4, 4))}
    optimizer = Optimizer(from_dict({"lora": {"plus_ratio": 8}}), values)
    new = optimizer.apply(values, {name: mx.ones((4, 4)) for name in values}, 0.01)
    assert new["l.lora_a"][0, 0].item() == pytest.approx(-0.01, rel=1e-3)
    assert new["l.lora_b"][0, 0].item() == pytest.approx(-0.08, rel=1e-3)


@pytest.mark.parametrize("name", ["adamw", "adamw8bit", "lion", "muon", "adafactor"])
def test_state_comes_back(name: str) -> None:
    mx.random.seed(0)
    config = from_dict({"train": {"optimizer": name}, "lora": {"plus_ratio": 2}})
    values = {"l.lora_a": mx.random.normal((96, 48)), "l.lora_b": mx.random.normal((4, 8)), "l.m": mx.ones(8)}
    gradients = {key: mx.random.normal(value.shape) for key, value in values.items()}
    one = Optimizer(config, values)
    middle = one.apply(values, gradients, 0.1)
    other = Optimizer(config, values)
    other.restore({key: mx.array(np.array(value)) for key, value in one.state().items()})
    first, second = one.apply(middle, gradients, 0.1), other.apply(middle, gradients, 0.1)
    for key in values:
        np.testing.assert_array_equal(np.array(first[key]), np.array(second[key]))
    with pytest.raises(KeyError):
        other.restore({"x": mx.zeros(1)})
