"""Adapted layers against NumPy in float64, and frozen packed layers against plain ones."""

from __future__ import annotations

import re
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlxserve.errors import UsageError
from mlxserve.lora.config import LoraConfig
from mlxserve.lora.layers import (
    OnDemandEmbedding,
    OnDemandLinear,
    adapt,
    adapted_layers,
    add_adapters,
    base_only,
    dense_weight,
    find_targets,
)
from mlxserve.models.definitions import import_definition
from tests import tiny


def _linear(inputs: int, outputs: int, bias: bool = True) -> nn.Linear:
    mx.random.seed(1)
    return nn.Linear(inputs, outputs, bias=bias)


def _filled(layer: Any) -> Any:
    mx.random.seed(2)
    layer.lora_b = 0.1 * mx.random.normal(layer.lora_b.shape)
    layer.eval()
    return layer


def _np(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32)).astype(np.float64)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_forward_is_the_formula(kind: str, bias: bool) -> None:
    layer = _filled(adapt(_linear(8, 12, bias), kind, 4, 1.5))
    x = mx.random.normal((3, 5, 8))
    if kind == "dora":
        layer.m = layer.m * 1.25
    a, b, w = _np(layer.lora_a), _np(layer.lora_b), _np(layer.linear.weight)
    merged = w + 1.5 * (a @ b).T
    if kind == "dora":
        merged = _np(layer.m)[:, None] * merged / np.linalg.norm(merged, axis=1, keepdims=True)
    expected = _np(x) @ merged.T + (_np(layer.linear.bias) if bias else 0)
    np.testing.assert_allclose(_np(layer(x)), expected, atol=1e-5)
    np.testing.assert_allclose(_np(layer.merged()), merged, atol=1e-6)


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_starts_as_the_base(kind: str) -> None:
    base = _linear(8, 12)
    x = mx.random.normal((5, 8))
    np.testing.assert_allclose(_np(adapt(base, kind, 4, 2.0)(x)), _np(base(x)), atol=1e-5)


def test_masters_are_float32_and_activations_keep_their_dtype() -> None:
    """Fault 8 of mlx-lm: its float32 adapters promote bfloat16 activations inside the layer."""
    base = _linear(8, 12)
    base.set_dtype(mx.bfloat16)
    for kind in ("lora", "dora"):
        layer = adapt(base, kind, 4, 2.0)
        assert layer.lora_a.dtype == layer.lora_b.dtype == mx.float32
        assert layer._update(mx.ones((2, 8), mx.bfloat16)).dtype == mx.bfloat16
        assert layer(mx.ones((2, 8), mx.bfloat16)).dtype == mx.bfloat16


def test_only_adapters_train() -> None:
    model = tiny.build("llama")
    add_adapters(model, LoraConfig(rank=2, type="dora", targets=["q_proj"], layers=2))
    names = {name for name, _ in tree_flatten(model.trainable_parameters())}
    leaves = ("lora_a", "lora_b", "m")
    assert names == {f"model.layers.{i}.self_attn.q_proj.{leaf}" for i in (1, 2) for leaf in leaves}


def test_experts_against_each_expert_alone() -> None:
    switch = import_definition("switch_layers")
    mx.random.seed(0)
    layer = _filled(adapt(switch.SwitchLinear(8, 6, 4), "lora", 2, 0.5))
    x, indices = mx.random.normal((7, 1, 1, 8)), mx.array(np.random.default_rng(0).integers(0, 4, (7, 2)))
    weights = _np(layer.linear.weight) + 0.5 * _np(layer.lora_b) @ _np(layer.lora_a)
    got = _np(layer(x, indices))
    for row in range(7):
        for place in range(2):
            expert = int(indices[row, place])
            expected = weights[expert] @ _np(x)[row, 0, 0] + _np(layer.linear.bias)[expert]
            np.testing.assert_allclose(got[row, place, 0], expected, atol=1e-5)
    with pytest.raises(UsageError, match="DoRA"):
        adapt(switch.SwitchLinear(8, 6, 4), "dora", 2, 0.5)


@pytest.mark.parametrize("bits", [4, 8])
def test_packed_layers_give_the_plain_product_and_gradient(bits: int) -> None:
    packed = nn.QuantizedLinear.from_linear(_linear(64, 48), 32, bits)
    packed.__class__ = OnDemandLinear
    dense = dense_weight(packed)
    x = mx.random.normal((5, 64))

    def through(call: Any) -> Any:
        return mx.value_and_grad(lambda x: (call(x) ** 2).sum())(x)

    value, gradient = through(packed)
    expected, expected_gradient = through(lambda x: x @ dense.T + packed.bias)
    np.testing.assert_allclose(_np(value), _np(expected), rtol=1e-5)
    np.testing.assert_allclose(_np(gradient), _np(expected_gradient), rtol=1e-4, atol=1e-4)


def test_packed_head() -> None:
    packed = nn.QuantizedEmbedding.from_embedding(nn.Embedding(48, 64), 32, 4)
    plain = packed.as_linear(mx.ones((2, 64)))
    packed.__class__ = OnDemandEmbedding
    np.testing.assert_allclose(_np(packed.as_linear(mx.ones((2, 64)))), _np(plain), atol=1e-5)


def test_base_alone_is_the_model_before() -> None:
    model, before = tiny.build("llama"), tiny.build("llama")
    add_adapters(model, LoraConfig(rank=2))
    for layer in adapted_layers(model).values():
        _filled(layer)
    ids = mx.array([[1, 2, 3, 4]])
    assert not mx.allclose(model(ids), before(ids), atol=1e-3)
    with base_only(model):
        with base_only(model):
            np.testing.assert_allclose(_np(model(ids)), _np(before(ids)), atol=1e-5)
        np.testing.assert_allclose(_np(model(ids)), _np(before(ids)), atol=1e-5)
    assert not mx.allclose(model(ids), before(ids), atol=1e-3)


def test_targets() -> None:
    model = tiny.build("qwen3_moe", tie_word_embeddings=False)

    def endings(**settings: Any) -> set[str]:
        return {path.rpartition(".")[2] for path in find_targets(model, LoraConfig(**settings))}

    attention = {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert endings(targets="attention") == attention
    assert attention < endings() and "lm_head" not in endings()
    assert endings(targets=["lm_head"]) == {"lm_head"}
    assert len(find_targets(model, LoraConfig(targets=["q_proj"], layers=1))) == 1
    with pytest.raises(UsageError, match="'query'.*q_proj"):
        endings(targets=["query"])
    with pytest.raises(UsageError, match="lora.layers is 99"):
        endings(layers=99)


def test_targets_may_be_written_with_commas() -> None:
    model = tiny.build("llama")
    listed = find_targets(model, LoraConfig(targets=["q_proj", "v_proj"]))
    assert find_targets(model, LoraConfig(targets="q_proj, v_proj")) == listed


@pytest.mark.parametrize(
    ("settings", "pattern"),
    [
        ({}, "."),
        ({"layers": 1}, r"model\.layers\.2\."),
        ({"targets": "q_proj", "layers": 2}, r"model\.layers\.[12]\.self_attn\.q_proj\."),
    ],
)
def test_full_trains_the_chosen_layers(settings: dict[str, Any], pattern: str) -> None:
    model = tiny.build("llama")
    add_adapters(model, LoraConfig(type="full", **settings))
    trained = {name for name, _ in tree_flatten(model.trainable_parameters())}
    assert trained == {name for name, _ in tree_flatten(model.parameters()) if re.match(pattern, name)}
