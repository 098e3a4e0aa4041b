"""Layers that hold GGUF blocks as they lie in the file, in place of mlx.nn's and mlx-lm's.

Knows: module shapes and which rows of blocks a call needs. Does not know: what the bytes mean, or whether a
kernel or the reference multiplies (dispatch).

Blocks are a parameter `weight` of uint8, so that weights load under the names they always have; it is
never trained.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from mlxserve.errors import ModelUnsupported
from mlxserve.kernels_metal import dispatch, gguf_reference, moe
from mlxserve.kernels_metal.experts import BlockExperts
from mlxserve.kernels_metal.gguf_blocks import GATHER_TILE_PAIRS
from mlxserve.kernels_metal.gguf_formats import find_format

Product = Callable[[mx.array, mx.array], mx.array]


def _without_gradient(kind: str) -> Product:
    return partial(dispatch.gguf_matmul, kind=kind)


@cache
def _with_gradient(kind: str) -> Product:
    """The product with a gradient in x, which kernels lack; blocks are unpacked again on the way back."""

    @mx.custom_function
    def product(x: mx.array, blocks: mx.array) -> mx.array:
        return dispatch.gguf_matmul(x, blocks, kind)

    @product.vjp
    def backward(primals: Sequence[mx.array], cotangent: mx.array, _: mx.array) -> tuple[mx.array, mx.array]:
        blocks = primals[1]
        return gguf_reference.transposed_matmul(cotangent, blocks, kind), mx.zeros_like(blocks)

    return cast(Product, product)


@cache
def _gathered_with_gradient(kind: str, sorted_indices: bool) -> Callable[..., mx.array]:
    """The same for rows that each have their expert: x [X, K], blocks [E, N, row bytes], indices [P]."""

    @mx.custom_function
    def product(x: mx.array, blocks: mx.array, indices: mx.array) -> mx.array:
        return dispatch.gguf_gather_matmul(x, blocks, indices, kind, sorted_indices)

    @product.vjp
    def backward(
        primals: Sequence[mx.array], cotangent: mx.array, _: mx.array
    ) -> tuple[mx.array, mx.array, mx.array]:
        x, blocks, indices = primals
        pairs = gguf_reference.gather_transposed_matmul(cotangent, blocks, indices, kind)  # [P, K]
        gradient = pairs.reshape(x.shape[0], -1, x.shape[1]).sum(axis=1)
        return gradient, mx.zeros_like(blocks), mx.zeros_like(indices)

    return cast(Callable[..., mx.array], product)


class _BlockLayer(nn.Module):
    """weight: uint8 [*outer, row bytes] of format `kind`; bias: [*outer], if there is one; both frozen."""

    def __init__(self, *outer: int, columns: int, kind: str, bias: bool = False) -> None:
        super().__init__()
        self.kind = kind
        self.input_dims = columns
        self.weight = mx.zeros((*outer, find_format(kind).row_bytes(columns)), mx.uint8)
        if bias:
            self.bias = mx.zeros(outer)
        self.freeze()

    @property
    def output_dims(self) -> int:
        return self.weight.shape[-2]

    def _product(self, x: mx.array) -> mx.array:
        """x [..., input_dims] -> [..., output_dims]; with a gradient while training."""
        product = _with_gradient(self.kind) if self.training else _without_gradient(self.kind)
        return product(x, self["weight"])

    def unfreeze(self, *args: Any, **kwargs: Any) -> None:
        """As for MLX's quantised layers: what hangs below thaws, the blocks do not."""
        super().unfreeze(*args, **kwargs)
        self.freeze(recurse=False)

    def _extra_repr(self) -> str:
        return f"input_dims={self.input_dims}, output_dims={self.output_dims}, kind={self.kind}"


class GGUFLinear(_BlockLayer):
    """y = x weight^T (+ bias): x [..., input_dims] -> [..., output_dims], in x's dtype."""

    def __init__(self, input_dims: int, output_dims: int, kind: str, bias: bool = False) -> None:
        super().__init__(output_dims, columns=input_dims, kind=kind, bias=bias)

    def __call__(self, x: mx.array) -> mx.array:
        y = self._product(x)
        return y + self["bias"] if "bias" in self else y


class GGUFEmbedding(_BlockLayer):
    """ids [...] -> [..., dims] in `dtype`; only the rows asked for are unpacked."""

    def __init__(self, num_embeddings: int, dims: int, kind: str, dtype: mx.Dtype = mx.float32) -> None:
        super().__init__(num_embeddings, columns=dims, kind=kind)
        self.dtype = dtype

    def __call__(self, ids: mx.array) -> mx.array:
        return dispatch.gguf_dequantize(self["weight"][ids], self.kind).astype(self.dtype)

    def as_linear(self, x: mx.array) -> mx.array:
        """As a tied output head: x [..., dims] -> [..., num_embeddings]."""
        return self._product(x)


class GGUFSwitchLinear(_BlockLayer):
    """The same layer of all experts, called as mlx-lm's SwitchLinear.

    x [..., 1, input_dims] whose outer axes are those of `indices`, or have 1 for the last of them;
    returns [*indices.shape, 1, output_dims].
    """

    def __init__(
        self, input_dims: int, output_dims: int, num_experts: int, kind: str, bias: bool = False
    ) -> None:
        super().__init__(num_experts, output_dims, columns=input_dims, kind=kind, bias=bias)

    @property
    def num_experts(self) -> int:
        return self.weight.shape[0]

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        rows, flat = x.reshape(-1, x.shape[-1]), indices.flatten()
        if self.training:
            y = _gathered_with_gradient(self.kind, sorted_indices)(rows, self["weight"], flat)
        else:
            y = dispatch.gguf_gather_matmul(rows, self["weight"], flat, self.kind, sorted_indices)
        if "bias" in self:
            y = y + self["bias"][flat]
        return y.reshape(*indices.shape, 1, self.output_dims)


