"""Loading against mlx-lm's own loader and NumPy: every layout, quantised or not, and damaged files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlxserve.config import LoadConfig
from mlxserve.errors import ModelInvalid, ModelUnsupported, UsageError
from mlxserve.models.load import load_folder
from mlxserve.models.weights import quantize_now
from tests import tiny

IDS = mx.array([[1, 5, 9, 200, 7]])


def theirs(folder: Path) -> mx.array:
    from mlx_lm.utils import load_model

    return load_model(folder)[0](IDS).astype(mx.float32)


def ours(folder: Path, **settings: Any) -> mx.array:
    return load_folder(folder, LoadConfig(**settings)).model(IDS).astype(mx.float32)


def close(a: mx.array, b: mx.array, tolerance: float = 1e-4) -> bool:
    scale = max(1.0, float(mx.abs(b).max()))
    return float(mx.abs(a - b).max()) / scale < tolerance


def resave(folder: Path, change: Any) -> dict[str, mx.array]:
    """Rewrite a folder's weights through `change`."""
    weights = mx.load(str(folder / "model.safetensors"))
    assert isinstance(weights, dict)
    weights = change(dict(weights))
    mx.eval(weights)
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return weights


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "gemma3_text", "deepseek_v3"])
def test_plain_folders_equal_mlx_lms_loader(kind: str, tmp_path: Path) -> None:
    folder = tiny.write(tmp_path / kind, kind)
    assert close(ours(folder), theirs(folder), 1e-6)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_sixteen_bits_are_computed_in_float32_on_a_cpu(dtype: mx.Dtype, tmp_path: Path) -> None:
    folder = tiny.write(tmp_path / "m")
    resave(folder, lambda w: {k: v.astype(dtype) for k, v in w.items()})
    loaded = load_folder(folder, LoadConfig())
    assert loaded.dtype == mx.float32
    assert {v.dtype for _, v in tree_flatten(loaded.model.parameters())} == {mx.float32}
    kept = load_folder(folder, LoadConfig(dtype="bfloat16"))
    assert {v.dtype for _, v in tree_flatten(kept.model.parameters())} == {mx.bfloat16}


