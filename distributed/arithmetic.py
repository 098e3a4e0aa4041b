"""Counts a model's tensors from its definition, without giving any of them memory.

Knows: mlx-lm's definitions built with lazy arrays, quantised lazily, divided by their own `shard()` for a
group that is not there. Does not know machines (`plan`) or where a configuration comes from (`sources`).

An MLX array that is never evaluated has a shape and a dtype and costs nothing, so a model of 405 billion
parameters is counted in half a second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlxserve.config import LoadConfig
from mlxserve.distributed.blueprint import DTYPES
from mlxserve.distributed.facts import Facts, File, Place, Tensor
from mlxserve.distributed.sharding import shard_model
from mlxserve.distributed.trace import FakeGroup
from mlxserve.errors import ModelInvalid, ModelUnsupported, Unsupported, UsageError
from mlxserve.models.definitions import module_name
from mlxserve.models.files import TensorInfo
from mlxserve.models.kvlayout import HEADS, is_latent, kv_by_layer, text_config
from mlxserve.models.load import CONTEXT_FIELDS, build, context_of, foreign_method, place
from mlxserve.models.weights import quantize_now

CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts", "topk")
FP4 = {"mxfp4": (4, 32)}


def count(
    name: str,
    config: Mapping[str, Any],
    make: Callable[[], nn.Module],
    sizes: Iterable[int] = (),
    files: tuple[File, ...] = (),
    bits: int | None = None,
    stored: Mapping[str, int] | None = None,
    form: str | None = None,
    notes: tuple[str, ...] = (),
) -> Facts:
    """Facts of the model that `make` builds anew at each call, with its weights lazy.

    sizes: numbers of ranks to try tensor parallelism for. stored: bytes of tensors by name, where they lie
    in memory in another form than `make` gives them (blocks of a GGUF file), which `form` then names.
    """
    model = make()
    text = text_config(config)
    whole = _bytes(model)
    scale = {tensor: nbytes / whole[tensor] for tensor, nbytes in (stored or {}).items() if whole.get(tensor)}
    tensors = tuple(_tensors(model, config, whole, scale))
    divided: dict[int, Mapping[str, int] | str] = {}
    for size in sizes:
        if size > 1:
            found = divide(make, config, size)
            divided[size] = found if isinstance(found, str) else _scaled(found, scale)
    return Facts(
        name=name,
        config=dict(config),
        tensors=tensors,
        kv=tuple(kv_by_layer(config)),
        replicated_kv=is_latent(config),
        tensor_parallel=divided,
        files=files,
        bits=bits,
        form=form or _form(model, tensors),
        hidden=int(text.get("hidden_size") or text.get("n_embd") or 0),
        own_context=context_of(config, LoadConfig())
        if any(text.get(key) for key in CONTEXT_FIELDS)
        else None,
        notes=notes,
    )


def _scaled(sizes: Mapping[str, int], scale: Mapping[str, float]) -> dict[str, int]:
    return {name: round(nbytes * scale.get(name, 1.0)) for name, nbytes in sizes.items()}


def _bytes(model: nn.Module) -> dict[str, int]:
    return {name: value.nbytes for name, value in tree_flatten(model.parameters())}


def divide(
    make: Callable[[], nn.Module], config: Mapping[str, Any], size: int, rank: int = 0
) -> dict[str, int] | str:
    """Bytes of each tensor on one of `size` ranks of a tensor split, or a sentence why there is none."""
    if reason := _indivisible(config, size):
        return reason
    model = make()
    try:
        shard_model(model, FakeGroup(rank, size), module_name(config))
    except ModelUnsupported:
        return f"{config.get('model_type')} is not divided by tensors: nobody has written how"
    except (UsageError, TypeError, IndexError, ZeroDivisionError, AttributeError) as error:
        return f"its tensors cannot be divided over {size} ranks ({_first_line(error)})"
    return _bytes(model)


def _indivisible(config: Mapping[str, Any], size: int) -> str | None:
    """Heads that do not divide, in words; `shard()` itself would lose them silently."""
    text = text_config(config)
    heads = next((text[key] for key in HEADS if isinstance(text.get(key), int)), None)
    if heads is not None and heads % size:
        return f"its {heads} attention heads cannot be divided over {size} ranks"
    kv_heads = text.get("num_key_value_heads")
    if isinstance(kv_heads, int) and not is_latent(config) and kv_heads % size:
        return f"its {kv_heads} K/V heads cannot be divided over {size} ranks"
    return None


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _tensors(
    model: nn.Module, config: Mapping[str, Any], sizes: Mapping[str, int], scale: Mapping[str, float]
) -> Iterable[Tensor]:
    layers, places = layer_paths(model), end_places(model)
    modules = dict(model.named_modules())
    chosen = _chosen_experts(config)
    for name, nbytes in sizes.items():
        path, _, leaf = name.rpartition(".")
        module = modules.get(path)
        layer = _layer_of(name, layers)
        where: Place = "layer" if layer is not None else places.get(path, "last")
        yield Tensor(
            name=name,
            nbytes=round(nbytes * scale.get(name, 1.0)),
            parameters=_parameters(module, leaf),
            layer=layer,
            place=where,
            share=_share(module, where, chosen),
        )


def _chosen_experts(config: Mapping[str, Any]) -> int | None:
    text = text_config(config)
    return next((text[key] for key in CHOSEN if isinstance(text.get(key), int)), None)


def _share(module: nn.Module | None, where: Place, chosen: int | None) -> float:
    """The part of a module's tensors that one token reads."""
    if isinstance(module, nn.Embedding | nn.QuantizedEmbedding):
        return 1.0 if where == "ends" else 0.0
    experts = getattr(module, "num_experts", None) if module is not None else None
    if experts and chosen and isinstance(getattr(module, "input_dims", None), int):
        return min(1.0, chosen / experts)
    return 1.0


