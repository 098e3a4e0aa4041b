"""A rank's model before a byte of it is read: the definition on placeholders, and where each of its
parameters comes from.

Knows: configurations, definitions, headers of safetensors, splits. What it makes says which files,
which regions and how many bytes a rank reads (`reads`); load.py then reads them. Does not read weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from mlxserve.config import LoadConfig
from mlxserve.distributed.assemble import Assembler, Unknown
from mlxserve.distributed.reader import region_bytes
from mlxserve.distributed.sharding import shard_model
from mlxserve.distributed.slices import Region, whole
from mlxserve.distributed.split import Split
from mlxserve.distributed.stages import Stage, make_stage
from mlxserve.distributed.trace import FakeGroup, Node, NotTraceable, trace
from mlxserve.errors import ModelInvalid, ModelUnsupported
from mlxserve.models.definitions import module_name
from mlxserve.models.files import TensorInfo
from mlxserve.models.load import build, quantization_of
from mlxserve.models.weights import (
    check_names_and_shapes,
    drop_redundant_head,
    quantize_as_stored,
    quantize_now,
)

# What a stored tensor becomes in MLX, which has no type of its own for floats of 8 bits.
DTYPES = {
    "F32": mx.float32,
    "F16": mx.float16,
    "BF16": mx.bfloat16,
    "I64": mx.int64,
    "I32": mx.int32,
    "I16": mx.int16,
    "I8": mx.int8,
    "U64": mx.uint64,
    "U32": mx.uint32,
    "U16": mx.uint16,
    "U8": mx.uint8,
    "BOOL": mx.bool_,
    "F8_E4M3": mx.uint8,
    "F8_E5M2": mx.uint8,
    "F8_E8M0": mx.uint8,
}


@dataclass(slots=True)
class Blueprint:
    """A rank's model on placeholders.

    model: nothing in it is evaluated, until load.py fills it. owned: the parameters that the rank holds,
    in order. nodes: where each comes from (absent for those whose making MLX could not write down).
    group: the FakeGroup that a tensor-parallel model was divided for. notes: what is read otherwise than
    by regions, and layers quantised otherwise than asked.
    """

    config: Mapping[str, Any]
    settings: LoadConfig
    tensors: dict[str, TensorInfo]
    split: Split
    rank: int
    model: nn.Module = field(default_factory=nn.Module)
    stage: Stage | None = None
    owned: list[str] = field(default_factory=list)
    nodes: dict[str, Node] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    missing_ok: bool = False

    @property
    def names(self) -> list[str]:
        """Stored tensors in the order of the graph's inputs."""
        return list(self.tensors)

    def reads(self) -> list[tuple[str, Region]]:
        """Every (stored tensor, region) that loading reads, in order."""
        log = _Log(self.names)
        assembler = Assembler(log, dry=True)
        rest = []
        for name in self.owned:
            mark = len(log.asked)
            try:
                assembler.array(self.nodes[name])
            except (Unknown, KeyError):
                del log.asked[mark:]
                rest.append(name)
        for group in together(self, rest):
            log.asked += [(name, whole(self.tensors[name].shape)) for name in group.tensors]
        return log.asked

    def rows(self, parameter: str) -> list[int]:
        """Which rows (along its last axis but one) of the stored matrix a parameter consists of, in order.

        Empty where it is not made of regions of one tensor.
        """
        log = _Log(self.names)
        try:
            Assembler(log, dry=True).array(self.nodes[parameter])
        except (Unknown, KeyError):
            return []
        return [row for _, region in log.asked if len(region) > 1 for row in region[-2]]

    @property
    def bytes(self) -> int:
        """Bytes that loading reads."""
        return sum(region_bytes(self.tensors[name], region) for name, region in self.reads())


