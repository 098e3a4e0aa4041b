"""From files on disk to a definition with weights: folders in Hugging Face or MLX layout, and GGUF.

Knows: configuration → definition → weights → dtype. Does not download (hub), name models (resolve),
read text or run anything.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxserve.config import LoadConfig
from mlxserve.errors import ModelInvalid, UsageError
from mlxserve.kernels_metal.layers import use_blocks
from mlxserve.kernels_metal.switch import enabled
from mlxserve.models.definitions import find_definition
from mlxserve.models.files import inspect, read_json_object
from mlxserve.models.gguf import open_gguf
from mlxserve.models.gguf.weights import Mode
from mlxserve.models.resolve import ModelFiles
from mlxserve.models.weights import (
    cast_floats,
    check_names_and_shapes,
    dequantize_layers,
    drop_redundant_head,
    quantize_as_stored,
    quantize_now,
    stored_dtype,
    working_dtype,
)

# Formats of other toolkits that mlx-lm's own loader repacks.
FOREIGN_METHODS = ("awq", "gptq", "bitnet", "compressed-tensors", "modelopt")
GENERATION_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
CONTEXT_FIELDS = (
    "max_position_embeddings",
    "n_positions",
    "n_ctx",
    "max_seq_len",
    "max_sequence_length",
    "seq_length",
)


@dataclass(slots=True)
class LoadedModel:
    """A definition with its weights in memory.

    digest: names exactly these weights and settings (for caches on disk). generation_defaults: what the
    model's own generation_config.json says of sampling. context: tokens a sequence may hold. notes: what
    was done other than asked, for a person to read. metadata: a GGUF file's, else empty.
    """

    name: str
    path: Path
    model: nn.Module
    config: dict[str, Any]
    dtype: mx.Dtype
    context: int
    digest: str
    generation_defaults: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def weight_bytes(self) -> int:
        from mlx.utils import tree_flatten

        return sum(value.nbytes for _, value in tree_flatten(self.model.parameters()))


def load_folder(folder: Path, settings: LoadConfig, *, name: str | None = None) -> LoadedModel:
    """Load a folder with `config.json` and safetensors.

    Raises ModelInvalid for damaged or contradictory files, ModelUnsupported for an architecture that
    mlx-lm does not define, UsageError for settings that cannot hold.
    """
    files = inspect(folder)
    config = with_overrides(files.config, settings)
    if foreign_method(config) is not None:
        model, config = _load_foreign(folder, config)
        return _finish(model, config, settings, name or folder.name, folder, stored=mx.bfloat16)
    weights: dict[str, mx.array] = {}
    for shard in files.weights:
        weights.update(read_safetensors(shard))
    stored = stored_dtype(weights)
    model = build(config)
    place(model, config, weights, source=str(folder))
    loaded = _finish(model, config, settings, name or folder.name, folder, stored=stored)
    loaded.generation_defaults = stored_defaults(folder)
    return loaded


def load_gguf(path: Path, settings: LoadConfig, *, name: str | None = None) -> LoadedModel:
    """Load a `.gguf` file (the first part, if split).

    On Metal its blocks stay as they lie in the file; elsewhere on an accelerator they stay packed where MLX
    has an equal form; on a CPU, and to be quantised anew, they are dequantised.
    """
    file = open_gguf(path)
    config = with_overrides(file.config(), settings)
    dtype = working_dtype(settings.dtype, mx.bfloat16)
    weights = file.weights(dtype, mode=_gguf_mode(settings))
    if weights.quantization is not None:
        config["quantization"] = weights.quantization
    model = build(config)
    use_blocks(model, weights.blocks, dtype)
    place(model, config, weights.arrays, source=str(path))
    loaded = _finish(model, config, settings, name or path.stem, path, stored=dtype)
    loaded.metadata = file.metadata
    loaded.generation_defaults = file.generation_defaults()
    return loaded


def _gguf_mode(settings: LoadConfig) -> Mode:
    if mx.default_device() == mx.cpu or settings.quantize_bits is not None:
        return "float"
    return "blocks" if enabled("gguf") else "packed"


def load(files: ModelFiles, settings: LoadConfig) -> LoadedModel:
    """Load what `resolve` found, whichever layout it has."""
    return (load_gguf if files.kind == "gguf" else load_folder)(files.path, settings, name=files.name)


def read_safetensors(path: Path) -> dict[str, mx.array]:
    """The tensors of one file, lazily: bytes are read when a tensor is evaluated."""
    tensors = mx.load(str(path))
    assert isinstance(tensors, dict)
    return tensors


def with_overrides(config: Mapping[str, Any], settings: LoadConfig) -> dict[str, Any]:
    """The configuration with RoPE fields replaced as asked; unknown fields are a UsageError."""
    changed = dict(config)
    for key, value in settings.rope.items():
        if not key.startswith("rope_"):
            raise UsageError(
                f"{key!r} is no RoPE field; they start with rope_ (rope_theta, rope_scaling).", param=key
            )
        changed[key] = value
        if isinstance(changed.get("text_config"), dict):
            changed["text_config"] = {**changed["text_config"], key: value}
        if isinstance(changed.get("rope_parameters"), dict) and key == "rope_theta":
            changed["rope_parameters"] = {**changed["rope_parameters"], key: value}
    return changed


def foreign_method(config: Mapping[str, Any]) -> str | None:
    """The name of another toolkit's quantisation that the weights are in, or None."""
    if config.get("quantization") is not None:
        return None
    method = (config.get("quantization_config") or {}).get("quant_method")
    return method if method in FOREIGN_METHODS else None


