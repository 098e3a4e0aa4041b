"""Runs Metal kernels on this CPU: the very text that MLX would hand to Apple's compiler, with every access
checked.

    from tests.metal import harness

    result = harness.run(paged.decode, q, k, v, table, lens, order="reverse")
    out, = result.outputs                      # NumPy arrays, bfloat16 as float32
    result.counters.traffic["k"].read          # bytes, see run.Traffic
    result.launch("paged_decode").counters     # where a wrapper launches several kernels

`launch` is an ordinary wrapper: it calls a kernel made by `mx.fast.metal_kernel` with MLX arrays and
returns the outputs. Importing this module puts a stand-in for `mx.fast.metal_kernel` in place, whose
kernels behave as MLX's own, except inside `run`, where each call is traced, compiled, executed and checked
here; other MLX operations of the wrapper run as always. So a wrapper must make its kernels after this
module was imported: in a cached function, as the repository's do, and not at import.

A kernel that does what it must not raises `KernelFailure` (file, line, thread, what was wrong); text that
Apple's compiler would refuse raises `CompileError`. Files: trace.py (text from MLX), lint.py, sources.py
(whose line is it), compile.py, run.py with runtime/ (execution and checks), msl/ (Metal's names),
report.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

import mlxserve  # noqa: F401  OpenBLAS before MLX
from tests.metal import compile as compiler
from tests.metal import run as executor
from tests.metal.compile import CompileError, why_unavailable
from tests.metal.lint import lint
from tests.metal.report import KernelFailure
from tests.metal.run import ORDERS, Counters, Order, Traffic
from tests.metal.signature import read_signature
from tests.metal.sources import Piece, annotate, locate
from tests.metal.trace import Trace, trace

__all__ = [
    "ORDERS",
    "CompileError",
    "Counters",
    "KernelFailure",
    "Launch",
    "Order",
    "Result",
    "Traffic",
    "run",
    "why_unavailable",
]


# A replaced text may never end; what it replaces runs far fewer basic blocks in a test.
MUTANT_BLOCK_LIMIT = 50_000_000


@dataclass(frozen=True)
class Launch:
    """One kernel launch: its name as given to `mx.fast.metal_kernel`, its shape, and what it did."""

    name: str
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]
    counters: Counters


@dataclass(frozen=True)
class Result:
    """What a wrapper returned, as NumPy arrays (bfloat16 widened to float32), and the launches it made."""

    outputs: list[np.ndarray]
    launches: list[Launch]

    @property
    def counters(self) -> Counters:
        """Of the only launch."""
        names = [launch.name for launch in self.launches]
        assert len(names) == 1, f"the wrapper launched {names}: name one with .launch(name)"
        return self.launches[0].counters

    def launch(self, name: str) -> Launch:
        """The only launch of the kernel called `name`."""
        found = [launch for launch in self.launches if launch.name == name]
        assert len(found) == 1, f"{len(found)} launches of {name!r} among {[x.name for x in self.launches]}"
        return found[0]


@dataclass
class _Session:
    """How kernels called inside `run` are to be executed, and what they did."""

    order: Order
    seed: int
    alignment: int | Mapping[str, int] | None
    strict: bool
    block_limit: int
    launches: list[Launch] = field(default_factory=list)


_session: _Session | None = None


def run(
    launch: Callable[..., Any],
    *inputs: Any,
    order: Order = "forward",
    seed: int = 0,
    alignment: int | Mapping[str, int] | None = None,
    strict: bool = True,
    block_limit: int = executor.BLOCK_LIMIT,
    **options: Any,
) -> Result:
    """Call `launch(*inputs, **options)`, executing its kernels on this CPU.

    order: threads and threadgroups forward, in reverse, or threads from a random one on in every round (by
    `seed`). alignment: bytes that buffers are aligned to, for all or by name. By default each starts at a
    multiple of its
        element's size (of 2 for bytes) and no more, as a row of a larger array might.
    strict: also refuse what only Apple's compiler would; off for text that is not this repository's.
    Raises KernelFailure and CompileError.
    """
    global _session
    assert _session is None, "harness.run inside harness.run"
    if _replacement is not None:
        block_limit = min(block_limit, MUTANT_BLOCK_LIMIT)
    session = _Session(order, seed, alignment, strict, block_limit)
    _session = session
    try:
        returned = launch(*inputs, **options)
        arrays = returned if isinstance(returned, (list, tuple)) else [returned]
        return Result([_to_numpy(array) for array in arrays], session.launches)
    finally:
        _session = None


class _Kernel:
    """What `mx.fast.metal_kernel` returns here: MLX's kernel, and outside of `run` nothing else."""

    def __init__(self, make: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        self._make = make
        self._kernel = make(*arguments, **options)
        names = ("name", "input_names", "output_names", "source", "header")
        self._made_with = {**dict(zip(names, arguments)), **options}

    def __call__(self, **call: Any) -> list[mx.array]:
        if _session is None:
            return self._kernel(**call)
        if _replacement is None:
            return _execute(_session, self._kernel, self._made_with, **call)
        made_with = _replacement.apply(self._made_with)
        return _execute(_session, self._make(**made_with), made_with, **call)


@dataclass
class _Replacement:
    """A file's text, what stands for it in kernels, and the kernels in which it did."""

    old: str
    new: str
    uses: list[str]

    def apply(self, made_with: dict[str, Any]) -> dict[str, Any]:
        texts = {part: made_with.get(part, "") for part in ("source", "header")}
        if any(self.old in text for text in texts.values()):
            self.uses.append(made_with["name"])
        return {**made_with, **{part: text.replace(self.old, self.new) for part, text in texts.items()}}


_replacement: _Replacement | None = None


@contextlib.contextmanager
def replaced(old: str, new: str) -> Iterator[list[str]]:
    """Within the block, kernels that hold the text `old` are run with `new` in its place.

    Yields the names of the kernels where that happened, as they are launched.
    """
    global _replacement
    _replacement = _Replacement(old, new, [])
    try:
        yield _replacement.uses
    finally:
        _replacement = None


def _install() -> None:
    """Put the stand-in in place of `mx.fast.metal_kernel`, once."""
    real = mx.fast.metal_kernel
    if getattr(real, "stands_in", False):
        return

    def metal_kernel(*arguments: Any, **options: Any) -> _Kernel:
        return _Kernel(real, *arguments, **options)

    metal_kernel.stands_in = True  # type: ignore[attr-defined]
    metal_kernel.__doc__ = real.__doc__
    mx.fast.metal_kernel = metal_kernel


_install()


def _execute(
    session: _Session,
    kernel: Callable[..., Any],
    made_with: dict[str, Any],
    *,
    inputs: Sequence[Any],
    output_shapes: Sequence[Sequence[int]],
    output_dtypes: Sequence[mx.Dtype],
    init_value: float | None = None,
    **call: Any,
) -> list[mx.array]:
    """Trace one call, compile its text, run it, and return its outputs."""
    arrays = [x if isinstance(x, mx.array) else mx.array(x) for x in inputs]
    call.pop("verbose", None)
    call.pop("stream", None)
    traced = trace(kernel, arrays, output_shapes=output_shapes, output_dtypes=output_dtypes, **call)
    assert traced.row_contiguous, "ensure_row_contiguous=False is not supported by the harness"
    source = annotate(traced.source, _pieces(made_with), made_with["name"])
    signature = read_signature(traced.source, traced.name)
    if session.strict:
        _refuse(source)
    library = compiler.build(source, signature, session.strict)
    buffers = _input_buffers(session, made_with["input_names"], arrays, traced)
    outputs = _output_buffers(session, made_with["output_names"], output_shapes, output_dtypes, init_value)
    names = tuple(buffer.name for buffer in [*buffers, *outputs])
    assert names == signature.buffers, f"MLX passes {signature.buffers}, the harness {names}"
    counters = executor.run(
        library,
        made_with["name"],
        [*buffers, *outputs],
        traced.grid,
        traced.threadgroup,
        order=session.order,
        seed=session.seed,
        block_limit=session.block_limit,
    )
    session.launches.append(Launch(made_with["name"], traced.grid, traced.threadgroup, counters))
    return [_to_mlx(buffer.data, dtype) for buffer, dtype in zip(outputs, output_dtypes, strict=True)]


def _pieces(made_with: dict[str, Any]) -> list[Piece]:
    name = made_with["name"]
    header = Piece(made_with.get("header", ""), f"<header of {name}>")
    return [header, Piece(made_with["source"], f"<body of {name}>")]


def _refuse(source: str) -> None:
    found = [f"{locate(source, finding.line)}: {finding.text}" for finding in lint(source)]
    if found:
        raise CompileError("\n".join(found))


def _alignment(session: _Session, name: str, itemsize: int) -> int:
    if isinstance(session.alignment, int):
        return session.alignment
    return (session.alignment or {}).get(name, max(itemsize, 2))


def _input_buffers(
    session: _Session, names: Sequence[str], arrays: list[mx.array], traced: Trace
) -> list[executor.Buffer]:
    """Each input, followed by the shape, strides and rank that its text asks for."""
    buffers = []
    for name, array, wanted in zip(names, arrays, traced.shape_arguments, strict=True):
        data = _raw(array)
        buffers.append(executor.Buffer(name, data, "input", _alignment(session, name, data.itemsize)))
        for suffix, value, asked in zip(("shape", "strides", "ndim"), _layout(array), wanted, strict=True):
            if asked and array.ndim:
                buffers.append(executor.Buffer(f"{name}_{suffix}", value, "input", 8))
    return buffers


def _layout(array: mx.array) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    strides = [int(np.prod(array.shape[i + 1 :], dtype=np.int64)) for i in range(array.ndim)]
    return np.array(array.shape, np.int32), np.array(strides, np.int64), np.array([array.ndim], np.int32)


def _output_buffers(
    session: _Session,
    names: Sequence[str],
    shapes: Sequence[Sequence[int]],
    dtypes: Sequence[mx.Dtype],
    init_value: float | None,
) -> list[executor.Buffer]:
    buffers = []
    for name, shape, dtype in zip(names, shapes, dtypes, strict=True):
        data = _raw(mx.full(tuple(shape), 0 if init_value is None else init_value, dtype=dtype))
        role: executor.Role = "output" if init_value is None else "filled output"
        buffers.append(executor.Buffer(name, data, role, _alignment(session, name, data.itemsize)))
    return buffers


def _raw(array: mx.array) -> np.ndarray:
    """The array's bytes, row-contiguous and writable; bfloat16 as uint16, which NumPy knows."""
    plain = array.view(mx.uint16) if array.dtype == mx.bfloat16 else array
    return np.array(plain, order="C")


def _to_mlx(data: np.ndarray, dtype: mx.Dtype) -> mx.array:
    return mx.array(data).view(mx.bfloat16) if dtype == mx.bfloat16 else mx.array(data)


def _to_numpy(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32) if array.dtype == mx.bfloat16 else array)