class _Log:
    """A source that writes down what is asked of it."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self.asked: list[tuple[str, Region]] = []

    def read(self, source: int, region: Region, out: np.ndarray | None) -> None:
        self.asked.append((self._names[source], region))


@dataclass(slots=True)
class Together:
    """Parameters that are made of the same stored tensors, which are therefore read whole and once."""

    parameters: list[str]
    tensors: list[str]


def together(blueprint: Blueprint, parameters: Sequence[str]) -> list[Together]:
    """`parameters` in groups that share no stored tensor; one group of all where that is not known."""
    names = blueprint.names
    groups: list[tuple[list[str], set[int]]] = []
    for parameter in parameters:
        node = blueprint.nodes.get(parameter)
        mine = set(range(len(names))) if node is None else sources_of(node)
        touching = [group for group in groups if group[1] & mine]
        groups = [group for group in groups if not group[1] & mine]
        groups.append(
            (
                [name for group in touching for name in group[0]] + [parameter],
                mine.union(*(group[1] for group in touching)),
            )
        )
    return [Together(members, [names[number] for number in sorted(sources)]) for members, sources in groups]


def sources_of(node: Node) -> set[int]:
    """Numbers of the inputs that a node is made of."""
    found, seen, waiting = set(), set(), [node]
    while waiting:
        current = waiting.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        if current.source is not None:
            found.add(current.source)
        waiting += current.operands
    return found


def draw(
    config: Mapping[str, Any],
    settings: LoadConfig,
    tensors: dict[str, TensorInfo],
    split: Split,
    rank: int,
    *,
    complete: bool = True,
) -> Blueprint:
    """The blueprint of a rank, from a configuration and headers alone.

    complete: False where some of the model's files are absent, which a pipeline's rank may do without.
    Raises ModelInvalid or ModelUnsupported where the whole model would not load either, or cannot be
    divided like this; UsageError where the number of ranks does not fit.
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            raise ModelUnsupported(f"The tensor {name} has type {tensor.dtype}, which MLX lacks.")
    print_ = Blueprint(config, settings, tensors, split, rank, missing_ok=not complete)
    try:
        nodes = trace(lambda *arrays: make(print_, arrays, keep=True), placeholders(print_))
    except NotTraceable as problem:
        make(print_, placeholders(print_), keep=True)
        print_.notes.append(f"every tensor is read whole: {problem}")
        nodes = []
    parameters = [name for name, _ in tree_flatten(print_.model.parameters())]
    needs = None if print_.stage is None else print_.stage.needs
    print_.owned = [name for name in parameters if needs is None or name in needs]
    print_.nodes = dict(zip(parameters, nodes))
    _refuse_missing(print_)
    return print_


def placeholders(print_: Blueprint) -> list[mx.array]:
    """An array a stored tensor, never evaluated, so that it costs nothing."""
    return [mx.zeros(tensor.shape, DTYPES[tensor.dtype]) for tensor in print_.tensors.values()]


def make(print_: Blueprint, arrays: Sequence[mx.array], *, keep: bool = False) -> list[mx.array]:
    """From stored tensors to the rank's parameters, in order; `keep` leaves the model in the blueprint."""
    model = build(print_.config)
    _place(print_, model, dict(zip(print_.names, arrays)))
    notes = []
    if print_.settings.quantize_bits is not None:
        odd = quantize_now(model, print_.settings.quantize_bits, print_.settings.quantize_group_size)
        notes = [f"{layer}: {why}" for layer, why in odd.items()]
    stage, split = None, print_.split
    if split.mode == "tensor":
        shard_model(model, FakeGroup(print_.rank, split.size), module_name(print_.config))
    else:
        stage = make_stage(model, split.layers_of(print_.rank), split.bounds[-1])
    if keep:
        print_.model, print_.stage, print_.notes = model, stage, notes
    return [value for _, value in tree_flatten(model.parameters())]


def _place(print_: Blueprint, model: nn.Module, weights: dict[str, mx.array]) -> None:
    """models.load.place, but with an incomplete model's absent tensors left as they are."""
    source = _source(print_)
    if hasattr(model, "sanitize"):
        try:
            weights = dict(model.sanitize(weights))
        except (KeyError, ValueError, IndexError) as error:
            raise ModelInvalid(f"{source} lacks the tensor {error} that its architecture needs.") from error
    quantization = quantization_of(print_.config)
    if quantization is not None:
        quantize_as_stored(model, quantization, weights)
    drop_redundant_head(model, weights)
    if print_.missing_ok:
        wanted = dict(tree_flatten(model.parameters()))
        weights = {**{name: mx.zeros(own.shape, own.dtype) for name, own in wanted.items()}, **weights}
    check_names_and_shapes(model, weights, source)
    model.eval()
    model.load_weights(list(weights.items()), strict=True)


def _source(print_: Blueprint) -> str:
    files = [tensor.file for tensor in print_.tensors.values()]
    return str(files[0].parent) if files else "The model"


def _refuse_missing(print_: Blueprint) -> None:
    """A parameter of this rank that comes from no stored tensor is missing."""
    for name in print_.owned if print_.missing_ok else ():
        if name in print_.nodes and not sources_of(print_.nodes[name]):
            raise ModelInvalid(
                f"{_source(print_)} lacks the tensor {name}, which rank {print_.rank} holds; fetch the files that "
                "hold it."
            )
