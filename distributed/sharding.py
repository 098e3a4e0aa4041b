"""Tensor parallelism of a definition: its own `shard()`, or the rules here for some that have none.

Knows: mlx.nn's divided layers, and which modules of those definitions are divided how. Does not know
files; it works on placeholders as well as on weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.nn.layers.distributed import shard_inplace, shard_linear, sum_gradients

from mlxserve.distributed.trace import FakeGroup
from mlxserve.errors import ModelUnsupported, UsageError

TO_SHARDS, TO_ALL = "all-to-sharded", "sharded-to-all"


def shard_model(model: nn.Module, group: Any, name: str) -> None:
    """Leave in `model` only what the group's rank holds of each matrix.

    Raises ModelUnsupported where neither the definition nor this file knows how, UsageError where the
    number of ranks does not divide its heads or widths.
    """
    own = OWN_RULES.get(name)
    if not hasattr(model, "shard") and own is None:
        raise ModelUnsupported(
            f"The architecture {name!r} cannot be divided by tensors; divide it by layers "
            f"(--split pipeline:{group.size()}).",
            param="split",
        )
    before = _counts(model)
    try:
        model.shard(group) if hasattr(model, "shard") else own(model, group)  # type: ignore[misc]
    except (ValueError, AssertionError) as error:
        raise _indivisible(name, group.size(), str(error)) from error
    for path, count in _counts(model).items():
        if path in before and before[path] != count and count * group.size() != before[path]:
            raise _indivisible(name, group.size(), f"{path} is {before[path]}")


def attach_group(model: nn.Module, group: mx.distributed.Group) -> None:
    """Give a model that was divided for a FakeGroup the group that its ranks talk through."""
    for _, module in model.named_modules():
        for key, value in list(vars(module).items()):
            if isinstance(value, FakeGroup):
                object.__setattr__(module, key, group)


def _counts(model: nn.Module) -> dict[str, int]:
    """Every whole number that modules keep as a plain attribute, such as their heads."""
    return {
        f"{path}.{key}": value
        for path, module in model.named_modules()
        for key, value in vars(module).items()
        if type(value) is int and "head" in key
    }


def _indivisible(name: str, size: int, why: str) -> UsageError:
    return UsageError(
        f"{name} cannot be divided by tensors over {size} ranks ({why}); take fewer ranks, or divide it by "
        f"layers (--split pipeline:{size}).",
        param="split",
    )


def _mixtral(model: nn.Module, group: Any) -> None:
    for layer in model.layers:
        attention, block = layer.self_attn, layer.block_sparse_moe
        for part in ("q_proj", "k_proj", "v_proj"):
            attention[part] = shard_linear(attention[part], TO_SHARDS, group=group)
        attention.o_proj = shard_linear(attention.o_proj, TO_ALL, group=group)
        attention.num_heads //= group.size()
        attention.num_key_value_heads //= group.size()
        for part in ("gate_proj", "up_proj"):
            shard_inplace(block.switch_mlp[part], TO_SHARDS, group=group)
        shard_inplace(block.switch_mlp.down_proj, TO_ALL, group=group)
        block.sharding_group = group
        block.__class__ = _summing(type(block))


def _summing(block_class: type) -> type:
    """A mixture of experts whose ranks each hold a part of every expert: the parts' results are added up.

    The result is linear in the experts' outputs, so adding may follow the weighting by scores.
    """

    class Summing(block_class):
        def __call__(self, x: mx.array) -> mx.array:
            routed = super().__call__(sum_gradients(self.sharding_group)(x))
            return mx.distributed.all_sum(routed, group=self.sharding_group)

    Summing.__name__ = Summing.__qualname__ = block_class.__name__
    return Summing


OWN_RULES: dict[str, Callable[[nn.Module, Any], None]] = {"mixtral": _mixtral}
