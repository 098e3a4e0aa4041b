"""Reads regions of tensors out of safetensors files, and counts and digests every byte of it.

Knows: where a tensor's bytes lie (models/files.py) and `preadv`. Nothing is mapped into memory, so that
what is counted is what was read. Does not know what the numbers are for.

Rows that are apart are read one by one: in an array of (out, in) a cut of `in` is one piece a row.
"""

from __future__ import annotations

import functools
import hashlib
import math
import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from mlxserve.distributed.slices import Region, elements, is_whole, shape_of, show
from mlxserve.errors import ModelInvalid, ModelUnsupported
from mlxserve.models.files import BITS, TensorInfo

# Storage by width: a tensor's bytes are moved as unsigned integers, whatever they mean.
STORAGE = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
MOST_HASHING = 2  # regions
LARGEST_READ = 1 << 30  # some systems refuse to read 2 GiB at once


def storage_type(tensor: TensorInfo) -> Any:
    """The NumPy type that moves a tensor's elements. Raises ModelUnsupported for parts of a byte."""
    bits = BITS[tensor.dtype]
    if bits not in STORAGE:
        raise ModelUnsupported(f"Tensors of type {tensor.dtype} are not supported ({tensor.file}).")
    return STORAGE[bits]


def region_key(name: str, region: Region, shape: tuple[int, ...]) -> str:
    """What a region is called in digests: the tensor's name, and the part where it is not the whole."""
    return name if is_whole(region, shape) else f"{name}[{show(region)}]"


class TensorReader:
    """Open files of one model.

    bytes_read: bytes moved so far. digests: SHA-256 (its first 128 bits) of every region read, by
    `region_key`, if wanted; complete when the reader is left. A second thread computes them while the next
    region is read. For one thread; use as a context manager.
    """

    def __init__(self, tensors: dict[str, TensorInfo], *, digest: bool = True) -> None:
        self.tensors = tensors
        self.bytes_read = 0
        self.digests: dict[str, str] = {}
        self._digest = digest
        self._open: dict[Path, int] = {}
        self._hasher = ThreadPoolExecutor(1)
        self._hashing: deque[tuple[str, Future[str]]] = deque()

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()
        self._collect(0)
        self._hasher.shutdown()

    def read(self, name: str, region: Region, out: np.ndarray) -> None:
        """Put a region of a tensor into `out`, which has its shape and `storage_type`.

        Raises ModelInvalid, naming the file, if it ends early or cannot be read.
        """
        tensor = self.tensors[name]
        target = out if out.flags.c_contiguous else np.empty(out.shape, out.dtype)
        flat = target.reshape(-1).view(np.uint8)
        place = 0
        for offset, length in _pieces(tensor, region, target.itemsize):
            self._fill(tensor, offset, memoryview(flat[place : place + length]))  # type: ignore[arg-type]
            place += length
        if self._digest:
            key = region_key(name, region, tensor.shape)
            self._hashing.append((key, self._hasher.submit(_sha256, flat)))
            self._collect(MOST_HASHING)
        if target is not out:
            out[...] = target

    def _collect(self, most: int) -> None:
        """Take finished digests until at most `most` are being computed, whose regions stay in memory."""
        while len(self._hashing) > most:
            key, digest = self._hashing.popleft()
            self.digests[key] = digest.result()

    def digest(self, name: str, region: Region) -> None:
        """Read a region for its digest alone, holding at most 16 MiB of it."""
        tensor = self.tensors[name]
        seen = hashlib.sha256()
        for offset, length in _pieces(tensor, region, BITS[tensor.dtype] // 8):
            for start in range(0, length, 1 << 24):
                piece = memoryview(bytearray(min(1 << 24, length - start)))
                self._fill(tensor, offset + start, piece)
                seen.update(piece)
        self.digests[region_key(name, region, tensor.shape)] = seen.hexdigest()[:32]

    def _fill(self, tensor: TensorInfo, offset: int, piece: memoryview) -> None:
        descriptor = self._descriptor(tensor.file)
        done = 0
        while done < len(piece):
            try:
                got = os.preadv(descriptor, [piece[done : done + LARGEST_READ]], offset + done)
            except OSError as error:
                raise ModelInvalid(f"{tensor.file} cannot be read: {error.strerror}.") from error
            if got == 0:
                raise ModelInvalid(f"{tensor.file} ends before byte {offset + len(piece):,}; fetch it again.")
            done += got
        self.bytes_read += done

    def _descriptor(self, file: Path) -> int:
        if file not in self._open:
            self._open[file] = os.open(file, os.O_RDONLY)
        return self._open[file]


def _sha256(data: np.ndarray) -> str:
    return hashlib.sha256(data).hexdigest()[:32]  # type: ignore[arg-type]


def region_bytes(tensor: TensorInfo, region: Region) -> int:
    return elements(region) * BITS[tensor.dtype] // 8


def _pieces(tensor: TensorInfo, region: Region, item: int) -> Iterator[tuple[int, int]]:
    """(offset in the file, bytes) of each unbroken run of a region, in row-major order."""
    shape, axes = tensor.shape, len(region)
    inner = axes  # axes from here on are whole, so their elements lie together
    while inner and region[inner - 1] == range(shape[inner - 1]):
        inner -= 1
    strides = [math.prod(shape[axis + 1 :]) * item for axis in range(axes)]
    run = math.prod(shape[inner:]) * item
    if not elements(region):
        return
    outer = list(region[:inner])
    if outer and outer[-1].step == 1:  # the last cut axis is a run as well
        run *= len(outer[-1])
        outer[-1] = range(outer[-1].start, outer[-1].start + 1)
    steps = [np.array(axis) * stride for axis, stride in zip(outer, strides)]
    offsets = functools.reduce(np.add.outer, steps, np.array(tensor.start))
    for offset in offsets.ravel().tolist():
        yield offset, run


def empty_like(tensor: TensorInfo, region: Region) -> np.ndarray:
    """Room for a region in its storage type."""
    return np.empty(shape_of(region), storage_type(tensor))
