"""Fusing: the same logits, a drift that is measured, and folders that reload here and in mlx-lm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlxserve.config import LoadConfig
from mlxserve.kernels_metal.layers import use_blocks
from mlxserve.lora.base import open_base, unpack_blocks, write_model
from mlxserve.lora.config import LoraConfig
from mlxserve.lora.fuse import fuse
from mlxserve.lora.layers import adapted_layers, add_adapters
from mlxserve.models.load import load_folder
from tests import tiny
from tests.models.gguf import writing

IDS = mx.array([[5, 6, 7, 8, 9]])


def _stir(model: Any, size: float) -> None:
    mx.random.seed(9)
    for layer in adapted_layers(model).values():
        layer.lora_b = size * mx.random.normal(layer.lora_b.shape)
    model.eval()


@pytest.mark.parametrize(("kind", "lora"), [("llama", "lora"), ("llama", "dora"), ("qwen3_moe", "lora")])
def test_fused_is_adapted(kind: str, lora: Any) -> None:
    model = tiny.build(kind)
    add_adapters(model, LoraConfig(rank=2, type=lora))
    _stir(model, 0.05)
    expected = np.array(model(IDS))
    report = fuse(model)
    assert not adapted_layers(model) and all(row.drift < 1e-3 for row in report)
    np.testing.assert_allclose(np.array(model(IDS)), expected, atol=2e-3)


def _packed_base(tmp_path: Path) -> Path:
    """A tiny llama in MLX's 4-bit form, as a folder."""
    base = open_base(str(tiny.write(tmp_path / "float", "llama")), quantize=4, group_size=32)
    write_model(tmp_path / "packed", base, base.model)
    return tmp_path / "packed"


def test_packed_weights_stay_packed(tmp_path: Path) -> None:
    base = open_base(str(_packed_base(tmp_path)))
    layer = base.model.model.layers[0].self_attn.q_proj
    assert isinstance(layer, nn.QuantizedLinear) and layer.bits == 4
    loaded = load_folder(tmp_path / "packed", LoadConfig())
    np.testing.assert_allclose(np.array(base.model(IDS)), np.array(loaded.model(IDS)), atol=1e-3)


def test_case_55_four_bits_that_would_erase_the_adapter(tmp_path: Path) -> None:
    """Fault 9 of mlx-lm: it packs again without a word, and a small adapter is gone."""
    folder = _packed_base(tmp_path)
    base = open_base(str(folder))
    before = np.array(base.model(IDS))
    add_adapters(base.model, LoraConfig(rank=2, targets=["q_proj", "up_proj"]))
    _stir(base.model, 0.0005)
    expected = np.array(base.model(IDS))
    moved = np.abs(expected - before).max()
    report = fuse(base.model)
    assert {row.form for row in report} == {"float32"}
    write_model(tmp_path / "fused", base, base.model)
    again = load_folder(tmp_path / "fused", LoadConfig())
    assert np.abs(np.array(again.model(IDS)) - expected).max() < 0.05 * moved

    from mlx_lm.utils import load_model

    theirs, _ = load_model(tmp_path / "fused")
    assert np.abs(np.array(theirs(IDS)) - expected).max() < 0.05 * moved + 1e-3


def test_packing_again_tells_its_drift(tmp_path: Path) -> None:
    base = open_base(str(_packed_base(tmp_path)))
    add_adapters(base.model, LoraConfig(rank=2, targets=["q_proj"]))
    _stir(base.model, 0.0005)
    exact = {path: np.array(layer.merged()) for path, layer in adapted_layers(base.model).items()}
    change = {path: np.array(layer.delta()) for path, layer in adapted_layers(base.model).items()}
    report = fuse(base.model, keep="packed")
    modules = dict(base.model.named_modules())
    for row in report:
        layer = modules[row.path]
        weight = np.array(
            mx.dequantize(layer.weight, layer.scales, layer.biases, layer.group_size, layer.bits)
        )
        drift = np.linalg.norm(weight - exact[row.path]) / np.linalg.norm(change[row.path])
        assert row.drift == pytest.approx(drift, rel=1e-3) and row.form == "4 bits"
    assert max(row.drift for row in report) > 0.5


