"""Puts weights into a definition: names and shapes checked, quantised or not, in the wanted dtype.

Knows: mlx.nn modules, MLX's quantisation and its per-layer overrides. Does not know where the tensors
came from (safetensors, GGUF).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from mlxserve.errors import ModelInvalid, UsageError
from mlxserve.models.definitions import import_definition

DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
QUANTIZE_BITS = (2, 3, 4, 5, 6, 8)
# The only (bits, group) pair of each of MLX's floating-point formats; scales of affine are not bytes.
FLOAT_FORMATS = {(4, 16): "nvfp4", (4, 32): "mxfp4", (8, 32): "mxfp8"}
FALLBACK_GROUPS = (64, 32, 128)


def working_dtype(name: str, stored: mx.Dtype) -> mx.Dtype:
    """The dtype to compute in: "auto" is as stored, but float32 on a CPU (16 bits are emulated there)."""
    if name == "auto":
        return mx.float32 if mx.default_device() == mx.cpu else stored
    if name not in DTYPES:
        raise UsageError(f"dtype must be auto, {', '.join(DTYPES)}; got {name!r}.", param="dtype")
    return DTYPES[name]


def stored_dtype(weights: Mapping[str, mx.array]) -> mx.Dtype:
    """The floating dtype that most bytes of `weights` have."""
    size_in_bytes: dict[mx.Dtype, int] = {}
    for value in weights.values():
        if mx.issubdtype(value.dtype, mx.floating):
            size_in_bytes[value.dtype] = size_in_bytes.get(value.dtype, 0) + value.nbytes
    return max(size_in_bytes, key=lambda dtype: size_in_bytes[dtype], default=mx.float32)


def quantize_as_stored(
    model: nn.Module, quantization: Mapping[str, Any], weights: Mapping[str, mx.array]
) -> None:
    """Make those layers quantised whose packed weights are in `weights`.

    A layer named in `quantization` takes its own settings (False leaves it alone); any other layer with
    scales takes what its packed shape says, since the file-wide default may be wrong for it.
    """

    def settings_of(path: str, module: nn.Module) -> bool | dict[str, Any]:
        if path in quantization:
            named = quantization[path]
            return named if isinstance(named, bool) else dict(named)
        if not hasattr(module, "to_quantized") or f"{path}.scales" not in weights:
            return False
        settings = _packed_settings(path, module, weights)
        if f"{path}.global_scale" in weights:
            settings["global_scale"] = True
        return settings

    nn.quantize(
        model,
        group_size=quantization["group_size"],
        bits=quantization["bits"],
        mode=quantization.get("mode", "affine"),
        class_predicate=settings_of,
    )


def _packed_settings(path: str, module: nn.Module, weights: Mapping[str, mx.array]) -> dict[str, Any]:
    scales, packed = weights[f"{path}.scales"], weights[f"{path}.weight"]
    columns = module.weight.shape[-1]
    group_size = columns // scales.shape[-1]
    bits = packed.shape[-1] * 32 // columns
    mode = "affine" if scales.dtype != mx.uint8 else FLOAT_FORMATS.get((bits, group_size))
    if mode is None:
        raise ModelInvalid(
            f"The tensor {path} is packed as {bits} bits in groups of {group_size}, a form MLX lacks."
        )
    return {"group_size": group_size, "bits": bits, "mode": mode}


def quantize_now(model: nn.Module, bits: int, group_size: int) -> dict[str, str]:
    """Quantise a float model in place; returns {path: why} for layers that took another group or none.

    A width that `group_size` does not divide falls back to 64, 32 or 128, else the layer stays as it is.
    The definition's own `quant_predicate` (mlx-lm) is honoured, overrides first.
    """
    if bits not in QUANTIZE_BITS:
        raise UsageError(
            f"--quantize takes one of {', '.join(map(str, QUANTIZE_BITS))} bits; got {bits}.",
            param="quantize",
        )
    notes: dict[str, str] = {}
    predicate: Callable[[str, nn.Module], Any] | None = getattr(model, "quant_predicate", None)

    def settings_of(path: str, module: nn.Module) -> bool | dict[str, Any]:
        if not hasattr(module, "to_quantized") or isinstance(module, nn.QuantizedLinear):
            return False
        own = predicate(path, module) if predicate else True
        if not own:
            return False
        wanted = own if isinstance(own, dict) else {"group_size": group_size, "bits": bits}
        width = module.weight.shape[-1]
        group = next((g for g in (wanted["group_size"], *FALLBACK_GROUPS) if width % g == 0), None)
        if group is None:
            notes[path] = f"kept in floating point: no group size divides its width {width}"
            return False
        if group != wanted["group_size"]:
            notes[path] = (
                f"quantised in groups of {group}: {wanted['group_size']} does not divide its width {width}"
            )
        return {**wanted, "group_size": group}

    nn.quantize(model, group_size=group_size, bits=bits, class_predicate=settings_of)
    return notes


def check_names_and_shapes(model: nn.Module, weights: Mapping[str, mx.array], source: str) -> None:
    """Raise ModelInvalid, naming the first tensor at fault, unless weights and definition match exactly."""
    wanted = dict(tree_flatten(model.parameters()))
    missing = sorted(wanted.keys() - weights.keys())
    if missing:
        raise ModelInvalid(
            f"{source} lacks the tensor {missing[0]}{_and_more(missing)} that its architecture needs."
        )
    surplus = sorted(weights.keys() - wanted.keys())
    if surplus:
        raise ModelInvalid(
            f"{source} holds the tensor {surplus[0]}{_and_more(surplus)}, "
            "for which its architecture has no place."
        )
    for name, value in wanted.items():
        if value.shape != weights[name].shape:
            raise ModelInvalid(
                f"The tensor {name} in {source} has shape {list(weights[name].shape)}; "
                f"its configuration says {list(value.shape)}."
            )


def _and_more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def drop_redundant_head(model: nn.Module, weights: dict[str, mx.array]) -> None:
    """Take out a stored output head where the definition uses the embedding instead (tied weights)."""
    names = {name for name, _ in tree_flatten(model.parameters())}
    for name in [n for n in weights if n.startswith(("lm_head.", "output.")) and n not in names]:
        del weights[name]


def dequantize_layers(
    model: nn.Module,
    dtype: mx.Dtype,
    *,
    more: Sequence[tuple[type, type]] = (),
    only: Callable[[str], bool] = lambda path: True,
) -> None:
    """Turn quantised layers into plain ones, one at a time, so that only one is held twice.

    For CPUs, where a product with packed weights is 10 to 75 times slower than a plain one. `more` names
    further classes and their plain counterparts; `only` chooses modules by path.
    """
    switch = import_definition("switch_layers")
    kinds: list[tuple[Any, Any]] = [
        (nn.QuantizedLinear, nn.Linear),
        (nn.QuantizedEmbedding, nn.Embedding),
        (switch.QuantizedSwitchLinear, switch.SwitchLinear),
        *more,
    ]
    for path, module in model.named_modules():
        plain = _dequantized(module, dtype, kinds) if only(path) else None
        if plain is not None:
            mx.eval(plain.parameters())
            model.update_modules(tree_unflatten([(path, plain)]))


def _dequantized(module: nn.Module, dtype: mx.Dtype, kinds: list[tuple[Any, Any]]) -> nn.Module | None:
    plain_class = next((plain for packed, plain in kinds if isinstance(module, packed)), None)
    if plain_class is None:
        return None
    extra = {"global_scale": module["global_scale"]} if module.get("global_scale") is not None else {}
    weight = mx.dequantize(
        module["weight"],
        module["scales"],
        module.get("biases"),
        module.group_size,
        module.bits,
        module.mode,
        **extra,
    )
    plain = plain_class.__new__(plain_class)
    nn.Module.__init__(plain)
    plain.weight = weight.astype(dtype)
    if "bias" in module:
        plain.bias = module["bias"].astype(dtype)
    if "group" in vars(module):  # a layer divided over ranks
        plain.group = module.group
    return plain


def cast_floats(
    model: nn.Module, dtype: mx.Dtype, *, only: Callable[[str], bool] = lambda name: True
) -> None:
    """Cast floating parameters to `dtype`, tensor by tensor, so that only one is held twice.

    Left alone: scales and biases of quantised layers, and what the definition's `cast_predicate`
    (mlx-lm) wants kept, such as a router's correction bias; but all of it goes to float32. `only` chooses
    parameters by name.
    """
    keep = getattr(model, "cast_predicate", lambda _: True)
    packed = {path for path, module in model.named_modules() if hasattr(module, "bits")}
    for name, value in tree_flatten(model.parameters()):
        if not mx.issubdtype(value.dtype, mx.floating) or value.dtype == dtype or not only(name):
            continue
        if name.rpartition(".")[0] in packed or (dtype != mx.float32 and not keep(name)):
            continue
        cast = value.astype(dtype)
        mx.eval(cast)
        model.update(tree_unflatten([(name, cast)]))
