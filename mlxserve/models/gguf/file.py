"""GGUF files on disk: metadata as a plain dict, tensors by name with type, shape and raw bytes.

Knows: the container (also split into parts), through the `gguf` package's memory-mapped reader, and how
to tell that a file is cut short or a part is missing. Knows nothing of architectures or of MLX.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import re
import struct
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFValueType, ReaderField
from gguf.gguf_reader import READER_SUPPORTED_VERSIONS

from mlxserve.errors import ModelInvalid, ModelNotFound, ModelUnsupported

MAGIC = b"GGUF"
_PART = re.compile(r"^(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$")
_SPLIT_NUMBER, _SPLIT_COUNT, _SPLIT_TENSORS = "split.no", "split.count", "split.tensors.count"


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor as stored.

    shape: in elements, outermost first, as NumPy and MLX have it (the file has the reverse). data: uint8,
    (*shape[:-1], bytes a row), a view of the mapped file; nothing is read before it is used.
    """

    name: str
    type: GGMLQuantizationType
    shape: tuple[int, ...]
    data: np.ndarray


@dataclass(frozen=True, slots=True)
class Container:
    """All parts of one GGUF model: the first part's metadata, every part's tensors."""

    paths: tuple[Path, ...]
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]


def is_gguf(path: Path) -> bool:
    """True if `path` is a file that starts with GGUF's magic bytes."""
    if not path.is_file():
        return False
    with path.open("rb") as stream:
        return stream.read(len(MAGIC)) == MAGIC


def part_paths(path: Path) -> tuple[Path, ...]:
    """All parts of the model that `path` is, or is the first part of.

    Raises ModelInvalid where `path` is a later part, or a part is missing; the message names the file.
    """
    match = _PART.match(path.name)
    if match is None:
        return (path,)
    number, count = int(match["number"]), int(match["count"])
    names = [f"{match['stem']}-{i:05d}-of-{count:05d}.gguf" for i in range(1, count + 1)]
    if number != 1:
        raise ModelInvalid(
            f"{path.name} is part {number} of a model split into {count} files; "
            f"give the first one, {names[0]}."
        )
    paths = tuple(path.with_name(name) for name in names)
    for part in paths:
        if not part.is_file():
            raise ModelInvalid(f"The model is split into {count} files and {part.name} is missing.")
    return paths


def read_container(path: Path) -> Container:
    """Map a `.gguf` file, and the other parts if it is the first of a split model.

    Raises ModelNotFound (no such file), ModelInvalid (not GGUF, cut short, parts missing or not of one
    model) or ModelUnsupported (big-endian, or a version of the format that the reader does not know).
    """
    if not path.is_file():
        raise ModelNotFound(f"There is no file {path}.")
    paths = part_paths(path)
    opened = [_open(part) for part in paths]
    metadata = opened[0][1]
    tensors: dict[str, TensorInfo] = {}
    for number, (part, (reader, own)) in enumerate(zip(paths, opened)):
        _check_part(part, own, number, len(paths))
        for tensor in _tensors(part, reader):
            if tensor.name in tensors:
                raise ModelInvalid(f"{part.name} repeats the tensor {tensor.name} of an earlier part.")
            tensors[tensor.name] = tensor
    _check_total(path, metadata, tensors)
    return Container(paths, metadata, tensors)


def _check_part(path: Path, metadata: Mapping[str, Any], number: int, count: int) -> None:
    """The file's own record of the split must agree with the files' names."""
    recorded = int(metadata.get(_SPLIT_NUMBER, 0)), int(metadata.get(_SPLIT_COUNT, 0)) or 1
    if recorded != (number, count):
        raise ModelInvalid(
            f"{path.name} says that it is part {recorded[0] + 1} of {recorded[1]}, but was opened as part "
            f"{number + 1} of {count}; a split model keeps its names NAME-00001-of-{recorded[1]:05d}.gguf."
        )


