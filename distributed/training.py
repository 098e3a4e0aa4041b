"""Training a model that lies in parts on several ranks: what each rank's trainer must do differently.

Knows: divided layers, stages, gradients that are parts of a sum. Does not know the trainer: `TensorPart` and
`StagePart` give, as `share()`, the settings that `lora.share.Share` takes, and whoever starts a run puts
the two together:

    part = TensorPart(load_shard(files, settings, Split.tensor(2), rank, group, packed=True), group)
    add_adapters(model, config.lora, seed=seed)      # the trainer's own, on this rank's layers
    part.connect(start, optimizer="adamw")           # the adapters that one process would start with
    Trainer(model, …, share=Share(**part.share()))

Files that are written are those of one process; its loss curve is that of one process up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.nn.layers import distributed as divided
from mlx.nn.layers.distributed import sum_gradients
from mlx.utils import tree_flatten, tree_unflatten

from mlxserve.distributed.load import ShardLoaded
from mlxserve.errors import MlxServeError, Unsupported

Arrays = dict[str, mx.array]
COLUMN, ROW = "column", "row"
# An optimiser is exact on parts if it treats each number by itself.
ELEMENTWISE = ("adamw", "lion")
SUMMED = 4  # the first so many of a step's totals are sums over data, the rest are flags
DRIFT = 1e-3


class RanksDiffer(MlxServeError):
    """Gradients that should be equal on all ranks are not: the model is divided in a way not known here."""

    code = "ranks_differ"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank's part of a parameter lies in the whole: `indices` along `axis`; axis None is all of it.

    partial: of a parameter that every rank has, each has only a part of the gradient's sum.
    """

    shape: tuple[int, ...]
    axis: int | None = None
    indices: tuple[int, ...] = ()
    partial: bool = False


