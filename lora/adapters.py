"""Adapters into a model that trains and out of it, and files of mlx-lm's and PEFT's formats written.

Knows: adapted layers, and the formats' names, shapes and scales, which models/adapters.py reads. Does not know
training. An adapter that does not fit the model key by key and shape by shape is an error; nothing is loaded
in part.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from mlxserve.errors import ModelInvalid, Unsupported
from mlxserve.lora.layers import adapt, adapted_layers, prepare_frozen
from mlxserve.models.adapters import ADAPTER_LEAVES, CONFIG, MLX_FILE, PEFT_FILE, PEFT_PREFIX, Adapter
from mlxserve.models.adapters import read as read
from mlxserve.models.definitions import import_definition


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
    layer = adapt(base, adapter.kind, a.shape[1], adapter.scales[path], adapter.dropout)
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
