"""Which samples train together: real lengths bucketed under a token budget, in a seeded order.

Knows: lengths, widths, permutations and NumPy arrays. Does not know MLX, text or models.

Every sample of an epoch is in exactly one batch, the remainder too. An epoch's batches follow from the
seed and the epoch's number alone, so a resumed run needs only the place in the list.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlxserve.lora.data import Pair, Sample

STEP, STEPS = 8, 16  # widths are multiples of 8 up to 128, then eight a doubling


def width_of(length: int) -> int:
    """The padded width of a row: few enough widths that compiled steps are reused, few per cent wasted."""
    step = STEP
    while length > STEPS * step:
        step *= 2
    return -(-length // step) * step


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch as host arrays; R rows of width W predict N targets.

    inputs: (R, W) int32, padded right with 0. rows: (N,) int32 places in the flattened (R * W) output
    whose next token is a target. targets: (N,) int32. owners: (N,) int32, the sequence of each target.
    segments: packed rows only, (start, end) of each sequence in the one row. where: each sequence's place.
    """

    inputs: np.ndarray
    rows: np.ndarray
    targets: np.ndarray
    owners: np.ndarray
    where: tuple[str, ...]
    real_tokens: int
    segments: tuple[tuple[int, int], ...] = ()
    items: tuple[int, ...] = ()

    @property
    def padded_tokens(self) -> int:
        return int(self.inputs.size)


def plan_epoch(
    lengths: np.ndarray,
    *,
    budget: int,
    seed: int,
    epoch: int,
    rows_per_batch: int | None = None,
    packing: bool = False,
    per_item: int = 1,
) -> list[list[int]]:
    """Item numbers of each batch, in training order; `per_item` sequences come with each item.

    A longer row than the budget is a batch of its own. lengths: (items,) of the longest sequence of each.
    """
    draw = np.random.default_rng([seed, epoch])
    shuffled = draw.permutation(len(lengths))
    limit = rows_per_batch or len(lengths)
    if packing:
        batches = _packed(shuffled, lengths, budget, limit)
    else:
        widths = np.array([width_of(int(n) - 1) for n in lengths])
        order = shuffled[np.argsort(widths[shuffled], kind="stable")]
        batches = _greedy(order, widths, budget // per_item, limit)
    return [batches[i] for i in draw.permutation(len(batches))]


def _greedy(order: np.ndarray, widths: np.ndarray, budget: int, limit: int) -> list[list[int]]:
    """Cut items in order of width into batches whose padded size stays within the budget."""
    batches: list[list[int]] = []
    current: list[int] = []
    for item in order.tolist():
        too_big = (len(current) + 1) * int(widths[item]) > budget
        if current and (too_big or len(current) >= limit):
            batches.append(current)
            current = []
        current.append(item)
    return [*batches, current] if current else batches


def _packed(order: np.ndarray, lengths: np.ndarray, budget: int, limit: int) -> list[list[int]]:
    """First fit, decreasing: the longest rows first, each into the first batch that has room."""
    batches: list[list[int]] = []
    free: list[int] = []
    for item in order[np.argsort(-lengths[order], kind="stable")].tolist():
        need = int(lengths[item]) - 1
        place = next((i for i, room in enumerate(free) if room >= need), None)
        if place is None:
            batches.append([])
            free.append(max(budget, need))
            place = len(free) - 1
        batches[place].append(item)
        free[place] = free[place] - need if len(batches[place]) < limit else -1
    return batches


def make_batch(items: Sequence[Any], numbers: Sequence[int], packing: bool = False) -> Batch:
    """The arrays of one batch. Of pairs, the chosen sequences come first, then the rejected ones."""
    chosen = [items[i] for i in numbers]
    if chosen and isinstance(chosen[0], Pair):
        samples = [pair.chosen for pair in chosen] + [pair.rejected for pair in chosen]
    else:
        samples = chosen
    return (_pack if packing else _pad)(samples, tuple(numbers))


def _pad(samples: Sequence[Sample], numbers: tuple[int, ...]) -> Batch:
    width = width_of(max(sample.length for sample in samples) - 1)
    inputs = np.zeros((len(samples), width), np.int32)
    for row, sample in enumerate(samples):
        inputs[row, : sample.length - 1] = sample.tokens[:-1]
    starts = [row * width for row in range(len(samples))]
    return _assemble(inputs, samples, starts, numbers)


def _pack(samples: Sequence[Sample], numbers: tuple[int, ...]) -> Batch:
    ends = np.cumsum([sample.length - 1 for sample in samples]).tolist()
    starts = [0, *ends[:-1]]
    inputs = np.concatenate([sample.tokens[:-1] for sample in samples]).astype(np.int32)[None]
    return _assemble(inputs, samples, starts, numbers, tuple(zip(starts, ends)))


def _assemble(
    inputs: np.ndarray,
    samples: Sequence[Sample],
    starts: Sequence[int],
    numbers: tuple[int, ...],
    segments: tuple[tuple[int, int], ...] = (),
) -> Batch:
    """Gather the places whose next token is trained: position i of a row predicts token i + 1."""
    rows = [start + np.flatnonzero(sample.targets[1:]) for start, sample in zip(starts, samples)]
    return Batch(
        inputs=inputs,
        rows=np.concatenate(rows).astype(np.int32),
        targets=np.concatenate([sample.tokens[1:][sample.targets[1:]] for sample in samples]),
        owners=np.repeat(np.arange(len(samples)), [len(row) for row in rows]).astype(np.int32),
        where=tuple(sample.where for sample in samples),
        real_tokens=sum(sample.length - 1 for sample in samples),
        segments=segments,
        items=numbers,
    )