class TensorPart:
    """Training by tensors: every rank sees every batch, and holds a part of each matrix and its adapter.

    In a column layer (outputs divided) A is on all ranks and B divided; in a row layer (inputs divided) A is
    divided and B on all. The factor that is on all ranks gets a part of its gradient on each.
    """

    def __init__(self, loaded: ShardLoaded, group: mx.distributed.Group) -> None:
        self.model, self.group = loaded.loaded.model, group
        self._blueprint = loaded.blueprint
        self._kinds = _plain_layers(self.model)
        self._biases = _take_row_biases(self.model, self._kinds)
        self._places: dict[str, Place] = {}
        self._compared = False

    def connect(self, start: Arrays, *, optimizer: str) -> None:
        """Join the ranks' layers, and take this rank's part of what one process would start with.

        start: every trainable parameter of the whole model, by name, as the trainer makes them. Raises
        Unsupported for what cannot be trained in parts.
        """
        if optimizer not in ELEMENTWISE:
            raise Unsupported(
                f"{optimizer} looks at whole matrices, which are divided here; use {' or '.join(ELEMENTWISE)}.",
                param="train.optimizer",
            )
        own = dict(tree_flatten(self.model.trainable_parameters()))
        odd = sorted(own.keys() ^ start.keys())
        if odd or any(name.rpartition(".")[2] not in ("lora_a", "lora_b") for name in own):
            what = odd[0] if odd else next(n for n in own if n.rpartition(".")[2] not in ("lora_a", "lora_b"))
            raise Unsupported(
                f"A model divided by tensors trains LoRA factors only, not {what}; use lora.type=lora.",
                param="lora.type",
            )
        self._places = {name: self._place(name, start[name].shape, own) for name in start}
        self.model.update(tree_unflatten(list(self.part(start).items())))
        _join(self.model, self._kinds, self._biases, self.group)
        mx.eval(self.model.trainable_parameters())

    def share(self) -> dict[str, Any]:
        """Settings for the trainer's Share."""
        return {
            "writes": self.group.rank() == 0,
            "reduce": self.reduce,
            "squares": self.squares,
            "spread": self.spread,
            "whole": self.whole,
            "part": self.part,
        }

    # -- what the trainer calls ---------------------------------------------------------------------------

    def reduce(self, gradients: Arrays, totals: mx.array) -> tuple[Arrays, mx.array]:
        """Sums of partial gradients; what all ranks computed alike stays (its mean, so that none drifts)."""
        size = self.group.size()
        names = [name for name in sorted(gradients) if self._places[name].axis is None]
        parts = _all_sum_together([totals, *(gradients[name] for name in names)], self.group)
        merged = dict(gradients)
        for name, value in zip(names, parts[1:]):
            merged[name] = value if self._places[name].partial else value / size
        self._compare(gradients, merged)
        return merged, mx.concatenate([parts[0][:SUMMED] / size, parts[0][SUMMED:]])

    def _compare(self, mine: Arrays, merged: Arrays) -> None:
        """Once: whether gradients that should be equal on all ranks are."""
        if self._compared or not mine:
            return
        self._compared = True
        equal = [
            name
            for name in sorted(mine)
            if self._places[name].axis is None and not self._places[name].partial
        ]
        worst = mx.array([_relative(mine[name], merged[name]) for name in equal] or [0.0])
        worst = mx.distributed.all_sum(worst, group=self.group)
        if float(worst.max()) > DRIFT:
            raise RanksDiffer(
                f"The gradient of {equal[int(worst.argmax())]} differs between ranks: this architecture cannot "
                "be trained divided by tensors. Divide it by layers (pipeline)."
            )

    def squares(self, gradients: Arrays) -> mx.array:
        """Sum of squares of the whole model's gradient."""
        own = mx.array(0.0)
        for name in sorted(gradients):
            if self._places[name].axis is not None:
                own = own + mx.square(gradients[name]).sum()
        total = mx.distributed.all_sum(own, group=self.group)
        for name in sorted(gradients):
            if self._places[name].axis is None:
                total = total + mx.square(gradients[name]).sum()
        return total

    def spread(self, arrays: Arrays) -> Arrays:
        """The writing rank's arrays on all, where the others give zeros."""
        return sum_in_order(arrays, self.group)

    def whole(self, arrays: Arrays) -> Arrays:
        """The whole model's parameters (or their moments) from every rank's part."""
        found = dict(arrays)
        for name in sorted(arrays):
            place = self._places.get(name)
            if place is None or place.axis is None:
                continue
            full = mx.zeros(place.shape, arrays[name].dtype)
            full[(slice(None),) * place.axis + (mx.array(place.indices),)] = arrays[name]
            found[name] = mx.distributed.all_sum(full, group=self.group)
            mx.eval(found[name])
        return found

    def part(self, arrays: Arrays) -> Arrays:
        """This rank's part of the whole model's parameters (or moments)."""
        found = dict(arrays)
        for name, place in self._places.items():
            if place.axis is not None and name in arrays:
                found[name] = mx.take(arrays[name], mx.array(place.indices), axis=place.axis)
        return found

    # -- where parts lie ------------------------------------------------------------------------------------

    def _place(self, name: str, shape: tuple[int, ...], own: Mapping[str, mx.array]) -> Place:
        mine = own[name].shape
        axes = [axis for axis, length in enumerate(mine) if length != shape[axis]]
        if not axes:
            return Place(shape, partial=self._is_partial(name, own))
        (axis,) = axes
        length, rank = mine[axis], self.group.rank()
        indices = range(rank * length, (rank + 1) * length)
        if name.endswith(".lora_b"):  # a layer of several matrices side by side is divided in each of them
            path = name.removesuffix(".lora_b")
            rows = self._blueprint.rows(f"{path}.weight")
            return Place(shape, axis, tuple(rows if len(rows) == length else indices))
        return Place(shape, axis, tuple(indices))

    def _is_partial(self, name: str, own: Mapping[str, mx.array]) -> bool:
        """Whether each rank has a part of a gradient: its layer is divided, or its block sums at its end."""
        path, _, leaf = name.rpartition(".")
        if path in self._kinds:
            return True
        owner = self.model
        for step in path.split("."):
            owner = owner[int(step)] if isinstance(owner, list) else owner[step]
            if getattr(owner, "sharding_group", None) is not None:
                return True
        return False


def _relative(mine: mx.array, mean: mx.array) -> float:
    return float(mx.abs(mine - mean).max() / (mx.abs(mean).max() + 1e-12))


