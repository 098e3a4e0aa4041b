"""Layers on GGUF blocks against plain layers with the same numbers."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.gemma4_text import GeGLU
from mlx_lm.models.gpt_oss import SwigluOAI
from mlx_lm.models.switch_layers import SwitchGLU, SwitchLinear

from mlxserve.errors import ModelUnsupported
from mlxserve.kernels_metal import gguf_reference, switch
from mlxserve.kernels_metal.layers import (
    GGUFEmbedding,
    GGUFLinear,
    GGUFSwitchGLU,
    GGUFSwitchLinear,
    use_blocks,
)
from tests.kernels_metal.gguf_samples import random_blocks, truth
from tests.kernels_metal.products import assert_close, vectors
from tests.metal import harness


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


@pytest.mark.parametrize("slab", [600, 10**6])
def test_gradients_pass_through_blocks(monkeypatch: pytest.MonkeyPatch, slab: int) -> None:
    monkeypatch.setattr(gguf_reference, "SLAB_WEIGHTS", slab)
    layer = GGUFLinear(256, 7, "Q5_K")
    weights = filled(layer)
    x, y = vectors(3, 256, mx.float32), vectors(3, 7, mx.float32, seed=2)
    gradient = mx.grad(lambda x: (layer(x) * y).sum())(x)
    assert_close(np.array(gradient), np.array(y) @ weights, mx.float32)


class Mixture(nn.Module):
    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.mlp = SwitchGLU(64, 96, 5, **settings)


def mixtures(kinds: tuple[str, str, str], **settings: Any) -> tuple[nn.Module, nn.Module]:
    """A mixture on blocks of `kinds`, and mlx-lm's own with the same numbers."""
    blocks, plain = Mixture(**settings), Mixture(**settings)
    names = ("gate_proj", "up_proj", "down_proj")
    use_blocks(blocks, {f"mlp.{name}": kind for name, kind in zip(names, kinds)}, mx.float32)
    for i, name in enumerate(names):
        plain.mlp[name].weight = mx.array(filled(blocks.mlp[name], i))
    return blocks.mlp, plain.mlp


@pytest.mark.parametrize(
    ("kinds", "settings", "fused"),
    [
        (("Q4_0", "Q4_0", "IQ4_NL"), {}, True),
        (("Q4_0", "Q4_0", "Q8_0"), {"activation": GeGLU()}, True),
        (("Q4_0", "Q4_0", "Q8_0"), {"activation": SwigluOAI()}, False),
        (("Q4_0", "Q8_0", "Q8_0"), {}, False),
        (("Q4_0", "Q4_0", "Q8_0"), {"bias": True}, False),
    ],
)
@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_mixtures(tokens: int, kinds: tuple[str, str, str], settings: dict[str, Any], fused: bool) -> None:
    """40 tokens are sorted by expert."""
    blocks, plain = mixtures(kinds, **settings)
    assert isinstance(blocks, GGUFSwitchGLU) == fused
    blocks.eval()
    x = vectors(tokens, 64, mx.float32).reshape(1, tokens, 64) / 8
    indices = mx.array(np.random.default_rng(0).integers(0, 5, (1, tokens, 2)))
    assert_close(np.array(blocks(x, indices)), np.array(plain(x, indices)), mx.float32)


def test_gradients_pass_through_mixtures() -> None:
    blocks, plain = mixtures(("Q4_0", "Q4_0", "Q4_1"))
    x, weights = vectors(4, 64, mx.float32) / 8, vectors(4 * 2 * 64, 1, mx.float32).reshape(4, 2, 64)
    indices = mx.array([[0, 1], [4, 0], [2, 2], [1, 4]])
    ours, right = (mx.grad(lambda x, m=m: (m(x, indices) * weights).sum())(x) for m in (blocks, plain))
    assert_close(np.array(ours), np.array(right), mx.float32)


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("tokens", [3, 40])
def test_mixtures_on_the_kernels(monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    monkeypatch.setattr(switch, "enabled", lambda kernel: True)
    blocks, plain = mixtures(("Q4_0", "Q4_0", "Q4_1"))
    blocks.eval()
    x = vectors(tokens, 64, mx.float32) / 8
    indices = mx.array(np.random.default_rng(0).integers(0, 5, (tokens, 2)))
    result = harness.run(blocks, x, indices)
    assert_close(result.outputs[0], np.array(plain(x, indices)), mx.float32)
    names = [launch.name for launch in result.launches]
    few = ["moe_gate_up_q4_0_v1", "gguf_gather_qmv_q4_1_v1"]
    many = ["gguf_gather_qmm_q4_0_v1"] * 2 + ["gguf_gather_qmm_q4_1_v1"]
    assert names == (few if tokens == 3 else many)


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
