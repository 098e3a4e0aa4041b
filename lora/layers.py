"""Adapted layers: LoRA, rsLoRA and DoRA around a frozen linear layer, dense or quantised, or one of experts.

Knows: module shapes and the arithmetic of adapters. Does not know training, files or data.

Names and shapes of parameters are mlx-lm's (`lora_a` (in, r), `lora_b` (r, out), `m` (out,), the frozen
layer as `linear`), so that adapter files of the two can be exchanged. Masters are float32 and cast at use:
activations keep the model's dtype.

Sources: LoRA arXiv:2106.09685, rsLoRA arXiv:2312.03732, DoRA arXiv:2402.09353.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from mlxserve.errors import UsageError
from mlxserve.kernels_metal.layers import GGUFLinear
from mlxserve.lora.config import LoraConfig
from mlxserve.models.linear import dense_weight as dense_weight
from mlxserve.models.linear import is_linear, is_switch
from mlxserve.models.linear import linear_shape as linear_shape

ATTENTION = (
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "qkv_proj",
    "out_proj",
    "wqkv",
    "c_attn",
    "query_key_value",
)


class Adapted(nn.Module):
    """What all adapted layers share: the frozen layer, the scale, and a switch for the base alone."""

    def __init__(self, linear: nn.Module, scale: float, dropout: float) -> None:
        super().__init__()
        self.linear = linear
        self.dropout = nn.Dropout(p=dropout)
        self.scale = scale
        self._enabled = True
        linear.freeze()

    @property
    def rank(self) -> int:
        return self.lora_b.shape[0]


class LoRALinear(Adapted):
    """y = linear(x) + scale · (dropout(x) a) b; a starts uniform, b at zero, so that y starts as it was."""

    def __init__(self, linear: nn.Module, rank: int, scale: float, dropout: float = 0.0) -> None:
        super().__init__(linear, scale, dropout)
        width, outputs = linear_shape(linear)
        bound = 1 / math.sqrt(width)
        self.lora_a = mx.random.uniform(-bound, bound, (width, rank))
        self.lora_b = mx.zeros((rank, outputs))

    def _update(self, x: mx.array) -> mx.array:
        a, b = self.lora_a.astype(x.dtype), self.lora_b.astype(x.dtype)
        return (self.scale * ((self.dropout(x) @ a) @ b)).astype(x.dtype)

    def __call__(self, x: mx.array) -> mx.array:
        y = self.linear(x)
        return y + self._update(x) if self._enabled else y

    def delta(self) -> mx.array:
        """(out, in) float32: what is added to the frozen weight."""
        return self.scale * (self.lora_a @ self.lora_b).T

    def merged(self) -> mx.array:
        """(out, in) float32: the weight of a plain layer that does the same."""
        return dense_weight(self.linear).astype(mx.float32) + self.delta()


class DoRALinear(LoRALinear):
    """The merged weight's rows are set to the lengths `m`, which train: y = m / |W + Δ| · (W + Δ) x.

    The row lengths are held constant in the backward pass, as the paper does (section 4.3).
    """

    def __init__(self, linear: nn.Module, rank: int, scale: float, dropout: float = 0.0) -> None:
        super().__init__(linear, rank, scale, dropout)
        self.m = mx.linalg.norm(dense_weight(linear).astype(mx.float32), axis=1)

    def __call__(self, x: mx.array) -> mx.array:
        y = self.linear(x)
        if not self._enabled:
            return y
        bias = self.linear.get("bias")
        product = (y if bias is None else y - bias) + self._update(x)
        norm = mx.linalg.norm(mx.stop_gradient(LoRALinear.merged(self)), axis=1)
        y = (self.m / norm).astype(x.dtype) * product
        return y if bias is None else y + bias

    def merged(self) -> mx.array:
        direction = LoRALinear.merged(self)
        return (self.m / mx.linalg.norm(direction, axis=1))[:, None] * direction


class LoRASwitchLinear(Adapted):
    """LoRA on a layer of experts, called as mlx-lm's SwitchLinear: a (experts, r, in), b (experts, out, r)."""

    def __init__(self, linear: nn.Module, rank: int, scale: float, dropout: float = 0.0) -> None:
        super().__init__(linear, scale, dropout)
        width, outputs, experts = linear.input_dims, linear.output_dims, linear.num_experts
        bound = 1 / math.sqrt(width)
        self.lora_a = mx.random.uniform(-bound, bound, (experts, rank, width))
        self.lora_b = mx.zeros((experts, outputs, rank))

    @property
    def rank(self) -> int:
        return self.lora_a.shape[1]

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        y = self.linear(x, indices, sorted_indices=sorted_indices)
        if not self._enabled:
            return y
        z = self.dropout(x)
        for factor in (self.lora_a, self.lora_b):
            z = mx.gather_mm(
                z,
                factor.astype(x.dtype).swapaxes(-1, -2),
                rhs_indices=indices,
                sorted_indices=sorted_indices,
            )
        return y + (self.scale * z).astype(x.dtype)

    def delta(self) -> mx.array:
        """(experts, out, in) float32."""
        return self.scale * (self.lora_b @ self.lora_a)

    def merged(self) -> mx.array:
        return dense_weight(self.linear).astype(mx.float32) + self.delta()


