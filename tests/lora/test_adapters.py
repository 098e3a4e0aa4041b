"""Adapter files: both formats, the numbers they stand for, and nothing loaded in part."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlxserve.errors import ModelInvalid, ModelNotFound, Unsupported
from mlxserve.lora import adapters
from mlxserve.lora.config import LoraConfig
from mlxserve.lora.layers import adapted_layers, add_adapters
from tests import tiny

IDS = mx.array([[5, 6, 7, 8, 9]])
Q = "model.layers.0.self_attn.q_proj"


def _stirred(kind: str = "llama", **settings: Any) -> Any:
    model = tiny.build(kind)
    add_adapters(model, LoraConfig(rank=4, **settings))
    mx.random.seed(9)
    for layer in adapted_layers(model).values():
        layer.lora_b = 0.05 * mx.random.normal(layer.lora_b.shape)
        if "m" in layer:
            layer.m = layer.m * 1.1
    model.eval()
    return model


def _logits(model: Any) -> np.ndarray:
    return np.array(model(IDS))


@pytest.mark.parametrize("form", ["mlx-lm", "peft"])
@pytest.mark.parametrize("settings", [{}, {"type": "dora"}, {"rslora": True, "targets": ["q_proj"]}])
def test_there_and_back(tmp_path: Path, form: str, settings: dict[str, Any]) -> None:
    model = _stirred(**settings)
    found = adapters.of_model(model, base="some/base")
    (adapters.save if form == "mlx-lm" else adapters.export_peft)(tmp_path, found)
    again = tiny.build("llama")
    read = adapters.read(tmp_path)
    assert (read.base, read.format, read.kind) == ("some/base", form, found.kind)
    adapters.attach(again, read)
    again.eval()
    np.testing.assert_allclose(_logits(again), _logits(model), atol=1e-4)
    assert not np.allclose(_logits(again), _logits(tiny.build("llama")), atol=1e-2)


def test_mlx_lm_loads_ours(tmp_path: Path) -> None:
    from mlx_lm.tuner.utils import load_adapters

    for settings in ({}, {"type": "dora", "targets": ["down_proj"], "layers": 2}):
        model = _stirred(**settings)
        adapters.save(tmp_path, adapters.of_model(model))
        theirs = load_adapters(tiny.build("llama"), str(tmp_path))
        theirs.eval()
        np.testing.assert_allclose(_logits(theirs), _logits(model), atol=1e-4)


def test_ours_loads_mlx_lm(tmp_path: Path) -> None:
    """Names relative to the blocks, as `mlx_lm.lora` writes them."""
    from mlx_lm.tuner.utils import linear_to_lora_layers

    model = tiny.build("llama")
    settings = {"rank": 3, "scale": 5.0, "dropout": 0.0, "keys": ["self_attn.q_proj", "mlp.up_proj"]}
    linear_to_lora_layers(model, 2, settings)
    for _, layer in model.named_modules():
        if "lora_b" in layer:
            layer.lora_b = 0.05 * mx.random.normal(layer.lora_b.shape)
    arrays = {n: v for n, v in tree_flatten(model.parameters()) if "lora_" in n}
    mx.save_safetensors(str(tmp_path / "adapters.safetensors"), arrays)
    config = {"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": settings, "model": "b"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    ours = tiny.build("llama")
    adapters.attach(ours, adapters.read(tmp_path))
    model.eval()
    ours.eval()
    np.testing.assert_allclose(_logits(ours), _logits(model), atol=1e-4)


def _peft(folder: Path, prefix: str = "base_model.model.", **config: Any) -> tuple[np.ndarray, np.ndarray]:
    """A PEFT adapter on one square layer: A (r, in), B (out, r)."""
    draw = np.random.default_rng(0)
    a, b = draw.normal(size=(64, 64)).astype(np.float32), draw.normal(size=(64, 64)).astype(np.float32) / 50
    arrays = {f"{prefix}{Q}.lora_A.weight": mx.array(a), f"{prefix}{Q}.lora_B.weight": mx.array(b)}
    mx.save_safetensors(str(folder / "adapter_model.safetensors"), arrays)
    values = {"peft_type": "LORA", "r": 64, "lora_alpha": 96, "target_modules": ["q_proj"], **config}
    (folder / "adapter_config.json").write_text(json.dumps(values))
    return a, b


@pytest.mark.parametrize(
    ("config", "scale"),
    [
        ({}, 1.5),
        ({"use_rslora": True}, 12.0),
        ({"alpha_pattern": {"q_proj": 32}}, 0.5),
        (
            {
                "r": 8,
                "rank_pattern": {"layers.0.self_attn.q_proj": 64},
                "alpha_pattern": {r".*\.q_proj": 128},
            },
            2.0,
        ),
    ],
)
def test_case_52_square_factors_are_transposed_and_scaled(
    tmp_path: Path, config: dict[str, Any], scale: float
) -> None:
    """W + scale · B A, in NumPy: a square matrix would also load untransposed."""
    a, b = _peft(tmp_path, **config)
    model = tiny.build("llama")
    weight = np.array(model.model.layers[0].self_attn.q_proj.weight)
    adapters.attach(model, adapters.read(tmp_path))
    merged = np.array(model.model.layers[0].self_attn.q_proj.merged())
    np.testing.assert_allclose(merged, weight + scale * (b @ a), rtol=1e-3, atol=1e-3)


def test_case_52_nothing_is_loaded_in_part(tmp_path: Path) -> None:
    _peft(tmp_path, prefix="base_model.model.other.")
    model = tiny.build("llama")
    before = _logits(model)
    with pytest.raises(ModelInvalid, match="other.model.layers.0.self_attn.q_proj does not exist"):
        adapters.attach(model, adapters.read(tmp_path))
    good = adapters.of_model(_stirred())
    good.arrays[f"{Q}.lora_a"] = mx.zeros((32, 4))
    with pytest.raises(ModelInvalid, match=r"q_proj.lora_a has shape \[32, 4\]"):
        adapters.attach(model, good)
    del good.arrays[f"{Q}.lora_a"]
    with pytest.raises(ModelInvalid, match="lacks model.layers.0.self_attn.q_proj.lora_a"):
        adapters.attach(model, good)
    with pytest.raises(ModelInvalid, match="adapts no layer"):
        adapters.attach(model, adapters.Adapter("lora", {}, {}))
    np.testing.assert_array_equal(_logits(model), before)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"peft_type": "IA3"}, "IA3"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "bias"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(tmp_path: Path, config: dict[str, Any], words: str) -> None:
    _peft(tmp_path, **config)
    with pytest.raises(Unsupported, match=words):
        adapters.read(tmp_path)


def test_damaged_folders(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="no adapter folder"):
        adapters.read(tmp_path / "none")
    with pytest.raises(ModelInvalid, match="cannot be read"):
        adapters.read(tmp_path)
    (tmp_path / "run" / "final").mkdir(parents=True)
    (tmp_path / "run" / "final" / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelNotFound, match="its adapter is .*final"):
        adapters.read(tmp_path / "run")
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelInvalid, match="holds neither"):
        adapters.read(tmp_path)
    (tmp_path / "adapters.safetensors").write_bytes(b"xx")
    with pytest.raises(ModelInvalid, match="adapters.safetensors"):
        adapters.read(tmp_path)


def test_experts_have_no_peft_form(tmp_path: Path) -> None:
    found = adapters.of_model(_stirred("qwen3_moe", targets=["switch_mlp.up_proj"]))
    with pytest.raises(Unsupported, match="experts"):
        adapters.export_peft(tmp_path, found)


def test_case_52_half_an_adapter_is_refused_when_read(tmp_path: Path) -> None:
    """Also where no model is at hand to compare it with, as in a conversion."""
    found = adapters.of_model(_stirred(targets=["q_proj"]))
    b = found.arrays.pop(f"{Q}.lora_b")
    adapters.save(tmp_path, found)
    with pytest.raises(ModelInvalid, match=f"lacks {Q}.lora_b"):
        adapters.read(tmp_path)
    found.arrays[f"{Q}.lora_b"] = b[:2]
    adapters.save(tmp_path, found)
    with pytest.raises(
        ModelInvalid, match=r"factors of .*q_proj, \[64, 4\] and \[2, 64\], have no common rank"
    ):
        adapters.read(tmp_path)


def test_a_pickled_adapter_is_named(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.bin").write_bytes(b"")
    with pytest.raises(ModelInvalid, match="adapter_model.bin is a pickle"):
        adapters.read(tmp_path)
