"""Writes tiny GGUF files from mlx-lm models, the way llama.cpp's converters do.

It shares nothing with mlxserve's reader: names come from the `gguf` package's own map of Hugging Face
names, rearrangements are written here in the converters' direction.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import mlx.nn as nn
import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from mlx.utils import tree_flatten, tree_map_with_path, tree_unflatten

from mlxserve.models.definitions import find_definition

ARCHITECTURES = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
INTERLEAVED = {"llama", "granite", "smollm3", "mistral", "mistral3"}
PLUS_ONE = {"gemma", "gemma2", "gemma3"}
# mlx-lm's names that differ from what the gguf package knows as Hugging Face's.
RENAMED = (
    (r"block_sparse_moe\.switch_mlp\.gate_proj", "block_sparse_moe.experts.w1"),
    (r"block_sparse_moe\.switch_mlp\.up_proj", "block_sparse_moe.experts.w3"),
    (r"block_sparse_moe\.switch_mlp\.down_proj", "block_sparse_moe.experts.w2"),
    (r"mlp\.switch_mlp\.", "mlp.experts."),
    (r"self_attn\.sinks$", "self_attn.sinks.weight"),
)


def build(config: Mapping[str, Any], seed: int = 0, norm_center: float = 1.0) -> nn.Module:
    """The definition of `config` with random float32 parameters, norms, biases and sinks included."""
    module = find_definition(config)
    mx.random.seed(seed)
    model = module.Model(module.ModelArgs.from_dict(dict(config)))

    def randomised(name: str, value: mx.array) -> mx.array:
        if value.ndim == 1 or "_norm.weight" in name:
            center = norm_center if "norm" in name or "ln_" in name else 0.0
            center = 0.0 if name.endswith("bias") else center
            return center + 0.2 * mx.random.normal(value.shape)
        return value

    model.update(tree_map_with_path(randomised, model.parameters()))
    mx.eval(model.parameters())
    return model


def weights_of(model: nn.Module) -> dict[str, np.ndarray]:
    return {name: np.array(value) for name, value in tree_flatten(model.parameters())}


def write(
    path: Path,
    architecture: str,
    weights: Mapping[str, np.ndarray],
    config: Mapping[str, Any],
    *,
    extra: Callable[[GGUFWriter], Any] = lambda writer: None,
    kinds: Callable[[str], GGMLQuantizationType] = lambda name: GGMLQuantizationType.F32,
    tensors: Mapping[str, np.ndarray] | None = None,
    drop: tuple[str, ...] = (),
) -> Path:
    """One GGUF file. `extra` adds metadata, `kinds` picks a tensor's type, `tensors` adds tensors."""
    writer = GGUFWriter(path, architecture)
    _common(writer, config)
    extra(writer)
    for name, value in as_stored(architecture, weights, config).items():
        if name not in drop:
            kind = kinds(name)
            writer.add_tensor(name, quantize(value, kind), raw_dtype=kind)
    for name, value in (tensors or {}).items():
        writer.add_tensor(name, value)
    finish(writer)
    return path


def finish(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def as_stored(
    architecture: str, weights: Mapping[str, np.ndarray], config: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    """Tensors under the file's names, rearranged as its converter would."""
    kind = ARCHITECTURES["llama" if architecture == "mistral" else architecture]
    names = gguf.TensorNameMap(kind, config["num_hidden_layers"])
    stored = {}
    for name, value in weights.items():
        for pattern, replacement in RENAMED:
            name = re.sub(pattern, replacement, name)
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert found, f"{architecture} has no tensor for {name}"
        stored[found] = _rearranged(architecture, name, value, config)
    return stored


def _rearranged(architecture: str, name: str, value: np.ndarray, config: Mapping[str, Any]) -> np.ndarray:
    if architecture in INTERLEAVED and re.search(r"\.q_proj\.", name):
        value = interleave(value, config["num_attention_heads"])
    if architecture in INTERLEAVED and re.search(r"\.k_proj\.", name):
        value = interleave(value, config["num_key_value_heads"])
    if architecture in PLUS_ONE and name.endswith("norm.weight"):
        value = value + np.float32(1)
    return np.ascontiguousarray(value, np.float32)


def interleave(value: np.ndarray, heads: int) -> np.ndarray:
    """Row 2j of a head becomes its row j, row 2j + 1 its row j + width/2."""
    halves = value.reshape(heads, 2, value.shape[0] // heads // 2, *value.shape[1:])
    return halves.swapaxes(1, 2).reshape(value.shape)


def _common(writer: GGUFWriter, config: Mapping[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_freq_base(config["rope_theta"])
    if "rms_norm_eps" in config:
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(3)


def load(config: Mapping[str, Any], arrays: Mapping[str, mx.array]) -> nn.Module:
    """A definition built from a reader's configuration, holding a reader's arrays."""
    module = find_definition(config)
    model = module.Model(module.ModelArgs.from_dict(dict(config)))
    weights = dict(arrays)
    if hasattr(model, "sanitize"):
        weights = model.sanitize(weights)
    if config.get("quantization"):
        quantization = config["quantization"]

        def settings(layer: str, module: nn.Module) -> Any:
            return quantization.get(layer, f"{layer}.scales" in weights)

        nn.quantize(
            model,
            quantization["group_size"],
            quantization["bits"],
            mode=quantization["mode"],
            class_predicate=settings,
        )
    model.load_weights(list(weights.items()), strict=True)
    return model


def replaced(model: nn.Module, weights: Mapping[str, np.ndarray]) -> nn.Module:
    """The same model with other numbers."""
    model.update(tree_unflatten([(name, mx.array(value)) for name, value in weights.items()]))
    return model


def logits(model: nn.Module, tokens: int = 24, vocabulary: int = 288) -> np.ndarray:
    """(tokens, vocabulary) float32 logits of a fixed random prompt."""
    prompt = np.random.default_rng(7).integers(0, vocabulary, (1, tokens))
    return np.array(model(mx.array(prompt)))[0].astype(np.float32)
