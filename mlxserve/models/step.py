"""What one forward pass over pages computes, and how it is cut into calls of the definition.

The way is chosen by models/check.py:

- *rows*: every token of the step is a row, tokens shaped (T, 1). One call, nothing padded.
- *sequences*: tokens shaped (B, L), keys gathered, an explicit mask. All decoding sequences in one call,
  each prompt chunk in a call of its own. For definitions with their own attention or recurrent state.
  *grouped* is the same with one more axis in the mask, *each* with every sequence in a call of its own.
- *solo* is not for pages: such a definition keeps something that has no place in them.

Knows: positions, counts, page tables. Does not know models, or what lies in the pages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from mlxserve.cache.store import GroupStep
from mlxserve.kernels_metal.plan import AttentionPlan

ROWS, SEQUENCES, GROUPED, EACH, SOLO = "rows", "sequences", "grouped", "each", "solo"
PAGED_WAYS = (ROWS, SEQUENCES, GROUPED, EACH)


@dataclass(frozen=True, slots=True)
class Step:
    """What one forward pass computes: S segments, each a run of new tokens of one sequence.

    starts, counts: (S,) first position and number of tokens. wanted: (S,) how many of the segment's last
    rows want logits. tables: one (S, MB) table of page ids a group, absolute (entry i covers positions
    [i * page_size, (i + 1) * page_size)). state_slots: (S,) for recurrent layers. adapters: (S,) ids of LoRA
    adapters, 0 for none; None where no segment has one.
    """

    starts: np.ndarray
    counts: np.ndarray
    wanted: np.ndarray
    tables: Sequence[np.ndarray]
    state_slots: np.ndarray | None = None
    adapters: np.ndarray | None = None

    def slots(self) -> mx.array:
        """(S,) state slots on the device."""
        assert self.state_slots is not None, "a model with recurrent layers needs state slots"
        return mx.array(self.state_slots)

    def part(self, chosen: np.ndarray) -> Step:
        """The step of some of its segments."""
        slots = None if self.state_slots is None else self.state_slots[chosen]
        tables = [table[chosen] for table in self.tables]
        adapters = None if self.adapters is None else self.adapters[chosen]
        return Step(self.starts[chosen], self.counts[chosen], self.wanted[chosen], tables, slots, adapters)

    def row_adapters(self) -> np.ndarray | None:
        """(T,) the adapter of each token's row; None where no row has one."""
        if self.adapters is None or not self.adapters.any():
            return None
        return np.repeat(self.adapters, self.counts)


def group_step(
    step: Step, group: int, window: int | None, page_size: int, batch: int, length: int
) -> GroupStep:
    """Where this step's rows of one page group are written, and what its attention reads."""
    starts, counts, table = step.starts, step.counts, step.tables[group]
    if len(counts) == int(counts.sum()):  # decode only: a row a segment
        segment, positions = np.arange(len(starts)), starts
    else:
        segment = np.repeat(np.arange(len(starts)), counts)
        first_row = np.cumsum(counts) - counts
        positions = starts[segment] + np.arange(len(segment)) - first_row[segment]
    first = np.zeros_like(starts) if window is None else np.maximum(starts - window + 1, 0) // page_size
    last = (starts + counts - 1) // page_size
    columns = first[:, None] + np.arange(int((last - first).max()) + 1)
    live = np.minimum(columns, last[:, None])
    plan = AttentionPlan(
        starts=tuple(starts.tolist()),
        counts=tuple(counts.tolist()),
        tables=np.take_along_axis(table, live, axis=1).astype(np.int32),
        first_pages=tuple(first.tolist()),
        page_size=page_size,
        window=window,
    )
    device_positions = mx.array(positions.astype(np.int32))
    return GroupStep(
        positions=device_positions,
        pages=mx.array(table[segment, positions // page_size].astype(np.int32)),
        places=mx.array((positions % page_size).astype(np.int32)),
        plan=plan,
        batch=batch,
        length=length,
        offset=int(starts[0]) if batch == 1 else device_positions,
    )


def wanted_rows(step: Step) -> np.ndarray | None:
    """Row numbers whose logits are wanted; None when every row's are."""
    if np.array_equal(step.counts, step.wanted):
        return None
    if not step.wanted.any():
        return np.zeros(1, np.int32)  # some row must go through the head; nobody evaluates it
    ends = np.cumsum(step.counts)
    return np.concatenate([np.arange(end - n, end) for end, n in zip(ends, step.wanted)]).astype(np.int32)


def together(step: Step, way: str) -> np.ndarray:
    """(S,) which segments share one call: sequences that decode. First tokens have no state to gather."""
    if way == EACH:
        return np.zeros(len(step.starts), bool)
    return (step.counts == 1) & (step.starts > 0)


def calls(step: Step, joined: np.ndarray) -> Iterator[tuple[Any, Step]]:
    """(row numbers, step) of each call: decoding sequences together, the others one by one."""
    first_row = np.cumsum(step.counts) - step.counts
    if joined.any():
        yield mx.array(first_row[joined].astype(np.int32)), step.part(np.flatnonzero(joined))
    for segment in np.flatnonzero(~joined):
        rows = slice(int(first_row[segment]), int(first_row[segment] + step.counts[segment]))
        yield rows, step.part(np.array([segment]))


def call_order(step: Step, joined: np.ndarray) -> mx.array | None:
    """How to put the calls' logits back into the order of the segments; None if they are."""
    segments = np.concatenate([np.flatnonzero(joined), np.flatnonzero(~joined)])
    produced = np.repeat(segments, step.wanted[segments])
    order = np.argsort(produced, kind="stable")
    return None if np.array_equal(order, np.arange(len(order))) else mx.array(order.astype(np.int32))
