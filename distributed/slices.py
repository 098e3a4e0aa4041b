"""Regions of tensors: which part of each axis, as Python ranges, and how operations map them backwards.

Knows: shapes and ranges. A region has one `range` an axis, with positive steps. Every function answers
"to have this region of the result, which region of the operand is needed?". Does not know files, MLX or
what the numbers mean.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

Region = tuple[range, ...]
Shape = Sequence[int]


def whole(shape: Shape) -> Region:
    """Everything of a tensor."""
    return tuple(range(length) for length in shape)


def is_whole(region: Region, shape: Shape) -> bool:
    return region == whole(shape)


def shape_of(region: Region) -> tuple[int, ...]:
    return tuple(len(axis) for axis in region)


def elements(region: Region) -> int:
    return math.prod(shape_of(region))


def show(region: Region) -> str:
    """A region as NumPy would write it: `0:32,8:64:2`."""
    return ",".join(
        f"{axis.start}:{axis.stop}" + (f":{axis.step}" if axis.step != 1 else "") for axis in region
    )


def through_slice(region: Region, starts: Shape, steps: Shape) -> Region:
    """Of the tensor that was sliced; all steps are positive."""
    return tuple(
        range(start + axis.start * step, start + (axis.stop - 1) * step + 1, axis.step * step)
        for axis, start, step in zip(region, starts, steps, strict=True)
    )


def through_transpose(region: Region, axes: Shape) -> Region:
    """Of the tensor whose axis `axes[i]` became axis i."""
    found: list[range] = [range(0)] * len(region)
    for axis, source in zip(region, axes, strict=True):
        found[source] = axis
    return tuple(found)


def through_broadcast(region: Region, shape: Shape) -> Region:
    """Of the operand of `shape` that was repeated along axes of length 1 or in front."""
    last = region[len(region) - len(shape) :] if shape else ()
    return tuple(
        axis if length != 1 else range(1 if len(axis) else 0)
        for axis, length in zip(last, shape, strict=True)
    )


def through_concatenate(region: Region, axis: int, lengths: Shape) -> Iterator[tuple[int, Region, slice]]:
    """(operand, its region, place in the result along `axis`) of each operand that is touched."""
    wanted, start, place = region[axis], 0, 0
    for operand, length in enumerate(lengths):
        # wanted positions p with start <= p < start + length
        first = max(0, -(-(start - wanted.start) // wanted.step))
        last = max(first, min(len(wanted), -(-(start + length - wanted.start) // wanted.step)))
        if last > first:
            own = wanted[first:last]
            inner = range(own.start - start, own[-1] - start + 1, own.step)
            yield operand, (*region[:axis], inner, *region[axis + 1 :]), slice(place, place + len(own))
            place += len(own)
        start += length


def through_reshape(region: Region, shape: Shape, before: Shape) -> Region | None:
    """Of the tensor of shape `before` that was reshaped to `shape`; None where it is no simple region.

    Axes fall into groups of equal product. In each group only the outermost axis that is longer than 1
    may be cut, and the cut must fall between entries of the other shape's outermost axis.
    """
    if is_whole(region, shape):
        return whole(before)
    found: list[range] = []
    for new, old in _groups(shape, before):
        cut = _through_group(
            [region[axis] for axis in new], [shape[a] for a in new], [before[a] for a in old]
        )
        if cut is None:
            return None
        found += cut
    return tuple(found)


def _groups(new: Shape, old: Shape) -> Iterator[tuple[range, range]]:
    """Axes of two shapes, group by group, such that products agree."""
    i = j = 0
    while i < len(new) or j < len(old):
        first_i, first_j = i, j
        a = b = 1
        while True:
            if a == b and i > first_i and j > first_j:
                break
            if (a <= b and i < len(new)) or j == len(old):
                if i == len(new):
                    break
                a, i = a * new[i], i + 1
            else:
                b, j = b * old[j], j + 1
        if i == len(new) or j == len(old):  # only ones can be left
            i, j = len(new), len(old)
        yield range(first_i, i), range(first_j, j)


def _through_group(wanted: list[range], new: list[int], old: list[int]) -> list[range] | None:
    if all(axis == range(length) for axis, length in zip(wanted, new)):
        return [range(length) for length in old]
    outer = next((n for n, length in enumerate(new) if length != 1), 0)
    if any(axis != range(length) for axis, length in zip(wanted[outer + 1 :], new[outer + 1 :])):
        return None
    inner, cut = math.prod(new[outer + 1 :]), wanted[outer]
    target = next((n for n, length in enumerate(old) if length != 1), 0)
    row = math.prod(old[target + 1 :])
    if row == inner:
        outermost = cut
    elif cut.step == 1 and cut.start * inner % row == 0 and cut.stop * inner % row == 0:
        outermost = range(cut.start * inner // row, cut.stop * inner // row)
    else:
        return None
    return [outermost if n == target else range(length) for n, length in enumerate(old)]