def build(config: Mapping[str, Any]) -> nn.Module:
    """The definition's model for `config`, with unevaluated random weights (nothing is allocated)."""
    definition = find_definition(config)
    try:
        return definition.Model(definition.ModelArgs.from_dict(dict(config)))
    except (TypeError, KeyError, ValueError, AttributeError, AssertionError) as error:
        raise ModelInvalid(
            f"The configuration does not fit its architecture {config.get('model_type')!r}: {error}."
        ) from error


def place(model: nn.Module, config: Mapping[str, Any], weights: dict[str, mx.array], *, source: str) -> None:
    """Put `weights` into `model`: renamed by the definition, quantised as stored, checked, strict."""
    if hasattr(model, "sanitize"):
        try:
            weights = dict(model.sanitize(weights))
        except (KeyError, ValueError, IndexError) as error:
            raise ModelInvalid(f"{source} lacks the tensor {error} that its architecture needs.") from error
    quantization = quantization_of(config)
    if quantization is not None:
        quantize_as_stored(model, quantization, weights)
    drop_redundant_head(model, weights)
    check_names_and_shapes(model, weights, source)
    model.eval()
    model.load_weights(list(weights.items()), strict=True)


def quantization_of(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """How the stored weights are packed, in the form nn.quantize takes; None for plain ones."""
    stored = config.get("quantization")
    if stored is not None:
        return dict(stored)
    other = (
        config.get("quantization_config")
        or (config.get("text_config") or {}).get("quantization_config")
        or {}
    )
    method = other.get("quant_method")
    if method in ("mxfp4", "mxfp8"):
        return {"group_size": 32, "bits": int(method[-1]), "mode": method}
    if (
        method == "fp8"
        and other.get("scale_fmt") == "ue8m0"
        and list(other.get("weight_block_size", ())) == [32, 32]
    ):
        return {"group_size": 32, "bits": 8, "mode": "mxfp8"}
    if other and method is None and "bits" in other and "group_size" in other:
        return dict(other)
    return None


def _load_foreign(folder: Path, config: dict[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    """AWQ, GPTQ and the like: mlx-lm's own loader repacks them."""
    from mlx_lm.utils import load_model

    try:
        return load_model(folder, lazy=True, model_config=config)
    except (ValueError, FileNotFoundError) as error:
        raise ModelInvalid(f"{folder} could not be repacked for MLX: {error}") from error


def _finish(
    model: nn.Module, config: dict[str, Any], settings: LoadConfig, name: str, path: Path, *, stored: mx.Dtype
) -> LoadedModel:
    dtype = working_dtype(settings.dtype, stored)
    notes = []
    if settings.quantize_bits is not None:
        odd = quantize_now(model, settings.quantize_bits, settings.quantize_group_size)
        notes = [f"{layer}: {why}" for layer, why in odd.items()]
    if mx.default_device() == mx.cpu:
        dequantize_layers(model, dtype)
    if dtype != stored or mx.default_device() == mx.cpu:
        cast_floats(model, dtype)
    mx.eval(model.parameters())
    return LoadedModel(
        name=name,
        path=path,
        model=model,
        config=config,
        dtype=dtype,
        context=context_of(config, settings),
        digest=weights_digest(path, config, settings, dtype),
        notes=notes,
    )


def context_of(config: Mapping[str, Any], settings: LoadConfig) -> int:
    """Tokens a sequence may hold: as asked, else the configuration's own, else 4,096."""
    if settings.context is not None:
        if settings.context < 1:
            raise UsageError(f"--context must be at least 1, not {settings.context}.", param="context")
        return settings.context
    for source in (config, config.get("text_config") or {}):
        for key in CONTEXT_FIELDS:
            if isinstance(source.get(key), int) and source[key] > 0:
                return source[key]
    return 4096


def stored_defaults(folder: Path) -> dict[str, Any]:
    """The sampling fields of the model's generation_config.json, where it has an opinion."""
    file = folder / "generation_config.json"
    if not file.is_file():
        return {}
    stored = read_json_object(file)
    chosen = {key: stored[key] for key in GENERATION_FIELDS if stored.get(key) is not None}
    if stored.get("do_sample") is False:
        chosen["temperature"] = 0.0
    return chosen


def weights_digest(path: Path, config: Mapping[str, Any], settings: LoadConfig, dtype: mx.Dtype) -> str:
    """A name for these weights: files by name, size and time of change, configuration, settings."""
    seen = hashlib.sha256()
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    for file in files:
        facts = file.stat()
        seen.update(f"{file.name}:{facts.st_size}:{facts.st_mtime_ns};".encode())
    seen.update(json.dumps(config, sort_keys=True, default=str).encode())
    seen.update(f"{settings.quantize_bits}:{settings.quantize_group_size}:{dtype}".encode())
    return seen.hexdigest()[:32]
