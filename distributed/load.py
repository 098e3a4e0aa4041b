"""Loads one rank's part of a model, reading only the bytes that the rank owns.

Knows: how blueprint.py's parameters become arrays (assemble.py, reader.py), and what follows loading a
whole model (models/load.py): dtypes, defaults, digests. Does not know sockets or who starts ranks.

The result is byte for byte what loading everything and then dividing it would give.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers import distributed as divided
from mlx.utils import tree_flatten, tree_unflatten

from mlxserve.config import LoadConfig
from mlxserve.distributed.assemble import Assembler, Unknown
from mlxserve.distributed.blueprint import Blueprint, draw, make, placeholders, together
from mlxserve.distributed.reader import TensorReader, empty_like
from mlxserve.distributed.sharding import attach_group
from mlxserve.distributed.slices import Region, whole
from mlxserve.distributed.split import Split
from mlxserve.distributed.stages import Stage
from mlxserve.errors import ModelUnsupported
from mlxserve.models.files import (
    INDEX,
    TensorInfo,
    inspect,
    read_config,
    read_header,
    read_index,
    refuse_code,
)
from mlxserve.models.load import (
    LoadedModel,
    context_of,
    foreign_method,
    stored_defaults,
    weights_digest,
    with_overrides,
)
from mlxserve.models.resolve import ModelFiles
from mlxserve.models.weights import cast_floats, dequantize_layers, stored_dtype, working_dtype

# Layers that hold a part of a packed matrix, and their plain counterparts.
DIVIDED = (
    (divided.QuantizedAllToShardedLinear, divided.AllToShardedLinear),
    (divided.QuantizedShardedToAllLinear, divided.ShardedToAllLinear),
)


@dataclass(slots=True)
class RankModel(LoadedModel):
    """A LoadedModel of which this rank holds the parameters in `owned`; the others are empty stand-ins."""

    owned: frozenset[str] = frozenset()

    @property
    def weight_bytes(self) -> int:
        """Bytes of this rank's weights."""
        parameters = dict(tree_flatten(self.model.parameters()))
        return sum(parameters[name].nbytes for name in self.owned if name in parameters)


@dataclass(slots=True)
class ShardLoaded:
    """One rank's part.

    loaded: the model, divided (tensor parallel) or staged (pipeline). bytes_read: of tensors, from files.
    bytes_planned: what the blueprint said. digests: SHA-256 (its first 128 bits) of every region read, by
    tensor name, with the region behind it where it is not the whole tensor. stage: the pipeline's handle.
    blueprint: what the model was made by.
    """

    loaded: RankModel
    bytes_read: int
    bytes_planned: int
    blueprint: Blueprint
    digests: dict[str, str] = field(default_factory=dict)
    stage: Stage | None = None


def load_shard(
    files: ModelFiles,
    settings: LoadConfig,
    split: Split,
    rank: int,
    group: mx.distributed.Group | None = None,
    *,
    digest: bool = True,
    packed: bool = False,
) -> ShardLoaded:
    """Read rank `rank`'s part of a folder with safetensors.

    group: the ranks' process group; without one, `sharding.attach_group` gives it to the model before it
    runs, so that what was read can be compared between ranks before they connect. digest: hash what is
    read (in a second thread, about 0.7 s a gigabyte). packed: leave packed weights so on a CPU too, which is
    slower there and takes less memory; QLoRA trains on them.

    Raises ModelUnsupported for a GGUF file or another toolkit's quantisation, which are only read whole,
    and for a model that cannot be divided like this; whatever loading a whole model raises for damaged
    files; UsageError where the number of ranks does not fit.
    """
    print_ = blueprint(files, settings, split, rank)
    planned = print_.bytes
    with TensorReader(print_.tensors, digest=digest) as reader:
        fill(print_, reader)
    if group is not None:
        attach_group(print_.model, group)
    loaded = _finish(print_, files, packed)
    return ShardLoaded(loaded, reader.bytes_read, planned, print_, reader.digests, print_.stage)


def blueprint(files: ModelFiles, settings: LoadConfig, split: Split, rank: int) -> Blueprint:
    """What a rank would read of files on this disk. Raises as `load_shard` does."""
    if files.kind == "gguf":
        raise ModelUnsupported(
            f"{files.name} is a GGUF file, which is only read whole; several hosts need the model as a folder with "
            "safetensors."
        )
    config, tensors, complete = _look(files.path, split)
    if method := foreign_method(config):
        raise ModelUnsupported(
            f"{files.name} is quantised with {method}, which is only read whole; several hosts need it unquantised or "
            "in MLX's own form."
        )
    return draw(with_overrides(config, settings), settings, tensors, split, rank, complete=complete)


