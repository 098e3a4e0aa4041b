"""From a model's name to the facts a plan needs, with as little fetched as there is.

Knows: the order in which a name is understood: files on this disk (only headers are read), the table of
well-known shapes, and the Hub (configuration and headers travel). Does not know hosts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mlxserve.distributed.arithmetic import count, maker_from_config, maker_from_headers
from mlxserve.distributed.facts import Facts, File
from mlxserve.distributed.shapes import SHAPES, find_shape
from mlxserve.errors import ModelError, ModelInvalid, ModelNotFound, ModelUnsupported
from mlxserve.models.aliases import is_alias
from mlxserve.models.cached import HubName
from mlxserve.models.files import TensorInfo, inspect, read_config
from mlxserve.models.gguf import open_gguf
from mlxserve.models.gguf.architectures import find_architecture
from mlxserve.models.gguf.quants import FLOAT_TYPES
from mlxserve.models.gguf.weights import placements
from mlxserve.models.resolve import ModelFiles, find_local, look_for

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|block|blk)\.(\d+)\.")
_EMBEDDING = re.compile(r"embed|wte|wpe")
_HEAD = re.compile(r"lm_head|embed_out|^output\.")

WHOLE_ONLY = "A GGUF file is only read whole: several hosts need the model as a folder with safetensors."


def facts_of(name: str, bits: int | None = None, sizes: Iterable[int] = (), group_size: int = 64) -> Facts:
    """Facts of the model that `name` means, for tensor parallelism over each of `sizes` ranks.

    bits: quantise what is not yet, as `--quantize`. Raises ModelNotFound, with near names, for a name that
    means nothing, and what the files or the Hub raise.
    """
    found = find_local(name)
    if found is None and not is_alias(name) and "/" not in name and find_shape(name):
        return _from_shape(name, bits, sizes, group_size)
    place = found or _look_for(name)
    if isinstance(place, ModelFiles):
        return facts_of_files(place, bits, sizes, group_size)
    try:
        return _from_hub(name, place, bits, sizes, group_size)
    except ModelError as error:
        if isinstance(error, ModelInvalid | ModelUnsupported) or not find_shape(place.repo):
            raise
        note = f"Counted from a built-in table, since the Hub did not show {place}: {error.message}"
        return _from_shape(place.repo, bits, sizes, group_size, (note,))


def _look_for(name: str) -> ModelFiles | HubName:
    """As `resolve.look_for`; a name that means nothing is also compared with the well-known shapes."""
    try:
        return look_for(name)
    except ModelNotFound as error:
        near = get_close_matches(name.lower(), SHAPES, n=2)
        if not near:
            raise
        raise ModelNotFound(
            f"There is no model {name!r}; did you mean {' or '.join(near)}?", param="model"
        ) from error


def facts_of_files(
    files: ModelFiles, bits: int | None = None, sizes: Iterable[int] = (), group_size: int = 64
) -> Facts:
    """Facts of a model on this disk; only headers are read."""
    if files.kind == "gguf":
        return _from_gguf(files, bits, sizes, group_size)
    folder = inspect(files.path)
    return _from_headers(files.name, folder.config, folder.tensors, bits, sizes, group_size)


def _from_headers(
    name: str,
    config: Mapping[str, Any],
    tensors: Mapping[str, TensorInfo],
    bits: int | None,
    sizes: Iterable[int],
    group_size: int,
) -> Facts:
    make = maker_from_headers(config, tensors, name, bits, group_size)
    return count(name, config, make, sizes, files_by_layer(tensors, config), bits)


def _from_hub(name: str, place: HubName, bits: int | None, sizes: Iterable[int], group_size: int) -> Facts:
    from mlxserve.models.hub import peek

    with TemporaryDirectory() as scratch:
        tensors = peek(place, Path(scratch))
        config = read_config(Path(scratch))
    return _from_headers(name, config, tensors, bits, sizes, group_size)


def _from_shape(
    name: str, bits: int | None, sizes: Iterable[int], group_size: int, notes: tuple[str, ...] = ()
) -> Facts:
    found = find_shape(name)
    assert found is not None
    config, named_bits = found
    bits = bits or named_bits
    return count(name, config, maker_from_config(config, bits, group_size), sizes, bits=bits, notes=notes)


def _from_gguf(files: ModelFiles, bits: int | None, sizes: Iterable[int], group_size: int) -> Facts:
    """Blocks weigh what they do in the file; what is stored as numbers becomes bfloat16."""
    file = open_gguf(files.path)
    config = file.config()
    stored = {
        placed.target: placed.source.data.nbytes
        for placed in placements(file.tensors, find_architecture(file.metadata), config)
        if placed.source is not None and len(placed.shape) > 1 and placed.source.type not in FLOAT_TYPES
    }
    layers = frozenset(range(int(config["num_hidden_layers"])))
    parts = tuple(File(path.name, path.stat().st_size, layers, True, True) for path in file.paths)
    make = maker_from_config(config, bits, group_size)
    sizes = tuple(sizes)
    notes = (WHOLE_ONLY,) if any(size > 1 for size in sizes) else ()
    if bits is not None:
        return count(files.name, config, make, sizes, parts, bits, notes=notes)
    form = f"blocks of {next(kind for kind in file.types if kind != 'F32')}" if stored else None
    return count(files.name, config, make, sizes, parts, stored=stored, form=form, notes=notes)


def files_by_layer(tensors: Mapping[str, TensorInfo], config: Mapping[str, Any]) -> tuple[File, ...]:
    """Each file of a model with the layers that it holds something of, in the order of their names."""
    tied = config.get("tie_word_embeddings", True) or not any(_HEAD.search(name) for name in tensors)
    grouped: dict[str, dict[str, TensorInfo]] = {}
    for name, info in tensors.items():
        grouped.setdefault(info.file.name, {})[name] = info
    return tuple(_file(file, held, bool(tied)) for file, held in sorted(grouped.items()))


def _file(name: str, held: Mapping[str, TensorInfo], tied: bool) -> File:
    numbers = {tensor: _LAYER.search(tensor) for tensor in held}
    outside = [tensor for tensor, number in numbers.items() if number is None]
    embeddings = [tensor for tensor in outside if _EMBEDDING.search(tensor) and not _HEAD.search(tensor)]
    others = len(outside) > len(embeddings)
    return File(
        name=name,
        nbytes=max(info.start + info.nbytes for info in held.values()),
        layers=frozenset(int(number[1]) for number in numbers.values() if number),
        first=bool(embeddings),
        last=others or (tied and bool(embeddings)),
    )
