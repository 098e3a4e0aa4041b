"""One step's attention work: which query rows belong to which sequence, and where its keys lie.

Knows: positions, page tables, windows, and device arrays derived from them, built once and shared by all
layers of a page group. Knows nothing of models, of sequences' identity, or of who runs the attention.

A segment is a run of query rows of one sequence. Rows of all segments are concatenated:

    rows      0 1 2 3 | 4 | 5 | 6 7 ...
    segment      0      1   2    3        counts = (4, 1, 1, 2, ...)

Row i of segment s has position p = starts[s] + i and sees the keys at positions (p - window, p], or
[0, p] where there is no window. The key of position p lies in page tables[s, p // page_size -
first_pages[s]], slot p % page_size.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, TypeVar

import mlx.core as mx
import numpy as np

from mlxserve.errors import UsageError

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class AttentionPlan:
    """What one step attends to, for the layers that share pages and a window.

    starts, counts: [S] position of each segment's first query row, and its number of rows.
    tables: int32 [S, MB] page ids; entries past a segment's last page are never read.
    first_pages: [S] index, in pages from position 0, of the page in column 0 (above 0 where earlier pages
    slid out of the window). page_size: tokens a page. window: keys a row sees at most, None for all.

    Raises UsageError where the lengths disagree or a visible key has no place in the table.
    """

    starts: tuple[int, ...]
    counts: tuple[int, ...]
    tables: np.ndarray
    first_pages: tuple[int, ...]
    page_size: int
    window: int | None = None
    _built: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        segments = len(self.starts)
        if not (len(self.counts) == len(self.first_pages) == len(self.tables) == segments):
            raise UsageError("An attention plan needs one start, count, first page and table row a segment.")
        if self.window is not None and self.window < 1:
            raise UsageError(f"An attention window must be at least 1, not {self.window}.")
        for s in range(segments):
            self._check_segment(s)

    def _check_segment(self, s: int) -> None:
        if not self.counts[s]:
            return
        first, stop = self.keys(s)
        held_from = self.first_pages[s] * self.page_size
        held_to = held_from + self.tables.shape[1] * self.page_size
        if self.starts[s] < 0 or first < held_from or stop > held_to:
            raise UsageError(
                f"Segment {s} sees positions {first} to {stop - 1}, "
                f"but its table holds {held_from} to {held_to - 1}."
            )

    @property
    def rows(self) -> int:
        """Query rows in all, Tq."""
        return sum(self.counts)

    @property
    def row_starts(self) -> tuple[int, ...]:
        """[S + 1] the row where each segment begins, and Tq at the end."""
        return tuple(accumulate(self.counts, initial=0))

    def keys(self, s: int) -> tuple[int, int]:
        """Half-open range of the positions that any row of segment s sees."""
        return self.first_key(self.starts[s]), self.starts[s] + self.counts[s]

    def first_key(self, position: int) -> int:
        """The earliest position that a row at `position` sees."""
        return 0 if self.window is None else max(0, position - self.window + 1)

    def slots(self, s: int, first: int, stop: int) -> np.ndarray:
        """int64 [stop - first] place of each position in the pool, page * page_size + slot."""
        positions = np.arange(first, stop)
        column = positions // self.page_size - self.first_pages[s]
        return self.tables[s, column].astype(np.int64) * self.page_size + positions % self.page_size

    def once(self, key: Hashable, build: Callable[[], T]) -> T:
        """The value that `build` made for `key` on first use: index arrays and masks, shared by layers."""
        if key not in self._built:
            self._built[key] = build()
        return self._built[key]


@dataclass(frozen=True, eq=False)
class QuantisedPages:
    """Pages of K or V in 8 or 4 bits, as `mx.quantize` lays out each head's vector.

    weight: uint32 [NB, BS, HKV, D * bits / 32]; scales, biases: [NB, BS, HKV, D / group_size].
    """

    weight: mx.array
    scales: mx.array
    biases: mx.array
    bits: int
    group_size: int

    def __post_init__(self) -> None:
        if self.bits not in (4, 8):
            raise UsageError(f"Pages are quantised in 8 or 4 bits, not {self.bits}.")
        groups = self.scales.shape[-1]
        if self.scales.shape != self.biases.shape or groups * self.group_size != self.shape[-1]:
            raise UsageError(
                f"Scales {self.scales.shape} and biases {self.biases.shape} do not fit "
                f"head size {self.shape[-1]} in groups of {self.group_size}."
            )

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(NB, BS, HKV, D) as if unpacked."""
        pages, size, heads, words = self.weight.shape
        return pages, size, heads, words * 32 // self.bits

    @property
    def dtype(self) -> mx.Dtype:
        """What a dequantised value has."""
        return self.scales.dtype


Pages = mx.array | QuantisedPages
