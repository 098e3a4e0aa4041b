"""Runs a compiled kernel over a grid, in this process, and reads back outputs, counters and the first
failure.

The structures mirror runtime/state.h. Knows NumPy; knows nothing of MSL.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from tests.metal import compile as compiler
from tests.metal.report import KernelFailure, Where, find_line, tidy

Order = Literal["forward", "reverse", "rotating"]
ORDERS: tuple[Order, ...] = get_args(Order)
Role = Literal["input", "output", "filled output"]
# A kernel that executes more basic blocks than this is taken to be in an endless loop.
BLOCK_LIMIT = 2_000_000_000


@dataclass(frozen=True)
class Buffer:
    """One argument of a kernel. `data` is read for inputs and filled outputs, written for outputs."""

    name: str
    data: np.ndarray
    role: Role
    alignment: int  # bytes: the buffer starts at a multiple of it and of no greater power of two


@dataclass(frozen=True)
class Traffic:
    """Bytes that one launch moved between one buffer and its threads.

    `read` and `written`: each time a simdgroup executes a load or store instruction, the distinct bytes
    that its 32 lanes touch together are counted; so a broadcast counts once, and the same bytes loaded by
    another instruction, a later iteration or another simdgroup count again. The n-th time that lanes come
    to an instruction since the last threadgroup barrier is taken to be one execution. Instructions are
    those left after optimisation. `read_once`: each byte counts once a threadgroup, however often that
    threadgroup reads it. `read_distinct`, `written_distinct`: each byte counts once.
    """

    size: int
    read: int
    written: int
    read_once: int
    read_distinct: int
    written_distinct: int


@dataclass(frozen=True)
class Counters:
    """What one launch did."""

    traffic: dict[str, Traffic]  # by buffer name
    threadgroup_bytes: int  # threadgroup variables of one threadgroup
    barriers: int  # threadgroup_barrier: the most that one thread executed
    simdgroup_barriers: int  # the same for simdgroup_barrier
    simdgroup_operations: int  # the same for sums, shuffles, votes and matrix products
    accesses: int  # loads and stores of all threads
    blocks: int  # basic blocks executed by all threads


class _Buffer(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("size", ctypes.c_uint64),
        ("kind", ctypes.c_uint32),
        ("alignment", ctypes.c_uint32),
        ("name", ctypes.c_char_p),
    ]


class _Traffic(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_uint64)
        for name in ("read", "written", "read_once", "read_distinct", "written_distinct")
    ]


class _Totals(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_uint64)
        for name in (
            "accesses",
            "blocks",
            "switches",
            "threadgroup_bytes",
            "barriers",
            "simdgroup_barriers",
            "simdgroup_operations",
        )
    ]


class _Location(ctypes.Structure):
    _fields_ = [
        ("known", ctypes.c_uint32),
        ("thread", ctypes.c_uint32),
        ("simdgroup", ctypes.c_uint32),
        ("lane", ctypes.c_uint32),
        ("threadgroup", ctypes.c_uint32 * 3),
        ("offset", ctypes.c_uint64),
        ("file", ctypes.c_char_p),
        ("line", ctypes.c_uint32),
    ]


class _Failure(ctypes.Structure):
    _fields_ = [
        ("failed", ctypes.c_uint32),
        ("message", ctypes.c_char * 512),
        ("here", _Location),
        ("other", _Location),
    ]


class _Launch(ctypes.Structure):
    _fields_ = [
        ("buffers", ctypes.POINTER(_Buffer)),
        ("buffer_count", ctypes.c_uint32),
        ("grid", ctypes.c_uint32 * 3),
        ("threadgroup", ctypes.c_uint32 * 3),
        ("order", ctypes.c_uint32),
        ("seed", ctypes.c_uint32),
        ("block_limit", ctypes.c_uint64),
    ]


class _Kernel(ctypes.Structure):
    _fields_ = [("entry", ctypes.c_void_p), ("image_begin", ctypes.c_void_p), ("image_end", ctypes.c_void_p)]


_ROLES: dict[Role, int] = {"input": 0, "output": 1, "filled output": 2}


@functools.cache
def _load(library: Path) -> _Kernel:
    """Load a kernel once a process; the runtime must be there before it."""
    compiler.load_runtime()
    image = ctypes.CDLL(str(library))
    image.msl_image_begin.restype = image.msl_image_end.restype = ctypes.c_void_p
    entry = ctypes.cast(image.msl_entry, ctypes.c_void_p)
    return _Kernel(entry, image.msl_image_begin(), image.msl_image_end())


def run(
    library: Path,
    name: str,
    buffers: list[Buffer],
    grid: tuple[int, int, int],
    threadgroup: tuple[int, int, int],
    order: Order = "forward",
    seed: int = 0,
    block_limit: int = BLOCK_LIMIT,
) -> Counters:
    """Run the kernel in `library`; outputs are written into `buffers`. Raises KernelFailure."""
    records = (_Buffer * len(buffers))(*[_record(buffer) for buffer in buffers])
    uint3 = ctypes.c_uint32 * 3
    launch = _Launch(
        records, len(buffers), uint3(*grid), uint3(*threadgroup), ORDERS.index(order), seed, block_limit
    )
    failure, totals, traffic = _Failure(), _Totals(), (_Traffic * len(buffers))()
    compiler.load_runtime().msl_launch(
        ctypes.byref(_load(library)),
        ctypes.byref(launch),
        ctypes.byref(failure),
        ctypes.byref(totals),
        traffic,
    )
    if failure.failed:
        here, other = _where(failure.here, library), _where(failure.other, library)
        raise KernelFailure(name, tidy(failure.message.decode()), here, other, order)
    return _counters(buffers, totals, traffic)


def _record(buffer: Buffer) -> _Buffer:
    data = buffer.data
    assert data.flags.c_contiguous, f"buffer {buffer.name} is not contiguous"
    name = buffer.name.encode()
    return _Buffer(data.ctypes.data, data.nbytes, _ROLES[buffer.role], buffer.alignment, name)


def _where(location: _Location, library: Path) -> Where | None:
    if not location.known and not location.file:
        return None
    file, line = (location.file.decode(), location.line) if location.file else (None, 0)
    if location.offset:
        file, line = find_line(library, location.offset)
    thread = location.thread if location.known else None
    return Where(file, line, thread, location.simdgroup, location.lane, tuple(location.threadgroup))


def _counters(buffers: list[Buffer], totals: _Totals, traffic: ctypes.Array[_Traffic]) -> Counters:
    names = [field[0] for field in _Traffic._fields_]
    per_buffer = {
        buffer.name: Traffic(size=buffer.data.nbytes, **{name: getattr(record, name) for name in names})
        for buffer, record in zip(buffers, traffic, strict=True)
    }
    return Counters(
        traffic=per_buffer,
        threadgroup_bytes=totals.threadgroup_bytes,
        barriers=totals.barriers,
        simdgroup_barriers=totals.simdgroup_barriers,
        simdgroup_operations=totals.simdgroup_operations,
        accesses=totals.accesses,
        blocks=totals.blocks,
    )
