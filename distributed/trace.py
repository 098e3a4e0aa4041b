"""Learns which part of which stored tensor each parameter of a rank needs, without reading any.

A function from stored tensors to parameters (the definition's renaming and stacking, then its own
`shard()`) runs on placeholders that are never evaluated. MLX writes down the operations it would do
(`mx.export_function` with a callback); going back through them from a parameter ends at regions of
stored tensors. So fused, stacked, transposed and hand-cut tensors need no rules of their own.

Knows: MLX's operations by name. Does not know files (reader.py) or definitions (load.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

_lock = threading.Lock()


class FakeGroup:
    """Stands for a process group before there is one: a rank and a size, nothing is ever sent."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


@dataclass(frozen=True, slots=True)
class Node:
    """One array of the graph: the `output`th result of a primitive, or an input (`primitive` is None).

    source: the input's number. value: a constant's.
    """

    shape: tuple[int, ...]
    dtype: mx.Dtype
    primitive: str | None = None
    arguments: tuple[Any, ...] = ()
    operands: tuple[Node, ...] = ()
    output: int = 0
    source: int | None = None
    value: mx.array | None = None
    siblings: int = 0  # names the primitive, the same for all its results


class NotTraceable(Exception):
    """The function did something whose operations MLX cannot write down, such as evaluating."""


def trace(function: Callable[..., Sequence[mx.array]], inputs: Sequence[mx.array]) -> list[Node]:
    """The graph of `function(*inputs)`, one node a result; `inputs` may be larger than any memory.

    Raises NotTraceable if MLX cannot describe it; errors of `function` itself come through.
    """
    events: list[dict[str, Any]] = []
    with _lock, _without_layout():
        try:
            mx.export_function(lambda event: events.append(dict(event)), function, *inputs)
        except ValueError as error:
            if "export" not in str(error) and "eval" not in str(error):
                raise
            raise NotTraceable(str(error)) from error
    return _nodes(events)


@contextmanager
def _without_layout() -> Iterator[None]:
    """`mx.contiguous` changes no number, and cannot be written down: it is the identity meanwhile."""
    original = mx.contiguous
    mx.contiguous = lambda a, *_, **__: a
    try:
        yield
    finally:
        mx.contiguous = original


def _nodes(events: list[dict[str, Any]]) -> list[Node]:
    known: dict[str, Node] = {}
    wanted: list[str] = []
    for number, event in enumerate(events):
        if event["type"] == "inputs":
            for source, (name, shape, dtype) in enumerate(event["inputs"]):
                known[name] = Node(tuple(shape), dtype, source=source)
        elif event["type"] == "constants":
            for name, value in event["constants"]:
                known[name] = Node(tuple(value.shape), value.dtype, value=value)
        elif event["type"] == "outputs":
            wanted = [name for name, _, _ in event["outputs"]]
        elif event["type"] == "primitive":
            operands = tuple(known[name] for name, _, _ in event["inputs"])
            for output, (name, shape, dtype) in enumerate(event["outputs"]):
                known[name] = Node(
                    tuple(shape),
                    dtype,
                    event["name"],
                    tuple(event["arguments"]),
                    operands,
                    output,
                    siblings=number,
                )
    return [known[name] for name in wanted]
