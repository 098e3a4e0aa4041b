"""Layers that hold GGUF blocks as they lie in the file, in place of mlx.nn's and mlx-lm's.

Knows: module shapes and which rows of blocks a call needs. Does not know: what the bytes mean, or whether a
kernel or the reference multiplies (dispatch).

Blocks are a parameter `weight` of uint8, so that weights load under the names they always have; it is
never trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from mlxserve.errors import ModelUnsupported
from mlxserve.kernels_metal import dispatch
from mlxserve.kernels_metal.gguf_formats import find_format


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
        y = dispatch.gguf_matmul(x, self["weight"], self.kind)
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
        return dispatch.gguf_matmul(x, self["weight"], self.kind)


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
        y = dispatch.gguf_gather_matmul(rows, self["weight"], flat, self.kind, sorted_indices)
        if "bias" in self:
            y = y + self["bias"][flat]
        return y.reshape(*indices.shape, 1, self.output_dims)


def use_blocks(model: nn.Module, kinds: Mapping[str, str], dtype: mx.Dtype) -> None:
    """Put a block layer in place of each module of `model` whose path is in `kinds`, before weights load.

    kinds: path -> GGUF type, {"model.layers.0.mlp.up_proj": "Q6_K"}. dtype: of what embeddings return.
    Raises ModelUnsupported for a module that is neither a linear layer, an embedding nor a layer of experts.
    """
    modules = dict(model.named_modules())
    layers = [(path, _block_layer(path, modules[path], kind, dtype)) for path, kind in kinds.items()]
    model.update_modules(tree_unflatten(layers))


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
