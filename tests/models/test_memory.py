"""Memory worked out ahead, against what mlx-lm's own caches and weights really take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

import mlxserve  # noqa: F401  (puts OpenBLAS before MLX)
from mlxserve.config import EngineConfig, LoadConfig
from mlxserve.engine.memory import measure
from mlxserve.errors import DoesNotFit, ModelInvalid
from mlxserve.models.definitions import find_definition, import_definition
from mlxserve.models.describe import describe_files
from mlxserve.models.files import inspect
from mlxserve.models.kvlayout import LATENT, WINDOWED, kv_layers, text_config
from mlxserve.models.load import load_folder
from mlxserve.models.memory import (
    Estimate,
    kv_bytes,
    show_bytes,
    show_count,
    weigh,
    width_of,
)
from mlxserve.models.resolve import ModelFiles
from tests import tiny
from tests.conftest import package_folder

MLA = {
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "first_k_dense_replace": 3,
    "n_routed_experts": None,
}
# Architectures whose layers store things in different ways.
OTHERS: dict[str, dict[str, Any]] = {
    "qwen3_next": {
        "full_attention_interval": 3,
        "linear_num_value_heads": 2,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": 4,
        "num_experts": 0,
        "num_experts_per_tok": 0,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "shared_expert_intermediate_size": 8,
        "moe_intermediate_size": 8,
        "partial_rotary_factor": 0.5,
    },
    "lfm2": {
        "layer_types": ["conv", "full_attention", "conv"],
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 64,
        "block_ff_dim": 128,
        "block_multiple_of": 8,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
    },
    "gemma4_text": {
        "global_head_dim": 32,
        "sliding_window": 8,
        "num_kv_shared_layers": 1,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "vocab_size_per_layer_input": 0,
        "num_hidden_layers": 4,
        "hidden_size_per_layer_input": 0,
        "use_double_wide_mlp": False,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    },
    "exaone4": {"sliding_window": 8, "sliding_window_pattern": "LLG", "rope_scaling": None},
    "gpt2": {"num_key_value_heads": None, "head_dim": None},
    "llama4_text": {"intermediate_size_mlp": 128, "no_rope_layers": [1, 1, 0], "use_qk_norm": True},
    "olmo3": {"num_hidden_layers": 4},
    "llama": {
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "sliding_window": 8,
    },
    "deepseek_v3": MLA,
    "deepseek_v2": {
        **MLA,
        "rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 4096},
    },
}


def _settings(kind: str) -> dict[str, Any]:
    base = tiny.config(kind) if kind in tiny.kinds() else {**tiny.config("llama"), "model_type": kind}
    return {**base, **OTHERS.get(kind, {})}


def _cache_bytes(settings: dict[str, Any], tokens: int) -> int:
    """Bytes that mlx-lm's caches hold after a prompt, without the spare room at their ends."""
    module = find_definition(settings)
    model = module.Model(module.ModelArgs.from_dict(settings))
    make_prompt_cache = import_definition("cache").make_prompt_cache
    cache = make_prompt_cache(model)
    mx.eval(model(mx.arange(tokens)[None] % settings["vocab_size"], cache=cache))
    total = 0
    for layer in cache:
        if not hasattr(layer, "keys"):
            continue  # a state of fixed size
        held = min(layer.keys.shape[2], layer.offset)
        for array in (layer.keys, layer.values):
            total += array.nbytes // array.shape[2] * held
    return total


def _window_prompt(settings: dict[str, Any]) -> int:
    """A prompt of one chunk: mlx-lm's rotating cache keeps exactly the window once decoding follows."""
    return 6 if settings.get("sliding_window") else 20


@pytest.mark.parametrize("kind", sorted(set(tiny.kinds()) | set(OTHERS)))
def test_kv_bytes_are_what_mlx_lms_caches_hold(kind: str) -> None:
    settings = _settings(kind)
    tokens = _window_prompt(settings)
    assert kv_bytes(settings, tokens, float_bytes=4) == _cache_bytes(settings, tokens)


@pytest.mark.parametrize("kind", ["gemma3_text", "gpt_oss", "cohere2", "olmo3", "llama", "exaone4"])
def test_windows_are_those_of_mlx_lms_caches(kind: str) -> None:
    settings = _settings(kind)
    module = find_definition(settings)
    cache = module.Model(module.ModelArgs.from_dict(settings)).make_cache()
    assert [layer.window for layer in kv_layers(settings)] == [getattr(c, "max_size", None) for c in cache]


def _definitions_with(words: tuple[str, ...]) -> set[str]:
    folder = package_folder("mlx_lm")
    assert folder is not None
    files = [path for path in (folder / "models").glob("*.py") if path.stem not in ("cache", "base")]
    return {path.stem for path in files if any(word in path.read_text() for word in words)}


def test_the_list_of_windowed_definitions_is_mlx_lms() -> None:
    assert _definitions_with(("RotatingKVCache(", "ChunkedKVCache(")) == WINDOWED


def test_the_list_of_latent_definitions_is_mlx_lms() -> None:
    assert _definitions_with(("kv_latent, k_pe = cache", "kv_latent, k_rope = cache")) <= LATENT


