"""Tiny models in files for tests of loading: plain, packed, in several files, in another toolkit's names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlxserve.models.resolve import ModelFiles
from tests import tiny

# Widths that groups of 32 divide on each of two ranks.
WIDE = {"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 64}


def config(kind: str, *, packed: bool = False) -> dict[str, Any]:
    """A tiny configuration of `kind`, wide enough for two ranks if `packed`."""
    wide = {key: value for key, value in WIDE.items() if packed and key in tiny.config(kind)}
    return tiny.config(kind, **wide)


def write(
    folder: Path, kind: str, *, packed: bool = False, scale: float = 1.0, **overrides: Any
) -> ModelFiles:
    """A folder of `kind` in float32, or packed to 4 bits in groups of 32; matrices scaled by `scale`."""
    settings = {**config(kind, packed=packed), **overrides}
    model = tiny.build(kind, **settings)
    model.apply(lambda value: scale * value if value.ndim > 1 else value)
    if packed:
        nn.quantize(
            model,
            group_size=32,
            bits=4,
            class_predicate=lambda _, module: (
                hasattr(module, "to_quantized") and module.weight.shape[-1] % 64 == 0
            ),
        )
        settings["quantization"] = {"group_size": 32, "bits": 4}
    weights = dict(tree_flatten(model.parameters()))
    return write_weights(folder, settings, {"model.safetensors": weights})


def write_weights(
    folder: Path, settings: dict[str, Any], files: dict[str, dict[str, mx.array]]
) -> ModelFiles:
    """A folder of one file, or of several with their index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings))
    for name, weights in files.items():
        mx.save_safetensors(str(folder / name), weights, {"format": "mlx"})
    if len(files) > 1:
        where = {tensor: name for name, weights in files.items() for tensor in weights}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return ModelFiles("folder", folder, folder.name, "path")


def parameters(model: Any) -> dict[str, mx.array]:
    return dict(tree_flatten(model.parameters()))


def differing(mine: dict[str, mx.array], theirs: dict[str, mx.array]) -> list[str]:
    """Names whose arrays differ in type, shape or any bit, or that only one of the two has."""
    return [
        name
        for name in sorted(mine.keys() | theirs.keys())
        if name not in mine or name not in theirs or not _same(mine[name], theirs[name])
    ]


def _same(mine: mx.array, theirs: mx.array) -> bool:
    if mine.dtype != theirs.dtype or mine.shape != theirs.shape:
        return False
    bits = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}[mine.dtype.size]
    return bool(mx.array_equal(mx.contiguous(mine).view(bits), mx.contiguous(theirs).view(bits)))
