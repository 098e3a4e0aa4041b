"""Adapter folders in mlx-lm's and PEFT's formats, in both directions.

Knows: names, shapes and scales of both formats. Does not know training. An adapter that does not fit the
model key by key and shape by shape is an error; nothing is loaded in part.

mlx-lm: `adapters.safetensors`, `….lora_a` (in, r), `….lora_b` (r, out), `….m`, `scale`.
PEFT: `adapter_model.safetensors`, `base_model.model.….lora_A.weight` (r, in), `….lora_B.weight` (out, r),
`….lora_magnitude_vector`, scale = lora_alpha / r (rsLoRA: / sqrt(r)).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from mlxserve.errors import ModelInvalid, ModelNotFound, Unsupported
from mlxserve.lora.layers import ADAPTER_LEAVES, adapt, adapted_layers, prepare_frozen
from mlxserve.models.definitions import import_definition

CONFIG = "adapter_config.json"
MLX_FILE, PEFT_FILE = "adapters.safetensors", "adapter_model.safetensors"
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


def of_model(model: nn.Module, *, base: str = "", kind: str | None = None) -> Adapter:
    """The adapters that a model carries now; without any, its trainable parameters (full fine-tuning)."""
    layers = adapted_layers(model)
    if kind == "full" or not layers:
        arrays = dict(tree_flatten(model.trainable_parameters()))
        return Adapter("full", arrays, {}, base)
    arrays, scales = {}, {}
    for path, layer in layers.items():
        scales[path] = layer.scale
        arrays |= {f"{path}.{leaf}": layer[leaf] for leaf in ADAPTER_LEAVES if leaf in layer}
    dora = any(name.endswith(".m") for name in arrays)
    return Adapter("dora" if dora else "lora", arrays, scales, base)


def save(folder: Path, adapter: Adapter, settings: Mapping[str, Any] | None = None) -> None:
    """Write mlx-lm's format into an existing folder. `settings` is kept beside, for a person.

    mlx-lm has one scale for all layers: where they differ, the difference goes into `lora_b`.
    """
    arrays, scale = _one_scale(adapter)
    mx.save_safetensors(str(folder / MLX_FILE), arrays, {"format": "mlx"})
    config: dict[str, Any] = {
        "fine_tune_type": adapter.kind,
        "num_layers": -1,
        "model": adapter.base,
        "base_model_name_or_path": adapter.base,
        "lora_parameters": {
            "rank": adapter.rank,
            "scale": scale,
            "dropout": adapter.dropout,
            "keys": adapter.paths,
        },
    }
    if settings:
        config["mlxserve"] = dict(settings)
    if adapter.kind != "full":
        config["num_layers"] = 0  # keys are whole paths, which mlx-lm finds whatever the number
    (folder / CONFIG).write_text(json.dumps(config, indent=1), encoding="utf-8")


def _one_scale(adapter: Adapter) -> tuple[dict[str, mx.array], float]:
    scales = set(adapter.scales.values())
    if len(scales) <= 1:
        return adapter.arrays, next(iter(scales), 1.0)
    scale = max(scales)
    arrays = dict(adapter.arrays)
    for path, own in adapter.scales.items():
        arrays[f"{path}.lora_b"] = arrays[f"{path}.lora_b"] * (own / scale)
    return arrays, scale


def export_peft(folder: Path, adapter: Adapter) -> None:
    """Write PEFT's format into an existing folder. Raises Unsupported for what PEFT has no place for."""
    if adapter.kind == "full":
        raise Unsupported("A full fine-tuning is no adapter and has no PEFT form; use fuse.")
    arrays, scale = _one_scale(adapter)
    made: dict[str, mx.array] = {}
    ranks: dict[str, int] = {}
    for name, value in arrays.items():
        path, _, leaf = name.rpartition(".")
        if value.ndim == 3:
            raise Unsupported(f"{path} adapts a layer of experts, for which PEFT has no common form.")
        other = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight", "m": "lora_magnitude_vector"}[leaf]
        made[f"{PEFT_PREFIX}{path}.{other}"] = mx.contiguous(value.T) if value.ndim == 2 else value
        if leaf == "lora_a":
            ranks[path] = value.shape[1]
    rank = adapter.rank
    mx.save_safetensors(str(folder / PEFT_FILE), made, {"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": adapter.base,
        "r": rank,
        "lora_alpha": scale * rank,
        "lora_dropout": adapter.dropout,
        "use_rslora": False,
        "use_dora": adapter.kind == "dora",
        "target_modules": adapter.paths,
        "rank_pattern": {path: r for path, r in ranks.items() if r != rank},
        "alpha_pattern": {path: scale * r for path, r in ranks.items() if r != rank},
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=1), encoding="utf-8")