def test_published_shapes(data: Path) -> None:
    """Against the figures that the papers' shapes give by hand: layers x 2 x KV heads x head size."""
    import json

    by_hand = {
        "llama-3.1-405b": 126 * 2 * 8 * 128,
        "llama-3.3-70b": 80 * 2 * 8 * 128,
        "qwen3-235b-a22b": 94 * 2 * 4 * 128,
        "deepseek-v3": 61 * (512 + 64),
    }
    for name, values in by_hand.items():
        config = json.loads((data / "configs" / f"{name}.json").read_text())
        assert kv_bytes(config, 1) == 2 * values, name


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "gpt_oss"])
@pytest.mark.parametrize("kv_bits", [16, 8, 4])
def test_kv_bytes_are_what_the_pages_hold(kind: str, kv_bits: int) -> None:
    """Against the engine's own pages of one token's K/V."""
    settings = tiny.config(kind, head_dim=32)
    config = EngineConfig(kv_bits=kv_bits)
    sizes = measure(tiny.build(kind, head_dim=32), "rows", config)
    assert sizes.kept_whole == 0
    assert kv_bytes(settings, 1, kv_bits=kv_bits, float_bytes=4) * config.page_size == sum(sizes.page_bytes)


def test_quantised_kv_counts_its_scales() -> None:
    settings = tiny.config("llama")  # 3 layers x 2 x 2 heads x 16 = 192 numbers a token
    assert kv_bytes(settings, 10) == 10 * 192 * 2
    assert kv_bytes(settings, 10, kv_bits=8, group_size=32) == 10 * (192 + 192 // 32 * 4)
    assert kv_bytes(settings, 10, kv_bits=4, group_size=32) == 10 * (96 + 192 // 32 * 4)
    assert kv_bytes(settings, 10, sequences=3) == 3 * kv_bytes(settings, 10)


@pytest.mark.parametrize(("bits", "group_size"), [(4, 32), (8, 64), (3, 64), (6, 32)])
def test_weights_of_a_quantised_model(bits: int, group_size: int, tmp_path: Path) -> None:
    """Parameters are those of the model before quantising, bytes those on disk."""
    model = tiny.build("llama")
    count = sum(array.size for _, array in tree_flatten(model.parameters()))
    nn.quantize(model, group_size, bits)
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), weights)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    config = {"quantization": {"bits": bits, "group_size": group_size}}
    weighed = weigh(inspect(tmp_path).tensors, config)
    assert weighed.parameters == count
    assert weighed.nbytes == sum(array.nbytes for array in weights.values())


def test_weights_with_bits_of_their_own(tmp_path: Path) -> None:
    """A layer's own entry in the configuration decides how its words are unpacked."""
    weight = mx.zeros((8, 64))
    low, high = mx.quantize(weight, 32, 4), mx.quantize(weight, 32, 8)
    tensors = {}
    for name, parts in (("low", low), ("high", high)):
        tensors |= {f"{name}.{leaf}": part for leaf, part in zip(("weight", "scales", "biases"), parts)}
    mx.save_safetensors(str(tmp_path / "model.safetensors"), tensors)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    config = {"quantization": {"bits": 4, "group_size": 32, "high": {"bits": 8, "group_size": 32}}}
    assert weigh(inspect(tmp_path).tensors, config).parameters == 2 * weight.size


def test_weights_of_a_plain_model(tiny_llama: Path) -> None:
    folder = inspect(tiny_llama)
    weighed = weigh(folder.tensors, folder.config)
    assert weighed.bits_per_weight == 32
    assert weighed.loaded_bytes(2, on_cpu=False) == weighed.nbytes == weighed.parameters * 4
    assert weighed.loaded_bytes(2, on_cpu=True) == weighed.parameters * 2


@pytest.mark.parametrize(("dtype", "width"), [("auto", 4), ("float32", 4), ("bfloat16", 2)])
def test_weights_take_what_was_worked_out(dtype: str, width: int, tiny_llama: Path) -> None:
    folder = inspect(tiny_llama)
    loaded = load_folder(tiny_llama, LoadConfig(dtype=dtype))
    assert width_of(dtype, 2, on_cpu=True) == width
    assert weigh(folder.tensors, folder.config).loaded_bytes(width, on_cpu=True) == loaded.weight_bytes


def test_the_packaged_model_takes_what_was_worked_out(smollm2: Path) -> None:
    """135M parameters, as its publisher says, and their float32 bytes as MLX holds them."""
    found = describe_files(ModelFiles("gguf", smollm2, "smollm2", "package"))
    assert show_count(found.weights.parameters) == "135M" and found.context == 8192
    assert found.weights.nbytes < smollm2.stat().st_size < found.weights.nbytes * 1.05
    # 30 layers x 2 x 3 KV heads x 64, two bytes each
    assert kv_bytes(found.config, 1) == 30 * 2 * 3 * 64 * 2


def test_estimate_refuses_with_both_numbers() -> None:
    estimate = Estimate(weight_bytes=3 << 30, kv_bytes=2 << 30, context=4096, budget_bytes=4 << 30)
    assert not estimate.fits
    with pytest.raises(DoesNotFit, match=r"4,096 tokens needs 5\.0 GiB .* has 4\.0 GiB") as caught:
        estimate.require("m")
    assert (caught.value.needed_bytes, caught.value.available_bytes) == (5 << 30, 4 << 30)
    Estimate(3 << 30, 1 << 30, 4096, 4 << 30).require("m")


def test_an_image_models_text_part_counts() -> None:
    inner = {key: value for key, value in tiny.config("gemma3_text").items() if key != "vocab_size"}
    outer = {"model_type": "gemma3", "vocab_size": 288, "text_config": inner, "vision_config": {}}
    assert text_config(outer)["vocab_size"] == 288
    assert kv_layers(outer) == kv_layers(tiny.config("gemma3_text"))


def test_a_configuration_without_layers_is_named() -> None:
    with pytest.raises(ModelInvalid, match="num_hidden_layers"):
        kv_layers({"model_type": "llama"})


def test_numbers_for_people() -> None:
    assert [show_bytes(n) for n in (12, 5 << 20, 3 << 29)] == ["12 bytes", "5 MiB", "1.5 GiB"]
    assert [show_count(n) for n in (900, 135_000_000, 7_240_000_000)] == ["900", "135M", "7.2B"]
