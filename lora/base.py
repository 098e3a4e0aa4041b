"""Opens the model that is trained, and writes one back: packed weights stay packed, on a CPU too, and a file
has the floats that the model's own files have, whatever this device computes in.

Knows: models/load. What a user names becomes a model, its configuration and its tokenizer. Does not know
adapters or training.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from mlxserve.config import LoadConfig
from mlxserve.errors import UsageError
from mlxserve.kernels_metal.layers import GGUFEmbedding, GGUFLinear, GGUFSwitchLinear
from mlxserve.lora.checkpoint import write_folder
from mlxserve.models.definitions import import_definition
from mlxserve.models.files import inspect
from mlxserve.models.linear import dense_weight
from mlxserve.models.load import build, foreign_method, load, place, read_safetensors
from mlxserve.models.resolve import ModelFiles, resolve
from mlxserve.models.weights import cast_floats, quantize_now
from mlxserve.text.tokenizer import Tokenizer, load_tokenizer

TOKENIZER_FILES = (
    "tokenizer*",
    "*.jinja",
    "special_tokens_map.json",
    "vocab.*",
    "merges.txt",
    "generation_config.json",
)
SHARD_BYTES = 4 * 2**30


@dataclass(slots=True)
class Base:
    """A model to train: `name` as the user wrote it, `config` with the quantisation that it has now.

    stored: where this device computes in another dtype than the files have, the one that `write_model` gives
    floats again; kept: names of those that the files, too, have in float32.
    """

    name: str
    path: Path
    model: nn.Module
    config: dict[str, Any]
    tokenizer: Tokenizer
    stored: mx.Dtype | None = None
    kept: frozenset[str] = frozenset()

    @property
    def vocabulary(self) -> int:
        text = self.config.get("text_config") or {}
        return int(self.config.get("vocab_size") or text.get("vocab_size") or self.tokenizer.vocab_size)


def open_base(name: str, *, quantize: int | None = None, group_size: int = 64, floats: bool = False) -> Base:
    """Load what `name` means. quantize: bits to pack a float model to (QLoRA). floats: GGUF blocks become
    plain weights, to be trained themselves or written.

    Raises as `resolve` and `load` do, and UsageError where a packed model is to be packed otherwise.
    """
    files = resolve(name)
    if files.kind == "folder" and _is_packed(files.path):
        model, config = _load_packed(files)
        _refuse_other_bits(name, config, quantize)
        return Base(name, files.path, model, config, load_tokenizer(files.path), **_stored(files))
    # Of a GGUF file the loader takes the blocks apart first; on a CPU it would unpack what it has packed.
    at_once = quantize if files.kind == "gguf" and mx.default_device() != mx.cpu else None
    loaded = load(files, LoadConfig(quantize_bits=at_once, quantize_group_size=group_size))
    if floats:
        unpack_blocks(loaded.model, loaded.dtype)
    config = dict(loaded.config)
    if quantize is not None:
        quantize_now(loaded.model, quantize, group_size)
        mx.eval(loaded.model.parameters())
        config["quantization"] = {"group_size": group_size, "bits": quantize}
    elif mx.default_device() == mx.cpu:
        config.pop("quantization", None)  # the loader has unpacked it
        config.pop("quantization_config", None)
    if files.kind == "gguf":
        from mlxserve.text.gguf_vocab import tokenizer_from_gguf

        tokenizer = tokenizer_from_gguf(loaded.metadata)
    else:
        tokenizer = load_tokenizer(files.path)
    return Base(name, files.path, loaded.model, config, tokenizer, **_stored(files))


def _stored(files: ModelFiles) -> dict[str, Any]:
    """`stored` and `kept` of a Base; GGUF blocks stand for bfloat16."""
    if mx.default_device() != mx.cpu:
        return {}
    if files.kind == "gguf":
        return {"stored": mx.bfloat16}
    dtypes = {"F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16}
    tensors = inspect(files.path).tensors
    sizes = dict.fromkeys(dtypes, 0)
    for tensor in tensors.values():
        if tensor.dtype in sizes:
            sizes[tensor.dtype] += tensor.nbytes
    most = max(sizes, key=lambda name: sizes[name])
    kept = frozenset(name for name, tensor in tensors.items() if tensor.dtype == "F32" != most)
    return {"stored": dtypes[most] if sizes[most] else mx.bfloat16, "kept": kept}


def unpack_blocks(model: nn.Module, dtype: mx.Dtype) -> None:
    """Plain layers in place of those that hold GGUF blocks, one at a time."""
    switch = import_definition("switch_layers")
    kinds: dict[type, Any] = {
        GGUFLinear: nn.Linear,
        GGUFEmbedding: nn.Embedding,
        GGUFSwitchLinear: switch.SwitchLinear,
    }
    for path, module in model.named_modules():
        plain_class = next((plain for blocks, plain in kinds.items() if isinstance(module, blocks)), None)
        if plain_class is None:
            continue
        plain = plain_class.__new__(plain_class)
        nn.Module.__init__(plain)
        plain.weight = dense_weight(module).astype(dtype)
        if "bias" in module:
            plain.bias = module["bias"]
        mx.eval(plain.parameters())
        model.update_modules(tree_unflatten([(path, plain)]))


def _refuse_other_bits(name: str, config: Mapping[str, Any], quantize: int | None) -> None:
    stored = config["quantization"].get("bits")
    if quantize not in (None, stored):
        raise UsageError(
            f"{name} is packed in {stored} bits already; leave quantize={quantize} out, or name the model in "
            "16 bits.",
            param="quantize",
        )


def _is_packed(folder: Path) -> bool:
    config = inspect(folder).config
    return config.get("quantization") is not None and foreign_method(config) is None


def _load_packed(files: ModelFiles) -> tuple[nn.Module, dict[str, Any]]:
    """A folder in MLX's quantised form with its weights as stored; floats are float32 on a CPU."""
    folder = inspect(files.path)
    weights: dict[str, mx.array] = {}
    for shard in folder.weights:
        weights.update(read_safetensors(shard))
    model = build(folder.config)
    place(model, folder.config, weights, source=str(files.path))
    if mx.default_device() == mx.cpu:
        cast_floats(model, mx.float32)
    mx.eval(model.parameters())
    return model, dict(folder.config)


