"""Adapter folders in mlx-lm's and PEFT's formats, read into one plain form.

Knows: names, shapes and scales of both formats. Does not know models, training or serving.

mlx-lm: `adapters.safetensors`, `….lora_a` (in, r), `….lora_b` (r, out), `….m`, `scale`.
PEFT: `adapter_model.safetensors`, `base_model.model.….lora_A.weight` (r, in), `….lora_B.weight` (out, r),
`….lora_magnitude_vector`, scale = lora_alpha / r (rsLoRA: / sqrt(r)).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlxserve.errors import ModelInvalid, ModelNotFound, Unsupported

ADAPTER_LEAVES = ("lora_a", "lora_b", "m")
CONFIG = "adapter_config.json"
MLX_FILE, PEFT_FILE = "adapters.safetensors", "adapter_model.safetensors"
PEFT_PICKLE = "adapter_model.bin"
PEFT_PREFIX = "base_model.model."
# PEFT settings that change what an adapter computes and that are not done here: value that is harmless.
PEFT_HARMLESS: dict[str, tuple[Any, ...]] = {
    "bias": ("none", None),
    "modules_to_save": (None, []),
    "lora_bias": (False, None),
    "trainable_token_indices": (None, []),
    "layer_replication": (None, []),
    "megatron_config": (None,),
    "target_parameters": (None, []),
    "alora_invocation_tokens": (None,),
    "fan_in_fan_out": (False, None),
    "use_qalora": (False, None),
}


@dataclass(slots=True)
class Adapter:
    """An adapter in plain form: arrays under mlx-lm's names and shapes, float32.

    scales: of each adapted layer's path. kind: lora, dora or full.
    """

    kind: str
    arrays: dict[str, mx.array]
    scales: dict[str, float]
    base: str = ""
    dropout: float = 0.0
    format: str = "mlx-lm"
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        return max((_rank(name, a) for name, a in self.arrays.items() if name.endswith(".lora_a")), default=0)

    @property
    def paths(self) -> list[str]:
        return sorted(self.scales)


def _rank(name: str, a: mx.array) -> int:
    return a.shape[1]  # (in, r), and (experts, r, in)


def read(folder: Path) -> Adapter:
    """An adapter folder in either format. Raises ModelNotFound or ModelInvalid, naming the file at fault."""
    if not folder.is_dir():
        raise ModelNotFound(f"There is no adapter folder {folder}.", param="adapter")
    if not (folder / CONFIG).is_file() and (folder / "final" / CONFIG).is_file():
        raise ModelNotFound(
            f"{folder} is a run's folder; its adapter is {folder / 'final'}.", param="adapter"
        )
    config = _read_json(folder / CONFIG)
    if (folder / PEFT_FILE).is_file():
        return _whole(_from_peft(config, _arrays(folder / PEFT_FILE), folder), folder)
    if (folder / MLX_FILE).is_file():
        return _whole(_from_mlx(config, _arrays(folder / MLX_FILE), folder), folder)
    pickled = (folder / PEFT_PICKLE).is_file()
    more = f"; {PEFT_PICKLE} is a pickle, which can run code and is not read" if pickled else ""
    raise ModelInvalid(f"{folder} holds neither {MLX_FILE} nor {PEFT_FILE}{more}.", param="adapter")


def _whole(adapter: Adapter, folder: Path) -> Adapter:
    """The adapter itself. Raises ModelInvalid where a layer lacks a factor, or its factors have two ranks."""
    for path in adapter.paths:
        a, b = (adapter.arrays.get(f"{path}.{leaf}") for leaf in ("lora_a", "lora_b"))
        if a is None or b is None:
            raise ModelInvalid(
                f"{folder}: the adapter lacks {path}.{'lora_a' if a is None else 'lora_b'}.", param="adapter"
            )
        inner = b.shape[-1] if a.ndim == 3 else b.shape[0]
        if a.ndim != b.ndim or a.ndim not in (2, 3) or a.shape[1] != inner:
            raise ModelInvalid(
                f"{folder}: the factors of {path}, {list(a.shape)} and {list(b.shape)}, have no common rank.",
                param="adapter",
            )
    return adapter


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelInvalid(f"{path} cannot be read: {error.strerror}.", param="adapter") from error
    except ValueError as error:
        raise ModelInvalid(f"{path} is not valid JSON: {error}.", param="adapter") from error
    if not isinstance(values, dict):
        raise ModelInvalid(f"{path} holds no object.", param="adapter")
    return values


def _arrays(path: Path) -> dict[str, mx.array]:
    try:
        arrays: Any = mx.load(str(path))
    except RuntimeError as error:
        raise ModelInvalid(f"{path} cannot be read: {' '.join(str(error).split())}.") from error
    if not arrays:
        raise ModelInvalid(f"{path} holds no tensors.", param="adapter")
    return dict(arrays)


def _from_mlx(config: Mapping[str, Any], arrays: dict[str, mx.array], folder: Path) -> Adapter:
    kind = config.get("fine_tune_type", "lora")
    base = str(config.get("base_model_name_or_path") or config.get("model") or "")
    if kind == "full":
        return Adapter("full", arrays, {}, base, settings=dict(config))
    odd = sorted(name for name in arrays if name.rpartition(".")[2] not in ADAPTER_LEAVES)
    if odd:
        raise ModelInvalid(f"{folder} holds {odd[0]}, which is no part of an adapter.", param="adapter")
    settings = config.get("lora_parameters") or {}
    if "scale" not in settings:
        raise ModelInvalid(f"{folder / CONFIG} gives no scale in lora_parameters.", param="adapter")
    paths = {name.rpartition(".")[0] for name in arrays}
    scales = dict.fromkeys(paths, float(settings["scale"]))
    return Adapter(kind, _floats(arrays), scales, base, settings=dict(config))


def _floats(arrays: dict[str, mx.array]) -> dict[str, mx.array]:
    return {name: value.astype(mx.float32) for name, value in arrays.items()}


def _from_peft(config: Mapping[str, Any], arrays: dict[str, mx.array], folder: Path) -> Adapter:
    if config.get("peft_type", "LORA") != "LORA":
        raise Unsupported(f"{folder} is a {config['peft_type']} adapter; only LoRA and DoRA are read.")
    for name, harmless in PEFT_HARMLESS.items():
        if name in config and config[name] not in harmless:
            raise Unsupported(f"{folder}: PEFT's {name}={config[name]!r} is not supported.", param=name)
    names = {
        "lora_A.weight": "lora_a",
        "lora_B.weight": "lora_b",
        "lora_magnitude_vector": "m",
        "lora_magnitude_vector.weight": "m",
    }
    made: dict[str, mx.array] = {}
    for name, value in arrays.items():
        ending = next((e for e in sorted(names, key=len, reverse=True) if name.endswith("." + e)), None)
        if ending is None:
            raise Unsupported(f"{folder} holds {name}, which is no part of a LoRA on a linear layer.")
        path = name.removesuffix("." + ending).removeprefix(PEFT_PREFIX)
        made[f"{path}.{names[ending]}"] = value.T if value.ndim == 2 else value.reshape(-1)
    paths = sorted({name.rpartition(".")[0] for name in made})
    scales = {path: _peft_scale(config, path, made) for path in paths}
    kind = "dora" if config.get("use_dora") else "lora"
    base = str(config.get("base_model_name_or_path") or "")
    return Adapter(kind, _floats(made), scales, base, format="peft", settings=dict(config))


def _peft_scale(config: Mapping[str, Any], path: str, arrays: Mapping[str, mx.array]) -> float:
    """alpha / rank of one layer, patterns honoured: a pattern is a path's ending or a regular expression."""
    rank = _pattern(config.get("rank_pattern"), path, config.get("r", 8))
    alpha = _pattern(config.get("alpha_pattern"), path, config.get("lora_alpha", 8))
    a = arrays.get(f"{path}.lora_a")
    if a is not None and a.shape[1] != rank:
        raise ModelInvalid(f"{path} has rank {a.shape[1]}, its configuration says {rank}.", param="adapter")
    return float(alpha) / (rank**0.5 if config.get("use_rslora") else rank)


def _pattern(patterns: Mapping[str, Any] | None, path: str, default: Any) -> Any:
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", path):
            return value
    return default


def digest_of(folder: Path) -> str:
    """A name for exactly this adapter: its configuration and its tensors' file."""
    seen = hashlib.sha256()
    for name in (CONFIG, PEFT_FILE, MLX_FILE):
        path = folder / name
        if path.is_file():
            with path.open("rb") as file:
                seen.update(name.encode() + hashlib.file_digest(file, "sha256").digest())
    return seen.hexdigest()[:32]
