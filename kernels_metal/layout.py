"""Which way each row of a plan goes in the reference, and the index arrays and masks it needs there.

Knows: pool slots, lengths, what gathering costs. Knows nothing of queries, values or arithmetic.

    Solo     one query row whose keys lie, at least partly, in long runs of consecutive slots.
    Bucket   one query row each of several sequences of similar length.
    Chunk    several query rows of one sequence, in blocks of rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import mlx.core as mx
import numpy as np

from mlxserve.kernels_metal.plan import AttentionPlan

# Measured on a 2-core CPU with SmolLM2's heads (9 and 3 of 64).
MIN_RUN_TOKENS = 128  # reading a shorter run in place costs more than gathering it
BUCKET_COST_TOKENS = 256  # one more bucket costs about as much as gathering this many tokens
BUCKET_MAX_TOKENS = 16384  # bounds what is gathered at once
CHUNK_ROWS = 128


class Gather:
    """Pool slots [..., L] whose keys or values are wanted; index arrays are built once."""

    def __init__(self, slots: np.ndarray) -> None:
        self.slots = slots
        self._index: dict[int, mx.array] = {}  # by K/V heads; 0: whole rows

    def rows(self) -> mx.array:
        """int32 [..., L] rows of pages seen as a matrix [NB * BS, HKV * D]."""
        if 0 not in self._index:
            self._index[0] = mx.array(self.slots.astype(np.int32))
        return self._index[0]

    def heads_first(self, heads: int) -> mx.array:
        """int32 [..., HKV, L] rows of pages seen as a matrix [NB * BS * HKV, D]."""
        if heads not in self._index:
            index = self.slots[..., None, :] * heads + np.arange(heads)[:, None]  # [..., HKV, L]
            self._index[heads] = mx.array(index.astype(np.int32))
        return self._index[heads]


@dataclass(frozen=True)
class Solo:
    """One decode row and the places of its keys: `runs` of pool slots read in place, `rest` gathered."""

    row: int
    runs: tuple[tuple[int, int], ...]  # half-open ranges of slots
    rest: mx.array | None  # int32 [n] slots

    @staticmethod
    def of(row: int, slots: np.ndarray) -> Solo | None:
        """None unless a run is long enough to be worth it."""
        breaks = np.flatnonzero(np.diff(slots) != 1) + 1
        edges = [0, *breaks.tolist(), len(slots)]
        runs, rest = [], []
        for first, stop in zip(edges[:-1], edges[1:], strict=True):
            if stop - first >= MIN_RUN_TOKENS:
                runs.append((int(slots[first]), int(slots[first]) + stop - first))
            else:
                rest.append(slots[first:stop])
        if not runs:
            return None
        return Solo(row, tuple(runs), mx.array(np.concatenate(rest).astype(np.int32)) if rest else None)


@dataclass(frozen=True)
class Bucket:
    """Decode rows of similar length. Padding reads a sequence's own first slot or page again.

    pages: the same keys as whole pages, which are copied faster, where every row's begin with a page; places
    behind a row's last key must not count, whatever they hold.
    """

    rows: tuple[int, ...]
    gather: Gather  # [B, L]
    mask: mx.array | None  # [B, 1, L] additive, None where all lengths agree
    pages: mx.array | None  # int32 [B, MB]

    @staticmethod
    def of(group: list[tuple[int, np.ndarray]], page_size: int) -> Bucket:
        lengths = np.array([len(slots) for _, slots in group])
        longest = lengths.max()
        slots = np.stack([np.append(own, np.full(longest - len(own), own[0])) for _, own in group])
        past = np.arange(longest) >= lengths[:, None]  # [B, L]
        mask = additive(past)[:, None] if past.any() else None
        aligned = not (slots[:, 0] % page_size).any()
        pages = mx.array((slots[:, ::page_size] // page_size).astype(np.int32)) if aligned else None
        return Bucket(tuple(row for row, _ in group), Gather(slots), mask, pages)


def additive(hidden: np.ndarray) -> mx.array:
    return mx.array(np.where(hidden, -np.inf, 0).astype(np.float32))


@dataclass(frozen=True)
class Layout:
    """How a plan's rows are split among the three ways; `restore` puts the output rows back in order."""

    solos: tuple[Solo, ...]
    buckets: tuple[Bucket, ...]
    chunks: tuple[Chunk, ...]
    single_rows: mx.array | None  # int32, rows of solos and then buckets; None where they are 0 .. Tq-1
    restore: mx.array | None
    keys: int  # read by single rows, in all

    @staticmethod
    def of(plan: AttentionPlan, solo_wanted: bool) -> Layout:
        row_starts, segments = plan.row_starts, range(len(plan.counts))
        singles = [(row_starts[s], plan.slots(s, *plan.keys(s))) for s in segments if plan.counts[s] == 1]
        found = [Solo.of(*single) if solo_wanted else None for single in singles]
        solos = [solo for solo in found if solo is not None]
        gathered = [single for single, solo in zip(singles, found, strict=True) if solo is None]
        buckets = _buckets_of(gathered, plan.page_size)
        chunks = [Chunk.of(plan, s) for s in segments if plan.counts[s] > 1]
        rows = [solo.row for solo in solos] + [row for bucket in buckets for row in bucket.rows]
        order = rows + [chunk.row + i for chunk in chunks for i in range(chunk.count)]
        return Layout(
            solos=tuple(solos),
            buckets=tuple(buckets),
            chunks=tuple(chunks),
            single_rows=None if rows == list(range(plan.rows)) else mx.array(rows, mx.int32),
            restore=None if order == list(range(plan.rows)) else mx.array(np.argsort(order).astype(np.int32)),
            keys=sum(len(slots) for _, slots in singles),
        )

    @property
    def single(self) -> bool:
        """Whether there are single rows at all."""
        return bool(self.solos or self.buckets)

    def take_singles(self, q: mx.array) -> mx.array:
        return q if self.single_rows is None else mx.take(q, self.single_rows, axis=0)

    def split_singles(self, rows: mx.array) -> Iterator[mx.array]:
        """The rows of each solo, then of each bucket."""
        sizes = [1] * len(self.solos) + [len(bucket.rows) for bucket in self.buckets]
        if len(sizes) == 1:
            return iter([rows])
        edges = [0, *accumulate(sizes)]
        return (rows[first:stop] for first, stop in zip(edges[:-1], edges[1:], strict=True))