# The frozen weights.


def _dense_on_demand(layer: nn.Module) -> Callable[[mx.array], mx.array]:
    """x -> x Wᵀ whose W is unpacked for each product and let go: never two of them at once, nor one kept
    from the forward to the backward pass."""

    def unpacked(after: mx.array) -> mx.array:
        (packed,) = mx.depends([layer["weight"]], [after])
        stand_in = _View(layer, packed)
        return dense_weight(stand_in).astype(after.dtype)

    @mx.custom_function
    def product(x: mx.array) -> mx.array:
        return x @ unpacked(x).T

    @product.vjp
    def product_vjp(x: Any, cotangent: mx.array, _: mx.array) -> Any:
        return cotangent @ unpacked(cotangent)

    made: Any = product
    return made


class _View:
    """A layer's settings with another array in place of its packed weight."""

    def __init__(self, layer: nn.Module, weight: mx.array) -> None:
        self._layer, self._weight = layer, weight

    def __getitem__(self, name: str) -> Any:
        return self._weight if name == "weight" else self._layer[name]

    def get(self, name: str) -> Any:
        return self._layer.get(name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


class OnDemandLinear(nn.QuantizedLinear):
    """A frozen quantised layer whose product goes through a dense weight; for CPUs, 50 times faster there."""

    def __call__(self, x: mx.array) -> mx.array:
        y = _dense_on_demand(self)(x)
        return y + self["bias"] if "bias" in self else y


class OnDemandEmbedding(nn.QuantizedEmbedding):
    """The same for an embedding that is also the output head."""

    def as_linear(self, x: mx.array) -> mx.array:
        return _dense_on_demand(self)(x)


class OnDemandGGUF(GGUFLinear):
    """GGUF blocks have no gradient of their own: they are unpacked for each product, on every device."""

    def __call__(self, x: mx.array) -> mx.array:
        y = _dense_on_demand(self)(x)
        return y + self["bias"] if "bias" in self else y


def prepare_frozen(model: nn.Module, on_cpu: bool | None = None) -> None:
    """Let frozen packed layers be trained through: on a CPU fast, GGUF blocks at all. Parameters stay."""
    on_cpu = mx.default_device() == mx.cpu if on_cpu is None else on_cpu
    swaps: dict[type, type] = {GGUFLinear: OnDemandGGUF}
    if on_cpu:
        swaps |= {nn.QuantizedLinear: OnDemandLinear, nn.QuantizedEmbedding: OnDemandEmbedding}
    for _, module in model.named_modules():
        if type(module) in swaps:
            module.__class__ = swaps[type(module)]


# Putting adapters in.


def find_targets(model: nn.Module, config: LoraConfig) -> list[str]:
    """Paths of the layers that `targets` and `layers` choose, in the model's order.

    Raises UsageError, naming it, for a target that fits no layer.
    """
    blocks = chosen_blocks(model, config)
    paths = [path for path, module in model.named_modules() if _adaptable(module)]
    inside = [path for path in paths if any(path.startswith(block + ".") for block in blocks)]
    chosen = _chosen(inside, paths, config.targets)
    order = {path: i for i, path in enumerate(paths)}
    return sorted(set(chosen), key=lambda path: _natural(path, order))


def chosen_blocks(model: nn.Module, config: LoraConfig) -> list[str]:
    """Paths of the blocks that `layers` chooses. Raises UsageError where there are fewer."""
    blocks = block_paths(model)
    if config.layers == "all":
        return blocks
    if config.layers > len(blocks):
        raise UsageError(f"lora.layers is {config.layers}, the model has {len(blocks)}.", param="lora.layers")
    return blocks[-config.layers :]


def _natural(path: str, order: dict[str, int]) -> tuple[Any, ...]:
    return tuple((int(part), "") if part.isdigit() else (-1, part) for part in path.split("."))


def _chosen(inside: list[str], everywhere: list[str], targets: str | list[str]) -> list[str]:
    if targets == "all-linear":
        return inside
    if targets == "attention":
        found = [p for p in inside if p.rpartition(".")[2] in ATTENTION or "attn" in p or "attention" in p]
        return _some(found, inside, "attention")
    if targets == "mlp":
        found = [p for p in inside if any(w in p for w in ("mlp", "feed_forward", "ffn", "expert"))]
        return _some(found, inside, "mlp")
    names = [name.strip() for name in targets.split(",")] if isinstance(targets, str) else targets
    chosen = []
    for name in names:
        found = [p for p in inside if p == name or p.endswith("." + name)]
        found = found or [p for p in everywhere if p == name]
        chosen += _some(found, everywhere, name)
    return chosen


def _some(found: list[str], known: list[str], name: str) -> list[str]:
    if not found:
        endings = sorted({path.rpartition(".")[2] for path in known})
        raise UsageError(
            f"lora.targets names {name!r}, which is no layer here; there are {', '.join(endings)}.",
            param="lora.targets",
        )
    return found


def block_paths(model: nn.Module) -> list[str]:
    """Paths of the model's blocks: 'model.layers.0', …"""
    layers = list(model.layers)
    where = {id(module): path for path, module in model.named_modules()}
    return [where[id(layer)] for layer in layers if id(layer) in where]


def _adaptable(module: nn.Module) -> bool:
    return is_linear(module) or is_switch(module)


def adapt(layer: nn.Module, kind: str, rank: int, scale: float, dropout: float = 0.0) -> Adapted:
    """The adapted form of one layer. Raises UsageError where the kind of adapter does not exist for it."""
    if is_switch(layer):
        if kind == "dora":
            raise UsageError(
                "DoRA is not defined for layers of experts; use lora.type=lora.", param="lora.type"
            )
        return LoRASwitchLinear(layer, rank, scale, dropout)
    return (DoRALinear if kind == "dora" else LoRALinear)(layer, rank, scale, dropout)


def add_adapters(model: nn.Module, config: LoraConfig, *, seed: int = 0) -> list[str]:
    """Freeze the model and adapt the chosen layers in place; returns their paths.

    With type full nothing is adapted: every float parameter trains, or those of the layers that `targets` and
    `layers` choose. The start is drawn from `seed`.
    """
    if config.type == "full":
        _unfreeze(model, config)
        return []
    paths = find_targets(model, config)
    model.freeze()
    modules = dict(model.named_modules())
    mx.random.seed(seed)
    layers = [
        (path, adapt(modules[path], config.type, config.rank, config.scale, config.dropout)) for path in paths
    ]
    model.update_modules(tree_unflatten(layers))
    prepare_frozen(model)
    mx.eval(model.trainable_parameters())
    return paths


def _unfreeze(model: nn.Module, config: LoraConfig) -> None:
    if config.targets == "all-linear" and config.layers == "all":
        model.unfreeze()
        return
    modules = dict(model.named_modules())
    whole_blocks = config.targets == "all-linear"
    paths = chosen_blocks(model, config) if whole_blocks else find_targets(model, config)
    model.freeze()
    for path in paths:
        modules[path].unfreeze()


def adapted_layers(model: nn.Module) -> dict[str, Adapted]:
    """Every adapted layer by its path, in natural order."""
    found = {path: module for path, module in model.named_modules() if isinstance(module, Adapted)}
    return dict(sorted(found.items(), key=lambda item: _natural(item[0], {})))


@contextmanager
def base_only(model: nn.Module) -> Iterator[None]:
    """Inside, the model computes as if it had no adapters."""
    before = [(layer, layer._enabled) for layer in adapted_layers(model).values()]
    for layer, _ in before:
        layer._enabled = False
    try:
        yield
    finally:
        for layer, enabled in before:
            layer._enabled = enabled