class GGUFSwitchGLU(nn.Module):
    """A mixture's gate, up and down projections on blocks, called as mlx-lm's SwitchGLU.

    x [..., K], indices [..., k] -> [..., k, N]. Few (row, expert) pairs run gate and up in one launch; many
    are sorted by expert, so that rows share the weights they read; so they are in training, or where an
    adapter has taken a projection's place.
    """

    def __init__(
        self,
        gate: GGUFSwitchLinear,
        up: GGUFSwitchLinear,
        down: GGUFSwitchLinear,
        activation: moe.Activation,
    ) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = gate, up, down
        self.activation = activation

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        rows, chosen = x.reshape(-1, x.shape[-1]), indices.reshape(-1, indices.shape[-1])
        plain = all(isinstance(layer, GGUFSwitchLinear) for layer in (self.gate_proj, self.up_proj))
        at_once = plain and not self.training and indices.size < GATHER_TILE_PAIRS
        y = self._in_one_launch(rows, chosen) if at_once else self._sorted(rows, chosen)
        return y.reshape(*indices.shape, self.down_proj.output_dims)

    def _in_one_launch(self, rows: mx.array, chosen: mx.array) -> mx.array:
        """rows [X, K], chosen [X, k] -> [X * k, N]."""
        gate, up = (BlockExperts(layer["weight"], layer.kind) for layer in (self.gate_proj, self.up_proj))
        h = dispatch.moe_gate_up(rows, chosen, gate, up, self.activation)  # [X, k, F]
        return self.down_proj(h.flatten(0, 1)[:, None], chosen.flatten())

    def _sorted(self, rows: mx.array, chosen: mx.array) -> mx.array:
        flat = chosen.flatten()
        order = mx.argsort(flat)
        rows, flat = rows[order // chosen.shape[1]][:, None], flat[order]  # [P, 1, K]
        gated = moe.ACTIVATIONS[self.activation][1](self.gate_proj(rows, flat, sorted_indices=True))
        h = gated * self.up_proj(rows, flat, sorted_indices=True)  # [P, 1, F]
        return self.down_proj(h, flat, sorted_indices=True)[mx.argsort(order)]


def use_blocks(model: nn.Module, kinds: Mapping[str, str], dtype: mx.Dtype) -> None:
    """Put a block layer in place of each module of `model` whose path is in `kinds`, before weights load.

    kinds: path -> GGUF type, {"model.layers.0.mlp.up_proj": "Q6_K"}. dtype: of what embeddings return.
    Raises ModelUnsupported for a module that is neither a linear layer, an embedding nor a layer of experts.
    """
    modules = dict(model.named_modules())
    layers = [(path, _block_layer(path, modules[path], kind, dtype)) for path, kind in kinds.items()]
    model.update_modules(tree_unflatten(layers))
    mixtures = [(path, _mixture(module)) for path, module in modules.items() if path and _is_mixture(module)]
    model.update_modules(tree_unflatten([(path, fused) for path, fused in mixtures if fused is not None]))


def _block_layer(path: str, module: nn.Module, kind: str, dtype: mx.Dtype) -> nn.Module:
    shape: tuple[int, ...] = module.weight.shape if "weight" in module else ()
    bias = "bias" in module
    if isinstance(module, nn.Embedding):
        return GGUFEmbedding(shape[0], shape[1], kind, dtype)
    if isinstance(module, nn.Linear):
        return GGUFLinear(shape[1], shape[0], kind, bias)
    if len(shape) == 3 and hasattr(module, "num_experts"):
        return GGUFSwitchLinear(shape[2], shape[1], shape[0], kind, bias)
    raise ModelUnsupported(f"{path} is a {type(module).__name__}, which cannot hold GGUF blocks.")


PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def _is_mixture(module: nn.Module) -> bool:
    """True for mlx-lm's SwitchGLU where all three projections have become blocks without bias."""
    layers = [module.get(name) for name in PROJECTIONS]
    return all(isinstance(layer, GGUFSwitchLinear) and "bias" not in layer for layer in layers)


def _mixture(module: nn.Module) -> GGUFSwitchGLU | None:
    """The same on fused kernels, where gate and up are stored alike and the activation is one they have."""
    gate, up, down = (module[name] for name in PROJECTIONS)
    activation = _named_activation(module.activation)
    if gate.kind != up.kind or activation is None:
        return None
    return GGUFSwitchGLU(gate, up, down, activation)


def _named_activation(activation: Callable[[mx.array, mx.array], mx.array]) -> moe.Activation | None:
    """Which of our activations `activation(up, gate)` is, by its values."""
    gate, up = mx.linspace(-12, 12, 49), mx.linspace(9, -9, 49)
    given = activation(up, gate)
    for name, (_, function) in moe.ACTIVATIONS.items():
        if mx.allclose(given, function(gate) * up, rtol=1e-5, atol=1e-6).item():
            return name
    return None