def _buckets_of(singles: list[tuple[int, np.ndarray]], page_size: int) -> list[Bucket]:
    """Group rows, longest first; a new bucket starts where padding would cost more than a bucket does."""
    groups: list[list[tuple[int, np.ndarray]]] = []
    padding = 0
    for item in sorted(singles, key=lambda single: -len(single[1])):
        longest = len(groups[-1][0][1]) if groups else 0
        waste = longest - len(item[1])
        full = not groups or (len(groups[-1]) + 1) * longest > BUCKET_MAX_TOKENS
        if full or padding + waste > BUCKET_COST_TOKENS:
            groups.append([])
            padding = waste = 0
        padding += waste
        groups[-1].append(item)
    return [Bucket.of(sorted(group, key=lambda single: single[0]), page_size) for group in groups]


@dataclass(frozen=True)
class Block:
    """Rows first .. stop of a chunk, and the keys they see, counted from the chunk's first key."""

    first: int
    stop: int
    key_first: int
    key_stop: int
    mask: mx.array | None  # [stop - first, key_stop - key_first], additive


@dataclass(frozen=True)
class Chunk:
    """Several rows of one sequence, in blocks; `keys` and `window` as in the plan."""

    row: int
    start: int
    keys: tuple[int, int]
    window: int | None
    gather: Gather
    blocks: tuple[Block, ...]

    @staticmethod
    def of(plan: AttentionPlan, s: int) -> Chunk:
        keys, count = plan.keys(s), plan.counts[s]
        blocks = [
            _block_of(plan, plan.starts[s], first, min(first + CHUNK_ROWS, count), keys[0])
            for first in range(0, count, CHUNK_ROWS)
        ]
        gather = Gather(plan.slots(s, *keys))
        return Chunk(plan.row_starts[s], plan.starts[s], keys, plan.window, gather, tuple(blocks))

    @property
    def count(self) -> int:
        return self.blocks[-1].stop

    @cached_property
    def mask(self) -> mx.array | str:
        """What `mx.fast.scaled_dot_product_attention` takes: True where a row sees a key, or "causal"."""
        if self.window is None or self.count + self.start <= self.window:
            return "causal"
        rows = (self.start, self.start + self.count)
        return mx.array(~_hidden(rows, self.keys, self.window))


def _hidden(rows: tuple[int, int], keys: tuple[int, int], window: int | None) -> np.ndarray:
    """bool [rows, keys]: True where the row at a position does not see the key at another."""
    position, key = np.arange(*rows)[:, None], np.arange(*keys)
    hidden = key > position
    return hidden if window is None else hidden | (key <= position - window)


def _block_of(plan: AttentionPlan, start: int, first: int, stop: int, origin: int) -> Block:
    keys = (plan.first_key(start + first), start + stop)
    hidden = _hidden((start + first, start + stop), keys, plan.window)
    mask = additive(hidden) if hidden.any() else None
    return Block(first, stop, keys[0] - origin, keys[1] - origin, mask)