def _all_sum_together(arrays: list[mx.array], group: mx.distributed.Group) -> list[mx.array]:
    """Sums over ranks, in one message: a round trip costs more than these bytes do."""
    message = mx.concatenate([array.astype(mx.float32).reshape(-1) for array in arrays])
    ends = np.cumsum([array.size for array in arrays]).tolist()
    parts = mx.split(mx.distributed.all_sum(message, group=group), ends[:-1])
    return [part.reshape(array.shape) for part, array in zip(parts, arrays)]


def sum_in_order(arrays: Arrays, group: mx.distributed.Group) -> Arrays:
    """Sums over ranks, one after the other, in the same order on every rank."""
    found = {}
    for name in sorted(arrays):
        found[name] = mx.distributed.all_sum(arrays[name], group=group)
        mx.eval(found[name])
    return found


# -- layers ---------------------------------------------------------------------------------------------------


def _plain_layers(model: nn.Module) -> dict[str, str]:
    """Turn divided layers into plain ones of the rank's part, for the trainer to adapt; returns their kinds.

    Raises Unsupported for a layer that talks to other ranks in a way whose gradient is not known here.
    """
    kinds = {
        divided.AllToShardedLinear: (COLUMN, nn.Linear),
        divided.QuantizedAllToShardedLinear: (COLUMN, nn.QuantizedLinear),
        divided.ShardedToAllLinear: (ROW, nn.Linear),
        divided.QuantizedShardedToAllLinear: (ROW, nn.QuantizedLinear),
    }
    found = {}
    for path, module in model.named_modules():
        if type(module) in kinds:
            found[path], module.__class__ = kinds[type(module)]
        elif "group" in vars(module):
            raise Unsupported(
                f"{path} ({type(module).__name__}) cannot be trained divided by tensors; divide the model by "
                "layers (pipeline)."
            )
    return found


def _take_row_biases(model: nn.Module, kinds: Mapping[str, str]) -> Arrays:
    """A row layer's bias is added once, after the sum over ranks, so it is taken out of the layers."""
    modules = dict(model.named_modules())
    return {
        path: modules[path].pop("bias")
        for path, kind in kinds.items()
        if kind == ROW and "bias" in modules[path]
    }


def _join(model: nn.Module, kinds: Mapping[str, str], biases: Arrays, group: mx.distributed.Group) -> None:
    """Let the layers (adapted or not) talk: gradients of column inputs and outputs of rows are summed."""
    modules = dict(model.named_modules())
    latents = {path for path in modules if path.endswith(".kv_a_proj_with_mqa")}
    for path in latents:
        _exchange(modules[path], lambda own: _summing_back(own, group))
    for path, kind in kinds.items():
        if kind == ROW:
            modules[path]._row_bias = biases.get(path)
            _exchange(modules[path], lambda own: _row(own, group))
        elif f"{path.rpartition('.')[0]}.kv_a_proj_with_mqa" not in latents or not path.endswith("kv_b_proj"):
            _exchange(modules[path], lambda own: _column(own, group))


def _exchange(module: nn.Module, make: Callable[[type], type]) -> None:
    own = type(module)
    module.__class__ = make(own)
    module.__class__.__name__, module.__class__.__qualname__ = own.__name__, own.__qualname__


def _column(own: type, group: mx.distributed.Group) -> type:
    class Column(own):
        def __call__(self, x: mx.array, *args: Any, **kwargs: Any) -> Any:
            return super().__call__(sum_gradients(group)(x), *args, **kwargs)

    return Column


def _row(own: type, group: mx.distributed.Group) -> type:
    class Row(own):
        def __call__(self, x: mx.array, *args: Any, **kwargs: Any) -> Any:
            # The sum's gradient is the same on all ranks, and goes to each rank's part as it is.
            y = mx.distributed.all_sum(super().__call__(x, *args, **kwargs), group=group)
            return y if self._row_bias is None else y + self._row_bias

    return Row


def _summing_back(own: type, group: mx.distributed.Group) -> type:
    """Latent keys and values are on all ranks, but each rank's heads give a part of their gradient."""

    class SummingBack(own):
        def __call__(self, x: mx.array, *args: Any, **kwargs: Any) -> Any:
            return sum_gradients(group)(super().__call__(x, *args, **kwargs))

    return SummingBack