def _check_total(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> None:
    promised = metadata.get(_SPLIT_TENSORS)
    if promised is not None and promised != len(tensors):
        raise ModelInvalid(f"{path.name} promises {promised} tensors, its parts hold {len(tensors)}.")


class _FastReader(GGUFReader):
    """The reader with arrays taken whole: numbers as one view, strings as one array of str objects.

    The base class makes several views of the map for each of a vocabulary's tokens: 1.5 s or more for
    50,000 tokens and as many merges, against 0.1 s here. Should a later reader parse arrays elsewhere,
    its own fields come out, which `_value` reads as well.
    """

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        if raw_type != GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        item = GGUFValueType(int(self._get(orig_offs, np.uint32)[0]))
        count = int(self._get(orig_offs + 4, np.uint64)[0])
        if item == GGUFValueType.ARRAY or count == 0:
            return super()._get_field_parts(orig_offs, raw_type)
        start = orig_offs + 12
        if item == GGUFValueType.STRING:
            values, end = _scan_strings(memoryview(self.data), start, count)
        else:
            values = np.asarray(self._get(start, self.gguf_scalar_to_np[item], count))
            end = start + values.nbytes
        if len(values) != count:
            raise ValueError(f"an array of {count} values ends after {len(values)}")
        return end - orig_offs, [values], [0], [GGUFValueType.ARRAY, item]


def _scan_strings(raw: memoryview, offset: int, count: int) -> tuple[np.ndarray, int]:
    """(`count` strings as an array of objects, offset behind the last); each is a uint64 length and bytes."""
    texts = []
    read_length = struct.Struct("<Q").unpack_from
    for _ in range(count):
        (length,) = read_length(raw, offset)
        offset += 8
        texts.append(str(raw[offset : offset + length], "utf-8"))
        offset += length
    return np.array(texts, dtype=object), offset


def _open(path: Path) -> tuple[GGUFReader, dict[str, Any]]:
    """(reader, metadata as Python values) of one file."""
    _check_header(path)
    try:
        reader = _FastReader(path)
        return reader, _plain(reader)
    except (ValueError, IndexError, KeyError, OverflowError, struct.error) as error:
        raise ModelInvalid(
            f"{path.name} is damaged or cut short ({_reason(error)}); download it again."
        ) from error


def _check_header(path: Path) -> None:
    """The first eight bytes: magic, and a version that the reader knows in this machine's byte order."""
    with path.open("rb") as stream:
        head = stream.read(8)
    if head[:4] != MAGIC:
        raise ModelInvalid(f"{path.name} is not a GGUF file: it does not start with the bytes GGUF.")
    if len(head) < 8:
        raise ModelInvalid(f"{path.name} is cut short: it ends after {len(head)} bytes.")
    version = int.from_bytes(head[4:], sys.byteorder)
    if version not in READER_SUPPORTED_VERSIONS:
        swapped = int.from_bytes(head[4:], "big") in READER_SUPPORTED_VERSIONS
        what = "is written in the other byte order" if swapped else f"has version {version} of the format"
        raise ModelUnsupported(f"{path.name} {what}; convert it again with a current converter.")


def _reason(error: Exception) -> str:
    return (str(error.args[0]) if error.args else type(error).__name__).rstrip(".")


def _plain(reader: GGUFReader) -> dict[str, Any]:
    """Metadata as Python values; the reader's own GGUF.* entries are left out."""
    return {name: _value(field) for name, field in reader.fields.items() if not name.startswith("GGUF.")}


def _value(field: ReaderField) -> Any:
    last = field.parts[-1]
    return last.tolist() if last.dtype == object else field.contents()


def _tensors(path: Path, reader: GGUFReader) -> list[TensorInfo]:
    found = []
    file_size = path.stat().st_size
    for stored in reader.tensors:
        shape = tuple(int(size) for size in reversed(stored.shape))
        if stored.data_offset + stored.n_bytes > file_size:
            raise ModelInvalid(f"{path.name} is cut short: the tensor {stored.name} lies beyond its end.")
        data = _raw_rows(path, stored.name, np.asarray(stored.data), stored.tensor_type, shape)
        found.append(TensorInfo(stored.name, stored.tensor_type, shape, data))
    return found


def _raw_rows(
    path: Path, name: str, data: np.ndarray, kind: GGMLQuantizationType, shape: tuple[int, ...]
) -> np.ndarray:
    """The bytes of a tensor as uint8 (*shape[:-1], bytes a row), whatever view the reader made."""
    block_size, block_bytes = GGML_QUANT_SIZES[kind]
    if not shape or shape[-1] % block_size:
        raise ModelInvalid(f"{path.name}: rows of the tensor {name} are not whole blocks of {kind.name}.")
    return data.reshape(-1).view(np.uint8).reshape(*shape[:-1], shape[-1] // block_size * block_bytes)
