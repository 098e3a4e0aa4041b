"""Linear layers in whatever form they lie in memory: their shape, and their weight as plain numbers.

Knows: dense, MLX-quantised and GGUF-block layers, and layers of experts. Does not know adapters or files.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxserve.kernels_metal import dispatch
from mlxserve.kernels_metal.layers import GGUFLinear
from mlxserve.models.definitions import import_definition


def is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | nn.QuantizedLinear | GGUFLinear)


def is_switch(module: nn.Module) -> bool:
    """True for a layer of experts."""
    switch = import_definition("switch_layers")
    return isinstance(module, switch.SwitchLinear | switch.QuantizedSwitchLinear)


def linear_shape(layer: nn.Module) -> tuple[int, int]:
    """(inputs, outputs) of a linear layer in any form."""
    if isinstance(layer, nn.QuantizedLinear):
        return layer.weight.shape[1] * 32 // layer.bits, layer.weight.shape[0]
    if isinstance(layer, GGUFLinear):
        return layer.input_dims, layer.output_dims
    return layer.weight.shape[1], layer.weight.shape[0]


def dense_weight(layer: Any) -> mx.array:
    """The weight as plain numbers: (out, in), or (experts, out, in)."""
    if hasattr(layer, "kind") and layer["weight"].dtype == mx.uint8:
        return dispatch.gguf_dequantize(layer["weight"], layer.kind)
    if not hasattr(layer, "bits"):
        return layer["weight"]
    extra = {"global_scale": layer["global_scale"]} if layer.get("global_scale") is not None else {}
    return mx.dequantize(
        layer["weight"],
        layer["scales"],
        layer.get("biases"),
        layer.group_size,
        layer.bits,
        layer.mode,
        **extra,
    )