def read(folder: Path) -> Adapter:
    """An adapter folder in either format. Raises ModelNotFound or ModelInvalid, naming the file at fault."""
    if not folder.is_dir():
        raise ModelNotFound(f"There is no adapter folder {folder}.", param="adapter")
    config = _read_json(folder / CONFIG)
    if (folder / PEFT_FILE).is_file():
        return _from_peft(config, _arrays(folder / PEFT_FILE), folder)
    if (folder / MLX_FILE).is_file():
        return _from_mlx(config, _arrays(folder / MLX_FILE), folder)
    raise ModelInvalid(f"{folder} holds neither {MLX_FILE} nor {PEFT_FILE}.", param="adapter")


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


def attach(model: nn.Module, adapter: Adapter) -> None:
    """Put the adapter into the model. Raises ModelInvalid, naming the first key, unless all of it fits."""
    if adapter.kind == "full":
        _attach_full(model, adapter)
        return
    modules = dict(model.named_modules())
    checked = {path: _fitting(path, modules, adapter) for path in adapter.paths}
    if not checked:
        raise ModelInvalid("The adapter adapts no layer.", param="adapter")
    model.update_modules(tree_unflatten(list(checked.items())))
    model.freeze()
    for layer in checked.values():
        layer.unfreeze(keys=list(ADAPTER_LEAVES), recurse=False)
    prepare_frozen(model)
    mx.eval(model.trainable_parameters())


def _fitting(path: str, modules: Mapping[str, nn.Module], adapter: Adapter) -> nn.Module:
    base = modules.get(path)
    switch = import_definition("switch_layers")
    linear = (nn.Linear, nn.QuantizedLinear, switch.SwitchLinear, switch.QuantizedSwitchLinear)
    if base is None or not (isinstance(base, linear) or hasattr(base, "kind")):
        raise ModelInvalid(
            f"The adapter's layer {path} does not exist in this model; it was made for "
            f"{adapter.base or 'another one'}.",
            param="adapter",
        )
    a = adapter.arrays.get(f"{path}.lora_a")
    if a is None:
        raise ModelInvalid(f"The adapter lacks {path}.lora_a.", param="adapter")
    layer = adapt(base, adapter.kind, _rank(path, a), adapter.scales[path], adapter.dropout)
    for leaf in ADAPTER_LEAVES:
        if leaf not in layer:
            if f"{path}.{leaf}" in adapter.arrays:
                raise ModelInvalid(f"The adapter's {path}.{leaf} has no place in a {adapter.kind} layer.")
            continue
        value = adapter.arrays.get(f"{path}.{leaf}")
        if value is None:
            raise ModelInvalid(f"The adapter lacks {path}.{leaf}.", param="adapter")
        if value.shape != layer[leaf].shape:
            raise ModelInvalid(
                f"The adapter's {path}.{leaf} has shape {list(value.shape)}; the model's layer wants "
                f"{list(layer[leaf].shape)}.",
                param="adapter",
            )
        layer[leaf] = value
    return layer


def _attach_full(model: nn.Module, adapter: Adapter) -> None:
    present = dict(tree_flatten(model.parameters()))
    for name, value in adapter.arrays.items():
        if name not in present or present[name].shape != value.shape:
            raise ModelInvalid(
                f"The tensor {name} of the fine-tuning does not fit this model.", param="adapter"
            )
    cast = [(name, value.astype(present[name].dtype)) for name, value in adapter.arrays.items()]
    model.update(tree_unflatten(cast))
