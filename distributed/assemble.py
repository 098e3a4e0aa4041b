"""Makes a rank's parameters from regions of stored tensors, going back through a traced graph.

What only moves numbers (cuts, joins, transposes, reshapes) ends as reads straight into the parameter's
memory; what computes (a type changed, a bias divided, a quantisation) is computed on the region that is
needed. An operation not known here raises `Unknown`: the caller then reads that tensor whole.

Knows: graphs (trace.py), regions (slices.py) and a reader. Does not know files' layout or definitions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from mlxserve.distributed.slices import (
    Region,
    is_whole,
    shape_of,
    through_broadcast,
    through_concatenate,
    through_reshape,
    through_slice,
    through_transpose,
    whole,
)
from mlxserve.distributed.trace import Node

STORAGE = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}  # by bytes an element
RESHAPES = ("Reshape", "Flatten", "Unflatten", "ExpandDims", "Squeeze")
ELEMENTWISE: dict[str, Callable[..., mx.array]] = {
    "Add": mx.add,
    "Subtract": mx.subtract,
    "Multiply": mx.multiply,
    "Divide": mx.divide,
    "Negative": mx.negative,
    "Exp": mx.exp,
    "Log": mx.log,
}


class Unknown(Exception):
    """An operation that cannot be done on a region."""


class Source(Protocol):
    """Where regions come from: a reader, or something that only writes down what would be read."""

    def read(self, source: int, region: Region, out: np.ndarray | None) -> None:
        """Fill `out`, an array of the region's shape in storage type; None when nothing is wanted."""


