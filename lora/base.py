"""Opens the model that is trained, and writes one back: packed weights stay packed, on a CPU too.

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
from mlx.utils import tree_flatten

from mlxserve.config import LoadConfig
from mlxserve.lora.checkpoint import write_folder
from mlxserve.models.files import inspect
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
    """A model to train: `name` as the user wrote it, `config` with the quantisation that it has now."""

    name: str
    path: Path
    model: nn.Module
    config: dict[str, Any]
    tokenizer: Tokenizer

    @property
    def vocabulary(self) -> int:
        text = self.config.get("text_config") or {}
        return int(self.config.get("vocab_size") or text.get("vocab_size") or self.tokenizer.vocab_size)


def open_base(name: str, *, quantize: int | None = None, group_size: int = 64) -> Base:
    """Load what `name` means. quantize: bits to pack a float model to (QLoRA).

    Raises as `resolve` and `load` do.
    """
    files = resolve(name)
    if files.kind == "folder" and _is_packed(files.path):
        model, config = _load_packed(files)
        return Base(name, files.path, model, config, load_tokenizer(files.path))
    loaded = load(files, LoadConfig())
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

        return Base(name, files.path, loaded.model, config, tokenizer_from_gguf(loaded.metadata))
    return Base(name, files.path, loaded.model, config, load_tokenizer(files.path))


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
        _write_weights(folder, dict(tree_flatten(model.parameters())))
        (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
        for pattern in TOKENIZER_FILES if base.path.is_dir() else ():
            for path in base.path.glob(pattern):
                shutil.copy(path, folder / path.name)

    write_folder(target, fill)


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
