"""Linear layers in whatever form they lie in memory: their shape, and their weight as plain numbers.

Knows: dense, MLX-quantised and GGUF-block layers, parts of layers that lie on several ranks, and layers of
experts. Does not know adapters or files.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.nn.layers import distributed as divided

from mlxserve.kernels_metal import dispatch
from mlxserve.kernels_metal.layers import GGUFLinear
from mlxserve.models.definitions import import_definition

# A rank's part of a layer: of its outputs, or of its inputs, whose products the ranks then add up.
OUTPUT_PARTS = (divided.AllToShardedLinear, divided.QuantizedAllToShardedLinear)
INPUT_PARTS = (divided.ShardedToAllLinear, divided.QuantizedShardedToAllLinear)
_FORMS = (nn.Linear, nn.QuantizedLinear, GGUFLinear, *OUTPUT_PARTS, *INPUT_PARTS)


def is_linear(module: nn.Module) -> bool:
    return isinstance(module, _FORMS)


def adds_up(module: nn.Module) -> bool:
    """True for a rank's part of a layer that ends with a sum over all ranks, and its bias after that."""
    return isinstance(module, INPUT_PARTS)


def own_product(layer: Any, x: mx.array) -> mx.array:
    """What a layer that `adds_up` gives to the sum: x (…, in of this rank) -> (…, out), without the bias."""
    if not hasattr(layer, "bits"):
        return x @ layer["weight"].T
    return mx.quantized_matmul(
        x,
        layer["weight"],
        scales=layer["scales"],
        biases=layer.get("biases"),
        transpose=True,
        group_size=layer.group_size,
        bits=layer.bits,
        mode=layer.mode,
    )


def is_switch(module: nn.Module) -> bool:
    """True for a layer of experts."""
    switch = import_definition("switch_layers")
    return isinstance(module, switch.SwitchLinear | switch.QuantizedSwitchLinear)


def linear_shape(layer: nn.Module) -> tuple[int, int]:
    """(inputs, outputs) of a linear layer in any form, of a part those that it has."""
    if hasattr(layer, "bits"):
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