def quantised(folder: Path, bits: int, group_size: int, overrides: dict[str, Any]) -> None:
    """Quantise a folder as mlx-lm would, with per-layer overrides in its configuration."""
    config = json.loads((folder / "config.json").read_text())
    loaded = load_folder(folder, LoadConfig())

    def settings_of(path: str, module: nn.Module) -> Any:
        return overrides.get(path, hasattr(module, "to_quantized"))

    nn.quantize(loaded.model, group_size=group_size, bits=bits, class_predicate=settings_of)
    config["quantization"] = {"group_size": group_size, "bits": bits, **overrides}
    weights = dict(tree_flatten(loaded.model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    (folder / "config.json").write_text(json.dumps(config))


def test_case_45_overrides_come_first(tmp_path: Path) -> None:
    """Width 96 with an override of 32, a layer left whole, 8 bits among 4: as mlx-lm computes it."""
    folder = tiny.write(tmp_path / "m", intermediate_size=96)
    small = {"group_size": 32, "bits": 4}
    overrides: dict[str, Any] = {f"model.layers.{i}.mlp.down_proj": small for i in range(3)}
    overrides["model.layers.1.self_attn.q_proj"] = False
    overrides["model.layers.0.self_attn.k_proj"] = {"group_size": 64, "bits": 8}
    quantised(folder, 4, 64, overrides)
    assert close(ours(folder), theirs(folder), 1e-4)
    modules = dict(load_folder(folder, LoadConfig()).model.named_modules())
    assert isinstance(modules["model.layers.0.mlp.down_proj"], nn.Linear), "dequantised on a CPU"


def test_case_45_widths_that_no_group_divides(tmp_path: Path) -> None:
    """4304 falls back from 64 to a group that divides it, or stays whole; both are reported."""

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.odd = nn.Linear(4304, 8)
            self.even = nn.Linear(96, 8)
            self.fine = nn.Linear(128, 8)

    model = Wide()
    notes = quantize_now(model, 4, 64)
    assert isinstance(model.fine, nn.QuantizedLinear) and "fine" not in notes
    assert isinstance(model.even, nn.QuantizedLinear) and model.even.group_size == 32
    assert "groups of 32" in notes["even"]
    assert isinstance(model.odd, nn.Linear) and "4304" in notes["odd"]


def test_quantising_while_loading(tmp_path: Path) -> None:
    folder = tiny.write(tmp_path / "m", "llama")
    plain = load_folder(folder, LoadConfig())
    eight = load_folder(folder, LoadConfig(quantize_bits=8))
    two = load_folder(folder, LoadConfig(quantize_bits=2))
    drift = [float(mx.abs(m.model(IDS) - plain.model(IDS)).mean()) for m in (eight, two)]
    assert 0 < drift[0] < drift[1]
    weight = plain.model.model.layers[0].mlp.up_proj.weight
    packed = mx.quantize(weight, group_size=64, bits=8)
    expected = mx.dequantize(*packed, group_size=64, bits=8)
    assert mx.allclose(eight.model.model.layers[0].mlp.up_proj.weight, expected, atol=1e-6).item()
    with pytest.raises(UsageError, match="7"):
        load_folder(folder, LoadConfig(quantize_bits=7))


def test_sharded_folders(tmp_path: Path) -> None:
    folder = tiny.write(tmp_path / "m", "llama")
    whole = ours(folder)
    weights = mx.load(str(folder / "model.safetensors"))
    assert isinstance(weights, dict)
    names = sorted(weights)
    shards = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for shard, part in shards.items():
        mx.save_safetensors(str(folder / shard), {name: weights[name] for name in part})
    (folder / "model.safetensors").unlink()
    index = {name: shard for shard, part in shards.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert close(ours(folder), whole, 1e-6)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelInvalid, match="model-00002-of-00002"):
        ours(folder)


def test_case_49_tied_and_untied_heads(tmp_path: Path) -> None:
    tied = tiny.write(tmp_path / "tied", "llama")
    before = ours(tied)
    head = np.zeros((tiny.VOCAB, 64), np.float32)
    resave(tied, lambda w: {**w, "lm_head.weight": mx.array(head)})
    assert close(ours(tied), before, 1e-6), "the embedding is the head, whatever else is stored"
    untied = tiny.write(tmp_path / "untied", "llama", tie_word_embeddings=False)
    assert ours(untied).shape[-1] == tiny.VOCAB
    resave(untied, lambda w: {k: v for k, v in w.items() if k != "lm_head.weight"})
    with pytest.raises(ModelInvalid, match=r"lm_head\.weight"):
        ours(untied)


def test_missing_surplus_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    for change, message in (
        (lambda w: {k: v for k, v in w.items() if k != name}, r"lacks the tensor model\.layers\.1\.mlp\.up"),
        (lambda w: {**w, "model.extra": mx.zeros(3)}, r"holds the tensor model\.extra"),
        (lambda w: {**w, name: mx.zeros((3, 3))}, r"up_proj\.weight .* shape \[3, 3\]"),
    ):
        folder = tiny.write(tmp_path / message[:5], "llama")
        resave(folder, change)
        with pytest.raises(ModelInvalid, match=message):
            ours(folder)


def test_an_unknown_architecture_and_a_bad_configuration(tmp_path: Path) -> None:
    folder = tiny.write(tmp_path / "m", "llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "nosuch"}))
    with pytest.raises(ModelUnsupported, match="nosuch"):
        ours(folder)
    del config["hidden_size"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelInvalid, match="hidden_size"):
        ours(folder)


def test_rope_and_context_overrides(tmp_path: Path) -> None:
    folder = tiny.write(tmp_path / "m", "llama")
    changed = tiny.write(tmp_path / "changed", "llama", rope_theta=500.0)
    assert close(ours(folder, rope={"rope_theta": 500.0}), ours(changed), 1e-6)
    assert not close(ours(folder), ours(changed), 1e-3)
    assert load_folder(folder, LoadConfig(context=77)).context == 77
    with pytest.raises(UsageError, match="hidden_size"):
        ours(folder, rope={"hidden_size": 3})


def test_the_models_own_sampling_is_read(tmp_path: Path) -> None:
    folder = tiny.write(tmp_path / "m", "llama")
    (folder / "generation_config.json").write_text('{"temperature": 0.6, "top_k": 20, "max_length": 9}')
    assert load_folder(folder, LoadConfig()).generation_defaults == {"temperature": 0.6, "top_k": 20}
    (folder / "generation_config.json").write_text('{"temperature": 0.6, "do_sample": false}')
    assert load_folder(folder, LoadConfig()).generation_defaults["temperature"] == 0.0


def test_the_digest_tells_weights_apart(tmp_path: Path) -> None:
    folder = tiny.write(tmp_path / "m", "llama")
    first = load_folder(folder, LoadConfig()).digest
    assert load_folder(folder, LoadConfig()).digest == first
    assert load_folder(folder, LoadConfig(quantize_bits=8)).digest != first
    resave(folder, lambda w: {k: v * 2 for k, v in w.items()})
    assert load_folder(folder, LoadConfig()).digest != first
