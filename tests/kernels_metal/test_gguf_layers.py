"""Layers on GGUF blocks against plain layers with the same numbers."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import SwitchGLU, SwitchLinear

from mlxserve.errors import ModelUnsupported
from mlxserve.kernels_metal.layers import GGUFEmbedding, GGUFLinear, GGUFSwitchLinear, use_blocks
from tests.kernels_metal.gguf_samples import random_blocks, truth
from tests.kernels_metal.products import assert_close, vectors


def filled(layer: nn.Module, seed: int = 0) -> np.ndarray:
    """Random blocks for `layer`, in place; returns the weights they stand for."""
    outer = layer.weight.shape[:-1]
    blocks = random_blocks(layer.kind, outer, layer.input_dims, seed)
    layer.weight = mx.array(blocks)
    return truth(blocks, layer.kind)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_linear(dtype: mx.Dtype) -> None:
    layer = GGUFLinear(512, 7, "Q6_K", bias=True)
    weights = filled(layer)
    layer.bias = mx.arange(7).astype(dtype)
    x = vectors(6, 512, dtype).reshape(2, 3, 512)
    y = layer(x)
    assert (y.shape, y.dtype) == ((2, 3, 7), dtype)
    assert_close(
        np.array(y.astype(mx.float32)), np.array(x.astype(mx.float32)) @ weights.T + np.arange(7), dtype
    )


def test_embedding_and_tied_head() -> None:
    layer = GGUFEmbedding(11, 64, "Q5_0", mx.float16)
    weights = filled(layer)
    rows = layer(mx.array([[3, 0], [10, 3]]))
    assert rows.dtype == mx.float16
    np.testing.assert_array_equal(np.array(rows), weights[[[3, 0], [10, 3]]].astype(np.float16))
    x = vectors(2, 64, mx.float32)
    assert_close(np.array(layer.as_linear(x)), np.array(x) @ weights.T, mx.float32)


@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_experts_take_the_place_of_a_switch_layer(tokens: int) -> None:
    """40 tokens make mlx-lm sort its rows by expert."""
    plain = SwitchGLU(64, 96, 5)
    blocks = SwitchGLU(64, 96, 5)
    use_blocks(blocks, {"gate_proj": "Q4_0", "up_proj": "Q8_0", "down_proj": "IQ4_NL"}, mx.float32)
    for i, name in enumerate(("gate_proj", "up_proj", "down_proj")):
        plain[name].weight = mx.array(filled(blocks[name], i))
    x = vectors(tokens, 64, mx.float32) / 8
    indices = mx.array(np.random.default_rng(0).integers(0, 5, (tokens, 2)))
    assert_close(np.array(blocks(x, indices)), np.array(plain(x, indices)), mx.float32)


def test_experts_with_bias() -> None:
    layer, plain = GGUFSwitchLinear(64, 5, 3, "Q4_1", bias=True), SwitchLinear(64, 5, 3)
    plain.weight = mx.array(filled(layer))
    layer.bias = plain.bias = vectors(3, 5, mx.float32)
    x, indices = vectors(4, 64, mx.float32).reshape(4, 1, 1, 64), mx.array([[0, 1], [2, 0], [1, 1], [2, 2]])
    assert_close(np.array(layer(x, indices)), np.array(plain(x, indices)), mx.float32)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 32)
        self.layers = [nn.Linear(32, 32, bias=False), nn.Linear(32, 8)]
        self.norm = nn.RMSNorm(32)


def test_use_blocks_keeps_names_and_stays_frozen() -> None:
    model = Model()
    use_blocks(model, {"embed": "Q4_0", "layers.1": "Q8_0"}, mx.bfloat16)
    shapes = {name: value.shape for name, value in tree_flatten(model.parameters())}
    assert shapes == {
        "embed.weight": (11, 18),
        "layers.0.weight": (32, 32),
        "layers.1.weight": (8, 34),
        "layers.1.bias": (8,),
        "norm.weight": (32,),
    }
    model.layers[1].unfreeze()
    trainable = {name for name, _ in tree_flatten(model.trainable_parameters())}
    assert trainable == {"layers.0.weight", "norm.weight"}


def test_use_blocks_refuses_what_cannot_hold_them() -> None:
    with pytest.raises(ModelUnsupported, match="norm is a RMSNorm"):
        use_blocks(Model(), {"norm": "Q4_0"}, mx.float32)
