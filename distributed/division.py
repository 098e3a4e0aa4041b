"""Which part of each linear layer's matrix a rank of a tensor split has, and so which part of an adapter.

The definition's own `shard()` is traced on placeholders (trace.py), from every matrix of the undivided model
to what the rank keeps of it: so rows of several matrices side by side, layers that stay whole and layers that
are divided in place need no rules. Of y = W x + B A x a rank with rows R and columns C of W needs B's rows R
and A's columns C, whatever the layer is called.

Knows: definitions and how they are divided. Does not know what an adapter computes, or who is asked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from mlxserve.distributed.assemble import Assembler, Unknown
from mlxserve.distributed.sharding import shard_model
from mlxserve.distributed.slices import Region
from mlxserve.distributed.trace import FakeGroup, Node, NotTraceable, trace
from mlxserve.errors import Unsupported
from mlxserve.models.adapters import Adapter
from mlxserve.models.definitions import module_name
from mlxserve.models.linear import is_linear, linear_shape
from mlxserve.models.load import build
from mlxserve.models.multilora import check_fit


@dataclass(frozen=True, slots=True)
class Kept:
    """What a rank has of a matrix (out, in): `rows` of its outputs, `columns` of its inputs; in this order."""

    rows: tuple[int, ...]
    columns: tuple[int, ...]


class Division:
    """One rank's part of every linear layer of a model. `model` is the rank's own, already divided."""

    def __init__(self, model: nn.Module, config: Mapping[str, Any], rank: int, size: int) -> None:
        self._here = linear_shapes(model)
        self._whole = build(config)  # never evaluated
        self._shapes = linear_shapes(self._whole)
        self._kept = divide(config, self._shapes, rank, size)

    def part(self, adapter: Adapter) -> Adapter:
        """What of an adapter belongs to this rank.

        Raises ModelInvalid or Unsupported where it does not fit the undivided model, and Unsupported where it
        changes a layer whose division is not understood.
        """
        check_fit(self._whole, adapter)
        arrays = {}
        for path in adapter.paths:
            kept = self._known(path)
            rows, columns = mx.array(kept.rows), mx.array(kept.columns)
            arrays[f"{path}.lora_a"] = adapter.arrays[f"{path}.lora_a"][columns]  # (in of this rank, r)
            arrays[f"{path}.lora_b"] = adapter.arrays[f"{path}.lora_b"][:, rows]  # (r, out of this rank)
            if f"{path}.m" in adapter.arrays:
                arrays[f"{path}.m"] = adapter.arrays[f"{path}.m"][rows]
        return replace(adapter, arrays=arrays)

    def shares_rows(self, path: str) -> bool:
        """True where a layer's rows go on in other ranks."""
        return len(self._known(path).columns) < self._shapes[path][0]

    def _known(self, path: str) -> Kept:
        kept = self._kept.get(path)
        if kept is None or self._here.get(path) != (len(kept.columns), len(kept.rows)):
            raise Unsupported(
                f"The adapter changes {path}, which this architecture divides over ranks in a way that is not "
                "understood; divide the model by layers (--split pipeline:N), or fuse the adapter ('mlxserve "
                "lora fuse') and serve the result.",
                param="adapter",
            )
        return kept


def linear_shapes(model: nn.Module) -> dict[str, tuple[int, int]]:
    """(inputs, outputs) of every linear layer, by path."""
    return {path: linear_shape(layer) for path, layer in model.named_modules() if is_linear(layer)}


def divide(
    config: Mapping[str, Any], shapes: Mapping[str, tuple[int, int]], rank: int, size: int
) -> dict[str, Kept | None]:
    """Of each layer in `shapes` what a rank keeps; None where that is no set of rows and columns."""

    def function(*weights: mx.array) -> list[mx.array]:
        model = build(config)
        model.update(tree_unflatten([(f"{path}.weight", value) for path, value in zip(shapes, weights)]))
        shard_model(model, FakeGroup(rank, size), module_name(config))
        modules = dict(model.named_modules())
        return [modules[path]["weight"] for path in shapes]

    try:
        nodes = trace(function, [mx.zeros((outputs, inputs)) for inputs, outputs in shapes.values()])
    except NotTraceable:
        return dict.fromkeys(shapes)
    return {path: _kept(node, number) for number, (path, node) in enumerate(zip(shapes, nodes))}


class _Asked:
    """A source that writes down what is asked of it."""

    def __init__(self) -> None:
        self.regions: list[tuple[int, Region]] = []

    def read(self, source: int, region: Region, out: Any) -> None:
        self.regions.append((source, region))


def _kept(node: Node, number: int) -> Kept | None:
    """The rows and columns of input `number` that a node consists of, side by side along one axis."""
    asked = _Asked()
    try:
        Assembler(asked, dry=True).array(node)
    except Unknown:
        return None
    if not asked.regions or any(source != number or len(region) != 2 for source, region in asked.regions):
        return None
    rows, columns = ([region[axis] for _, region in asked.regions] for axis in (0, 1))
    if all(each == columns[0] for each in columns):
        kept = Kept(tuple(row for each in rows for row in each), tuple(columns[0]))
    elif all(each == rows[0] for each in rows):
        kept = Kept(tuple(rows[0]), tuple(column for each in columns for column in each))
    else:
        return None
    return kept if node.shape == (len(kept.rows), len(kept.columns)) else None
