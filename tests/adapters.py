"""Random adapter folders for a tiny model, and the same model with an adapter fused into its weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

MOST = ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj")


def write_adapter(
    folder: Path,
    model: nn.Module,
    seed: int,
    *,
    rank: int = 4,
    scale: float = 2.0,
    endings: Sequence[str] = MOST,
    dora: bool = False,
    base: str = "",
    form: str = "mlx-lm",
    size: float = 0.3,
) -> Path:
    """An adapter of random numbers on every layer with one of these endings; `form`: mlx-lm or peft."""
    draw = np.random.default_rng(seed)
    arrays: dict[str, np.ndarray] = {}
    for path, layer in model.named_modules():
        if not path.endswith(tuple(endings)):
            continue
        outputs, inputs = layer.weight.shape
        arrays[f"{path}.lora_a"] = size * draw.normal(size=(inputs, rank))
        arrays[f"{path}.lora_b"] = size * draw.normal(size=(rank, outputs))
        if dora:
            arrays[f"{path}.m"] = draw.uniform(2, 6, size=outputs)
    folder.mkdir(parents=True)
    config: dict[str, Any] = {"fine_tune_type": "dora" if dora else "lora", "base_model_name_or_path": base}
    config["lora_parameters"] = {"rank": rank, "scale": scale, "dropout": 0.0}
    name = "adapters.safetensors"
    if form == "peft":
        ends = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight", "m": "lora_magnitude_vector"}
        arrays = {
            "base_model.model.{}.{}".format(key.rpartition(".")[0], ends[key.rpartition(".")[2]]): value.T
            for key, value in arrays.items()
        }
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": scale * rank, "use_dora": dora}
        config["base_model_name_or_path"] = base
        name = "adapter_model.safetensors"
    (folder / "adapter_config.json").write_text(json.dumps(config))
    made = {key: mx.array(np.ascontiguousarray(value, np.float32)) for key, value in arrays.items()}
    mx.save_safetensors(str(folder / name), made)
    return folder


def fuse(model: nn.Module, folder: Path) -> nn.Module:
    """Write an mlx-lm adapter of `write_adapter` into the model's own weights, in NumPy."""
    config = json.loads((folder / "adapter_config.json").read_text())
    scale = config["lora_parameters"]["scale"]
    arrays: Any = mx.load(str(folder / "adapters.safetensors"))
    found = {key: np.array(value, np.float64) for key, value in arrays.items()}
    for path, layer in model.named_modules():
        if f"{path}.lora_a" not in found:
            continue
        weight = np.array(layer.weight, np.float64)
        weight = weight + scale * (found[f"{path}.lora_a"] @ found[f"{path}.lora_b"]).T
        if f"{path}.m" in found:
            weight *= (found[f"{path}.m"] / np.linalg.norm(weight, axis=1))[:, None]
        layer.weight = mx.array(weight.astype(np.float32))
    return model