def write_model(target: Path, base: Base, model: nn.Module) -> None:
    """The model as a folder that reloads here and in mlx-lm, written whole or not at all.

    Layers that are no longer packed are marked in the configuration's quantisation.
    """
    config = {**base.config, **_quantization(base.config, model)}

    def fill(folder: Path) -> None:
        arrays = tree_flatten(model.parameters())
        _write_weights(folder, {name: _as_stored(name, value, base) for name, value in arrays})
        (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
        if not base.path.is_dir():
            _write_tokenizer(folder, base.tokenizer)
            return
        for pattern in TOKENIZER_FILES:
            for path in base.path.glob(pattern):
                shutil.copy(path, folder / path.name)

    write_folder(target, fill)


def _as_stored(name: str, value: mx.array, base: Base) -> mx.array:
    if base.stored is None or name in base.kept or not mx.issubdtype(value.dtype, mx.floating):
        return value
    return value.astype(base.stored)


def _write_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    """The files of a tokenizer that was part of a GGUF file."""
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    settings = {
        **tokenizer.special_tokens,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": tokenizer.add_bos,
        "chat_template": tokenizer.chat_template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1), encoding="utf-8")
    ends = {"eos_token_id": sorted(tokenizer.eos_token_ids)}
    (folder / "generation_config.json").write_text(json.dumps(ends, indent=1), encoding="utf-8")


def _quantization(config: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """The configuration's quantisation with False at layers that are plain now; nothing for a float model."""
    if config.get("quantization") is None:
        return {}
    settings = dict(config["quantization"])
    for path, module in model.named_modules():
        if hasattr(module, "to_quantized") and not hasattr(module, "bits"):
            settings[path] = False
    return {"quantization": settings, "quantization_config": settings}


def _write_weights(folder: Path, weights: dict[str, mx.array]) -> None:
    """safetensors in parts of at most 4 GiB, with the index that names each tensor's part."""
    parts: list[dict[str, mx.array]] = [{}]
    size = 0
    for name, value in weights.items():
        if parts[-1] and size + value.nbytes > SHARD_BYTES:
            parts.append({})
            size = 0
        parts[-1][name] = value
        size += value.nbytes
    if len(parts) == 1:
        mx.save_safetensors(str(folder / "model.safetensors"), parts[0], {"format": "mlx"})
        return
    index: dict[str, str] = {}
    for number, part in enumerate(parts, 1):
        file = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        mx.save_safetensors(str(folder / file), part, {"format": "mlx"})
        index |= dict.fromkeys(part, file)
    total = sum(value.nbytes for value in weights.values())
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=1)
    (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")
