"""The text that MLX would hand to Apple's compiler, and how it would launch it, obtained from MLX itself.

`mx.export_function` with a callback traces a call without a device. A custom kernel's record holds the
generated source, grid and threadgroup. The callback API is experimental: test_trace.py pins what is read
from it. Knows nothing of how the text is compiled or run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx


@dataclass(frozen=True)
class Trace:
    """One launch as MLX would make it."""

    name: str  # the function's name in the source, template arguments included
    source: str  # header, signature, body, instantiation
    grid: tuple[int, int, int]  # in threads
    threadgroup: tuple[int, int, int]
    shape_arguments: tuple[tuple[bool, bool, bool], ...]  # per input: NAME_shape, _strides, _ndim are passed
    row_contiguous: bool  # MLX copies inputs that are not


def trace(kernel: Callable[..., Any], inputs: Sequence[mx.array], **call: Any) -> Trace:
    """What `kernel(inputs=inputs, **call)` would launch; `kernel` is from `mx.fast.metal_kernel`."""
    records: list[dict[str, Any]] = []

    def keep(record: dict[str, Any]) -> None:
        if record["type"] == "primitive" and record["name"] == "CustomKernel":
            records.append(record)

    mx.export_function(keep, lambda *arrays: kernel(inputs=list(arrays), **call), *inputs)
    assert len(records) == 1, f"expected one kernel in the trace, found {len(records)}"
    arguments = records[0]["arguments"]
    return Trace(
        name=arguments[0],
        source=arguments[1],
        grid=tuple(arguments[2:5]),
        threadgroup=tuple(arguments[5:8]),
        shape_arguments=tuple(arguments[8]),
        row_contiguous=arguments[9],
    )
