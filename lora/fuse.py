"""Adapters melted into the weights, and how far the result is from what was trained.

Knows: dense and MLX-quantised layers, drift per layer. A layer whose quantised form would lose much of its
adapter keeps 16 bits. Does not know files or models' configuration.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from mlxserve.lora.layers import Adapted, LoRASwitchLinear, adapted_layers, dense_weight
from mlxserve.models.definitions import import_definition

Keep = Literal["auto", "packed", "float"]
MAX_DRIFT = 0.5


@dataclass(frozen=True, slots=True)
class Fused:
    """One fused layer. drift: |fused - exact| / |change| in the Frobenius norm, where `change` is what the
    adapter adds: 0 keeps the adapter whole, at 1 the error is as large as the adapter."""

    path: str
    form: str
    drift: float


def fuse(
    model: nn.Module, *, keep: Keep = "auto", max_drift: float = MAX_DRIFT, dtype: mx.Dtype | None = None
) -> list[Fused]:
    """Replace every adapted layer by a plain one, in place; returns what became of each.

    keep: auto packs again unless the drift exceeds `max_drift`, then the layer stays in 16 bits; packed always
    packs; float never does. dtype: of weights and scales as they will be stored; None takes the layer's own.
    """
    report, replaced = [], []
    for path, layer in adapted_layers(model).items():
        plain, row = _fuse_layer(path, layer, keep, max_drift, dtype or _float_dtype(layer.linear))
        mx.eval(plain.parameters())
        report.append(row)
        replaced.append((path, plain))
    model.update_modules(tree_unflatten(replaced))
    return report


def _fuse_layer(
    path: str, layer: Adapted, keep: Keep, max_drift: float, dtype: mx.Dtype
) -> tuple[nn.Module, Fused]:
    base = layer.linear
    exact = layer.merged()
    change = exact - dense_weight(base).astype(mx.float32)
    if hasattr(base, "bits") and keep != "float":
        packed = _pack(_plain(layer, exact.astype(dtype)), base)
        drift = _drift(dense_weight(packed), exact, change)
        if keep == "packed" or drift <= max_drift:
            return packed, Fused(path, f"{base.bits} bits", drift)
    plain = _plain(layer, exact.astype(dtype))
    return plain, Fused(path, str(dtype).rpartition(".")[2], _drift(plain.weight, exact, change))


def _float_dtype(base: nn.Module) -> mx.Dtype:
    if hasattr(base, "bits"):
        scales = base["scales"].dtype
        return mx.bfloat16 if scales == mx.uint8 else scales
    return base["weight"].dtype if mx.issubdtype(base["weight"].dtype, mx.floating) else mx.float32


def _drift(fused: mx.array, exact: mx.array, change: mx.array) -> float:
    size = float(mx.linalg.norm(change.reshape(-1)))
    off = float(mx.linalg.norm((fused.astype(mx.float32) - exact).reshape(-1)))
    return off / size if size else 0.0


def _plain(layer: Adapted, weight: mx.array) -> nn.Module:
    """A dense layer of the right class holding `weight`, with the frozen layer's bias."""
    kind: Any = nn.Linear
    if isinstance(layer, LoRASwitchLinear):
        kind = import_definition("switch_layers").SwitchLinear
    plain = kind.__new__(kind)
    nn.Module.__init__(plain)
    plain.weight = weight
    if "bias" in layer.linear:
        plain.bias = layer.linear["bias"]
    return plain


def _pack(plain: nn.Module, base: nn.Module) -> nn.Module:
    return plain.to_quantized(group_size=base.group_size, bits=base.bits, mode=base.mode)