def _as_bfloat16(folder: Path) -> Path:
    """As models come: bfloat16, but for a few values that want more."""
    file = str(folder / "model.safetensors")
    arrays: Any = mx.load(file)
    mx.save_safetensors(
        file, {n: v if n == "model.norm.weight" else v.astype(mx.bfloat16) for n, v in arrays.items()}
    )
    return folder


def test_a_fused_model_has_the_floats_of_its_base(tmp_path: Path) -> None:
    """A CPU computes in float32; what it writes takes no more room than the base, and drift counts that."""
    base = open_base(str(_as_bfloat16(tiny.write(tmp_path / "base", "llama"))))
    add_adapters(base.model, LoraConfig(rank=2, targets=["q_proj"]))
    _stir(base.model, 0.05)
    report = fuse(base.model, dtype=base.stored)
    assert {row.form for row in report} == {"bfloat16"} and all(0 < row.drift < 0.1 for row in report)
    write_model(tmp_path / "fused", base, base.model)
    arrays: Any = mx.load(str(tmp_path / "fused" / "model.safetensors"))
    assert arrays.pop("model.norm.weight").dtype == mx.float32
    assert {value.dtype for value in arrays.values()} == {mx.bfloat16}


def test_a_fused_gguf_model_reloads_with_its_tokenizer(tmp_path: Path) -> None:
    config = tiny.config("llama")
    tokenizer = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.chat_template": tiny.CHATML,
    }

    def metadata(writer: Any) -> None:
        for name, value in tokenizer.items():
            writer.add_string(name, value)
        known = tiny.byte_tokenizer_json()
        vocab = sorted(known["model"]["vocab"], key=known["model"]["vocab"].get)
        more = ["he", *(f"<{i}>" for i in range(len(vocab) + 9, tiny.VOCAB))]
        writer.add_token_list([*vocab, *tiny.BYTE_SPECIALS, *more])
        writer.add_token_types([1] * len(vocab) + [3] * 8 + [1] * len(more))
        writer.add_token_merges(["h e"])

    path = writing.write(
        tmp_path / "tiny.gguf", "llama", writing.weights_of(writing.build(config)), config, extra=metadata
    )
    base = open_base(str(path), floats=True)
    add_adapters(base.model, LoraConfig(rank=2))
    _stir(base.model, 0.05)
    expected = np.array(base.model(IDS))
    fuse(base.model, dtype=base.stored)
    write_model(tmp_path / "fused", base, base.model)
    again = open_base(str(tmp_path / "fused"))
    chat = [{"role": "user", "content": "héllo <|im_end|>"}]
    assert again.tokenizer.encode_chat(chat) == base.tokenizer.encode_chat(chat)
    assert again.tokenizer.eos_token_ids == base.tokenizer.eos_token_ids
    assert np.abs(np.array(again.model(IDS)) - expected).max() < 0.05 * np.abs(expected).max()

    from mlx_lm.utils import load

    theirs, words = load(str(tmp_path / "fused"))
    assert words.encode("hello") == base.tokenizer.encode("hello")
    assert np.abs(np.array(theirs(IDS).astype(mx.float32)) - expected).max() < 0.1 * np.abs(expected).max()


def test_gguf_blocks_become_weights_that_train() -> None:
    mx.random.seed(0)
    model = tiny.build("llama")
    blocks = {"model.layers.0.mlp.up_proj": "Q8_0", "model.embed_tokens": "Q8_0"}
    use_blocks(model, blocks, mx.float32)
    model.eval()
    before = np.array(model(IDS))
    unpack_blocks(model, mx.float32)
    add_adapters(model, LoraConfig(type="full"))
    names = {name for name, _ in tree_flatten(model.trainable_parameters())}
    assert {f"{path}.weight" for path in blocks} <= names
    np.testing.assert_allclose(np.array(model(IDS)), before, atol=1e-4)