class Assembler:
    """Fills arrays from a `Source`. `dry` only asks the source, and computes nothing."""

    def __init__(self, source: Source, *, dry: bool = False) -> None:
        self._source = source
        self._dry = dry
        self._last: tuple[tuple[int, Region], list[mx.array]] | None = None

    def array(self, node: Node, region: Region | None = None) -> mx.array | None:
        """A parameter (or a region of it) in memory, evaluated; None if dry. Raises Unknown."""
        region = whole(node.shape) if region is None else region
        if node.primitive in COMPUTED or node.value is not None:
            return self._compute(node, region)
        if self._dry:
            self._fill(node, region, None)
            return None
        result = mx.zeros(shape_of(region) or (1,), STORAGE[node.dtype.size])
        mx.eval(result)
        out = _memory(result)  # what is read goes where it stays
        self._fill(node, region, out if region else out.reshape(()))
        result = result if region else result[0]
        return result if result.dtype == node.dtype else result.view(node.dtype)

    def _fill(self, node: Node, region: Region, out: np.ndarray | None) -> None:
        """Put a region of a node into `out`, in storage type."""
        if node.source is not None:
            self._source.read(node.source, region, out)
        elif node.primitive in MOVED:
            MOVED[node.primitive](self, node, region, out)
        elif node.primitive in RESHAPES:
            self._reshape(node, region, out)
        else:
            value = self._compute(node, region)
            if out is not None and value is not None:
                out[...] = _bits(value).reshape(out.shape)

    # -- what moves ---------------------------------------------------------------------------------

    def _slice(self, node: Node, region: Region, out: np.ndarray | None) -> None:
        starts, _, steps = node.arguments
        if min(steps, default=1) < 1:
            raise Unknown("Slice backwards")
        self._fill(node.operands[0], through_slice(region, starts, steps), out)

    def _split(self, node: Node, region: Region, out: np.ndarray | None) -> None:
        places, axis = node.arguments
        first = 0 if node.output == 0 else places[node.output - 1]
        starts = [first if n == axis else 0 for n in range(len(region))]
        self._fill(node.operands[0], through_slice(region, starts, [1] * len(region)), out)

    def _concatenate(self, node: Node, region: Region, out: np.ndarray | None) -> None:
        (axis,) = node.arguments
        lengths = [operand.shape[axis] for operand in node.operands]
        for operand, part, place in through_concatenate(region, axis, lengths):
            here = None if out is None else out[(slice(None),) * axis + (place,)]
            self._fill(node.operands[operand], part, here)

    def _transpose(self, node: Node, region: Region, out: np.ndarray | None) -> None:
        (axes,) = node.arguments
        turned = None if out is None else out.transpose(np.argsort(axes))
        self._fill(node.operands[0], through_transpose(region, axes), turned)

    def _copy(self, node: Node, region: Region, out: np.ndarray | None) -> None:
        self._fill(node.operands[0], region, out)

    def _reshape(self, node: Node, region: Region, out: np.ndarray | None) -> None:
        operand = node.operands[0]
        needed = through_reshape(region, node.shape, operand.shape)
        if needed is not None:
            shaped = None if out is None else _same_memory(out, shape_of(needed))
            if shaped is not None or out is None:
                self._fill(operand, needed, shaped)
                return
        else:
            needed = whole(operand.shape)
        value = self.array(operand, needed)
        if out is not None and value is not None:
            if is_whole(needed, operand.shape):
                out[...] = _bits(value).reshape(node.shape)[np.ix_(*region)]
            else:
                out[...] = _bits(value).reshape(out.shape)

    # -- what computes ------------------------------------------------------------------------------

    def _compute(self, node: Node, region: Region) -> mx.array | None:
        if node.value is not None:
            return None if self._dry else node.value[tuple(slice(a.start, a.stop, a.step) for a in region)]
        if node.primitive == "Broadcast":
            return self._broadcast(node, region)
        if node.primitive in ELEMENTWISE:
            parts = [self.array(operand, region) for operand in node.operands]
            return self._done(lambda: ELEMENTWISE[str(node.primitive)](*parts))
        if node.primitive == "AsType":
            part = self.array(node.operands[0], region)
            return self._done(lambda: part.astype(node.dtype))  # type: ignore[union-attr]
        if node.primitive == "View":
            return self._view(node, region)
        if node.primitive == "Quantize":
            return self._quantize(node, region)
        raise Unknown(str(node.primitive))

    def _done(self, compute: Callable[[], mx.array]) -> mx.array | None:
        if self._dry:
            return None
        result = compute()
        mx.eval(result)
        return result

    def _broadcast(self, node: Node, region: Region) -> mx.array | None:
        operand = node.operands[0]
        part = self.array(operand, through_broadcast(region, operand.shape))
        return self._done(lambda: mx.broadcast_to(part, shape_of(region)))  # type: ignore[arg-type]

    def _view(self, node: Node, region: Region) -> mx.array | None:
        """The same bytes as another type; only what is whole along the last axis, unless sizes agree."""
        operand = node.operands[0]
        if operand.dtype.size == node.dtype.size:
            needed = region
        elif region and region[-1] == range(node.shape[-1]):
            needed = (*region[:-1], range(operand.shape[-1]))
        else:
            raise Unknown("View of a part")
        part = self.array(operand, needed)
        return self._done(lambda: part.view(node.dtype))  # type: ignore[union-attr]

    def _quantize(self, node: Node, region: Region) -> mx.array | None:
        """Packed weights, scales and biases of whole rows; computed once for the three of them."""
        group_size, bits, mode, unpacks = node.arguments
        if mode or unpacks:  # mode 0 is affine
            raise Unknown("Quantize in another mode")
        operand = node.operands[0]
        rows = (*region[:-1], range(operand.shape[-1]))
        if self._last is None or self._last[0] != (node.siblings, rows):
            part = self.array(operand, rows)
            if self._dry:
                self._last = ((node.siblings, rows), [])
                return None
            assert part is not None
            self._last = ((node.siblings, rows), list(mx.quantize(part, group_size, bits)))
            mx.eval(self._last[1])
        if self._dry:
            return None
        result = self._last[1][node.output]
        return self._done(lambda: result[..., region[-1].start : region[-1].stop : region[-1].step])


def _memory(array: mx.array) -> np.ndarray:
    """An evaluated array's own memory, to be written."""
    return np.asarray(memoryview(array))  # type: ignore[arg-type]


def _bits(array: mx.array) -> np.ndarray:
    """An array's numbers as unsigned integers of the same width."""
    plain = mx.contiguous(array).view(STORAGE[array.dtype.size])
    mx.eval(plain)
    return np.asarray(memoryview(plain))  # type: ignore[arg-type]


def _same_memory(out: np.ndarray, shape: tuple[int, ...]) -> np.ndarray | None:
    """`out` in another shape, if that needs no copy."""
    shaped = out.reshape(shape)
    return shaped if np.shares_memory(shaped, out) or not out.size else None


MOVED: dict[str, Any] = {
    "Slice": Assembler._slice,
    "Split": Assembler._split,
    "Concatenate": Assembler._concatenate,
    "Transpose": Assembler._transpose,
    "Copy": Assembler._copy,
    "StopGradient": Assembler._copy,
}
COMPUTED = {*ELEMENTWISE, "Broadcast", "AsType", "View", "Quantize"}