def _parameters(module: nn.Module | None, leaf: str) -> int:
    """Trained numbers that a tensor stands for: 8 of 4 bits in a packed word, none in scales."""
    if module is None or leaf not in module:
        return 0
    value = module[leaf]
    if not hasattr(module, "bits") or leaf not in ("weight", "scales", "biases"):
        return int(value.size)
    return int(value.size) * 32 // int(module.bits) if leaf == "weight" else 0


def layer_paths(model: nn.Module) -> dict[str, int]:
    """Path of each of the model's layers -> its number."""
    numbers = {id(layer): number for number, layer in enumerate(model.layers)}
    return {path: numbers[id(module)] for path, module in model.named_modules() if id(module) in numbers}


def _layer_of(name: str, layers: Mapping[str, int]) -> int | None:
    """The layer that a tensor lies in: the one whose path its name begins with."""
    end = name.find(".")
    while end > 0:
        if (number := layers.get(name[:end])) is not None:
            return number
        end = name.find(".", end + 1)
    return None


def end_places(model: nn.Module) -> dict[str, Place]:
    """Path of each embedding outside the layers -> its place; a path that is not here belongs to the last.

    Where no head stands beside it, the embedding of the vocabulary is the head too and is on both ends.
    """
    layers = layer_paths(model)
    outside = [
        (path, module) for path, module in model.named_modules() if _layer_of(f"{path}.", layers) is None
    ]
    embeddings = [(p, m) for p, m in outside if isinstance(m, nn.Embedding | nn.QuantizedEmbedding)]
    rows = max((module.weight.shape[0] for _, module in embeddings), default=0)
    heads = [
        m for _, m in outside if isinstance(m, nn.Linear | nn.QuantizedLinear) and m.weight.shape[0] == rows
    ]
    tied = next((path for path, m in embeddings if m.weight.shape[0] == rows), None) if not heads else None
    return {path: "ends" if path == tied else "first" for path, _ in embeddings}


def _form(model: nn.Module, tensors: tuple[Tensor, ...]) -> str:
    """How the weights lie in memory, by what most bytes do: '4 bits in groups of 64', 'bfloat16'."""
    sizes: dict[str, int] = {}
    modules = dict(model.named_modules())
    for tensor in tensors:
        path, _, leaf = tensor.name.rpartition(".")
        module = modules.get(path)
        if module is None or leaf not in module:
            continue
        packed = hasattr(module, "bits") and leaf in ("weight", "scales", "biases")
        word = (
            f"{module.bits} bits in groups of {module.group_size}"
            if packed
            else str(module[leaf].dtype).removeprefix("mlx.core.")
        )
        sizes[word] = sizes.get(word, 0) + tensor.nbytes
    return max(sizes, key=lambda word: sizes[word], default="")


def maker_from_config(
    config: Mapping[str, Any], bits: int | None = None, group_size: int = 64
) -> Callable[[], nn.Module]:
    """Builds a model of which only the configuration is known: bfloat16, quantised as it or `bits` says."""
    stored = config.get("quantization")
    method = (config.get("quantization_config") or {}).get("quant_method")

    def make() -> nn.Module:
        model = build(config)
        model.set_dtype(mx.bfloat16)
        if method in FP4:  # gpt-oss: experts alone are stored packed
            _pack_experts(model, *FP4[method], method)
        if bits is not None:
            quantize_now(model, bits, group_size)
        elif stored is not None:
            quantize_now(model, stored["bits"], stored["group_size"])
        return model

    return make


def _pack_experts(model: nn.Module, bits: int, group_size: int, mode: str) -> None:
    nn.quantize(
        model,
        group_size=group_size,
        bits=bits,
        mode=mode,
        class_predicate=lambda _, module: hasattr(module, "num_experts") and hasattr(module, "to_quantized"),
    )


def maker_from_headers(
    config: Mapping[str, Any],
    tensors: Mapping[str, TensorInfo],
    source: str,
    bits: int | None = None,
    group_size: int = 64,
) -> Callable[[], nn.Module]:
    """Builds a model as its stored tensors say, each packed as it is stored; `bits` packs what is not yet.

    Raises Unsupported for another toolkit's packing, whose tensors only mlx-lm's loader can name.
    """
    if method := foreign_method(config):
        raise Unsupported(
            f"{source} is packed by {method}; convert it for MLX first ('mlx_lm.convert'), then plan the result.",
            param="model",
        )

    def make() -> nn.Module:
        model = build(config)
        place(
            model, config, {name: _placeholder(name, info) for name, info in tensors.items()}, source=source
        )
        if bits is not None:
            quantize_now(model, bits, group_size)
        return model

    return make


def _placeholder(name: str, info: TensorInfo) -> mx.array:
    if info.dtype not in DTYPES:
        raise ModelInvalid(
            f"The tensor {name} is stored as {info.dtype}, which MLX does not read.", param=name
        )
    return mx.zeros(info.shape, DTYPES[info.dtype])