def _look(folder: Path, split: Split) -> tuple[dict[str, Any], dict[str, TensorInfo], bool]:
    """(configuration, tensors of the files that are here, whether that is all of them)."""
    index = folder / INDEX
    named = read_index(index) if index.is_file() else []
    if split.mode == "tensor" or all((folder / name).is_file() for name in named):
        found = inspect(folder)
        return found.config, found.tensors, True
    config = read_config(folder)
    refuse_code(config, str(folder))
    here = [folder / name for name in named if (folder / name).is_file()]
    return config, {name: info for file in here for name, info in read_header(file).items()}, False


def files_of(print_: Blueprint) -> list[str]:
    """Names of the weight files that hold bytes of a rank, sorted; needs headers only (see models/hub.peek)."""
    return sorted({print_.tensors[name].file.name for name, _ in print_.reads()})


def weights_by_rank(
    config: Mapping[str, Any], tensors: dict[str, TensorInfo], split: Split, settings: LoadConfig
) -> list[list[str]]:
    """For each rank, the weight files it needs, from a configuration and headers alone."""
    return [files_of(draw(config, settings, tensors, split, rank)) for rank in range(split.size)]


# -- filling ------------------------------------------------------------------------------------------------


class _Regions:
    """An Assembler's source: graph inputs by number, from a reader by name."""

    def __init__(self, print_: Blueprint, reader: TensorReader) -> None:
        self._names = print_.names
        self._reader = reader

    def read(self, source: int, region: Region, out: np.ndarray | None) -> None:
        assert out is not None
        self._reader.read(self._names[source], region, out)


def fill(print_: Blueprint, reader: TensorReader) -> None:
    """Put the rank's parameters into its model, and stand-ins into those of others."""
    assembler = Assembler(_Regions(print_, reader))
    rest = []
    for name in print_.owned:
        try:
            array = assembler.array(print_.nodes[name])
        except (Unknown, KeyError):
            rest.append(name)
            continue
        assert array is not None
        print_.model.update(tree_unflatten([(name, array)]))
    _fill_whole(print_, reader, rest)
    owned = set(print_.owned)
    for name, value in tree_flatten(print_.model.parameters()):
        if name not in owned:  # asked for by nobody; if it were, zeros that take no room
            print_.model.update(
                tree_unflatten([(name, mx.broadcast_to(mx.zeros((), value.dtype), value.shape))])
            )


def _fill_whole(print_: Blueprint, reader: TensorReader, parameters: list[str]) -> None:
    """Parameters whose making cannot be done on regions: their tensors are read whole, then all is done."""
    order = [name for name, _ in tree_flatten(print_.model.parameters())]
    for group in together(print_, parameters):
        arrays = placeholders(print_)
        for number, name in enumerate(print_.names):
            if name in group.tensors:
                arrays[number] = _read_whole(print_.tensors[name], name, reader, arrays[number].dtype)
        made = dict(zip(order, make(print_, arrays)))
        for name in group.parameters:
            mx.eval(made[name])
        print_.model.update(tree_unflatten([(name, made[name]) for name in group.parameters]))
        print_.notes += [f"{name} is read whole" for name in group.tensors]


def _read_whole(tensor: TensorInfo, name: str, reader: TensorReader, dtype: mx.Dtype) -> mx.array:
    region = whole(tensor.shape)
    out = empty_like(tensor, region)
    reader.read(name, region, out)
    array = mx.array(out)
    return array if array.dtype == dtype else array.view(dtype)


# -- what follows reading -------------------------------------------------------------------------------------


def _finish(print_: Blueprint, files: ModelFiles, packed: bool) -> RankModel:
    """As models/load.py finishes a whole model: dtype, context, defaults, a digest of its own."""
    model, settings = print_.model, print_.settings
    stored = stored_dtype(dict(zip(print_.names, placeholders(print_))))
    dtype = working_dtype(settings.dtype, stored)
    owned = set(print_.owned)
    modules = {name.rpartition(".")[0] for name in owned}
    on_cpu = mx.default_device() == mx.cpu
    if on_cpu and not packed:
        dequantize_layers(model, dtype, more=DIVIDED, only=modules.__contains__)
    if dtype != stored or on_cpu:
        cast_floats(model, dtype, only=lambda name: name.rpartition(".")[0] in modules)
    parameters = dict(tree_flatten(model.parameters()))
    held = frozenset(name for name in parameters if name in owned or name.rpartition(".")[0] in modules)
    mx.eval([parameters[name] for name in held])
    config = dict(print_.config)
    part = f"{print_.split}:{print_.rank}"
    return RankModel(
        name=files.name,
        path=files.path,
        model=model,
        config=config,
        dtype=dtype,
        context=context_of(config, settings),
        digest=weights_digest(files.path, {**config, "part": part}, settings, dtype),
        generation_defaults=stored_defaults(files.path),
        notes=print_.notes,
        owned=held,
    )
