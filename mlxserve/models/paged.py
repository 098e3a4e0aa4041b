"""Runs an mlx-lm definition on paged memory: any number of sequences, each at its own position.

The way is chosen by models/check.py:

- *rows*: every token of the step is a row, tokens shaped (T, 1). One call, nothing padded.
- *sequences*: tokens shaped (B, L), keys gathered, an explicit mask. All decoding sequences in one call,
  each prompt chunk in a call of its own. For definitions with their own attention or recurrent state.
  *grouped* is the same with one more axis in the mask, *each* with every sequence in a call of its own.
- *solo* is not for here: such a definition keeps something that has no place in pages.

Three points of contact with mlx-lm, each named by tests/models/test_contract.py: the attention function
that definitions look up in their module's globals, the cache protocol (cache/store.py), and the trunk
whose output the head reads.

Knows: definitions, layouts, arrays. Does not know requests, tokens' meaning or scheduling.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxserve.cache.state import LayerState
from mlxserve.cache.store import GroupStep, LayerPages
from mlxserve.errors import ModelUnsupported
from mlxserve.kernels_metal.plan import AttentionPlan
from mlxserve.models.definitions import import_definition
from mlxserve.models.layout import Layout, plain_caches, read_layout
from mlxserve.models.multilora import AdapterStack

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


class _Selection:
    """Which rows of the trunk's output go on to the head (None: all), and that output itself if asked."""

    __slots__ = ("capture", "captured", "take")

    def __init__(self) -> None:
        self.take: mx.array | None = None
        self.capture = False
        self.captured: mx.array | None = None


class PagedModel:
    """A definition, its pages and its state slots.

    group_pages: page count of each of `layout.windows`. Raises ModelUnsupported if the definition keeps
    something that has no place in pages or slots. adapters: those that steps may name.
    """

    def __init__(
        self,
        model: nn.Module,
        way: str,
        *,
        page_size: int,
        group_pages: Sequence[int],
        state_slots: int = 0,
        kv_bits: int = 16,
        kv_group_size: int = 32,
        adapters: AdapterStack | None = None,
    ) -> None:
        self.adapters = adapters or AdapterStack(model, mx.float32)
        self.layout: Layout = read_layout(model)
        if self.layout.unknown:
            raise ModelUnsupported(f"A layer keeps a {self.layout.unknown}, which cannot be paged.")
        self.model = model
        self.way = way
        self.page_size = page_size
        self.windows = self.layout.windows
        pages = dict(zip(self.windows, group_pages, strict=True))
        self.stores: list[LayerPages | LayerState] = []
        for leaf in self.layout.leaves:
            if leaf.kind == "pages":
                store = LayerPages(
                    pages[leaf.window], page_size, leaf.window, kv_bits=kv_bits, group_size=kv_group_size
                )
                store.rows, store.grouped_mask = way == ROWS, way == GROUPED
                self.stores.append(store)
            else:
                self.stores.append(LayerState(state_slots, leaf.arrays))
        self._selection = _install_selection(model)
        install_attention()

    def forward(self, ids: mx.array, step: Step) -> mx.array:
        """Logits (R, V) of the wanted rows, in the order of the segments; ids is (T,)."""
        self._clear_fresh(step)
        if self.way == ROWS:
            return self._call(ids[:, None], step, wanted_rows(step))
        together = _together(step, self.way)
        logits = []
        for rows, part in _calls(step, together):
            part_logits = self._call(ids[rows].reshape(len(part.starts), -1), part, wanted_rows(part))
            if part.wanted.any():
                logits.append(part_logits)
        order = _call_order(step, together)
        if not logits:
            return part_logits
        whole = logits[0] if len(logits) == 1 else mx.concatenate(logits)
        return whole if order is None else whole[order]

    def hidden(self, ids: mx.array, adapter: int = 0) -> mx.array:
        """The trunk's output (T, H) for one sequence (T,), before the head; no pages are touched.

        adapter: the id of the one that all rows have.

        Raises ModelUnsupported where the definition has no trunk apart from its head.
        """
        if self._selection is None:
            raise ModelUnsupported(f"{type(self.model).__module__} has no trunk apart from its head.")
        self._selection.capture = True
        try:
            with self.adapters.call(np.full(ids.size, adapter) if adapter else None):
                self.model(ids[None], cache=plain_caches(self.model))  # the head is built, never evaluated
            assert self._selection.captured is not None
            return self._selection.captured.reshape(ids.size, -1)
        finally:
            self._selection.capture, self._selection.captured = False, None

    def room(self, group: int) -> int:
        """Page ids of a group that have arrays behind them."""
        return next(store.page_count for store in self._pages_of(group))

    def reserve(self, group: int, pages: int) -> None:
        """Make room for page ids below `pages` in one group."""
        for store in self._pages_of(group):
            if store.page_count < pages:
                store.grow(pages)

    def cut(self, group: int, pages: int) -> None:
        """Give back the memory of page ids from `pages` on."""
        for store in self._pages_of(group):
            if store.page_count > pages:
                store.cut(pages)

    def reserve_states(self, slots: int) -> None:
        """Make room for state slots below `slots`."""
        for store in self.stores:
            if isinstance(store, LayerState) and store.slots < slots:
                store.grow(slots)

    def forget(self) -> None:
        """Drop every array; they are allocated anew at the next step. For after a step has failed."""
        for store in self.stores:
            store.clear()

    def copy_pages(
        self, group: int, sources: Sequence[int], targets: Sequence[int], places: Sequence[int]
    ) -> None:
        """Copy the first `places` of each page of one group, in every layer of it; zeros follow."""
        source_ids, target_ids, kept = (mx.array(list(ids)) for ids in (sources, targets, places))
        for store in self._pages_of(group):
            store.copy_pages(source_ids, target_ids, kept)

    def _clear_fresh(self, step: Step) -> None:
        """Zero the pages whose first place this step writes.

        Attention reads whole pages and gives what lies behind a sequence's last key no weight; but no
        weight times NaN is NaN, and who had the page before may have left one.
        """
        for group, table in enumerate(step.tables):
            first, last = -(-step.starts // self.page_size), (step.starts + step.counts - 1) // self.page_size
            fresh = [table[s, first[s] : last[s] + 1] for s in np.flatnonzero(first <= last)]
            if fresh:
                ids = mx.array(np.concatenate(fresh))
                for store in self._pages_of(group):
                    store.clear_pages(ids)

    def read_pages(self, pages: Sequence[Sequence[int]]) -> dict[str, mx.array]:
        """Copies of pages, ids by group: each layer's arrays under "<layer>.<array>", (n, page_size, …)."""
        ids = [mx.array(list(group), mx.int32) for group in pages]
        found = {}
        for index, store in enumerate(self.stores):
            if isinstance(store, LayerPages):
                group = ids[self.windows.index(store.window)]
                for part, pool in enumerate(store.arrays()):
                    found[f"{index}.{part}"] = mx.take(pool, group, axis=0)
        return found

    def write_pages(self, pages: Sequence[Sequence[int]], arrays: dict[str, mx.array]) -> None:
        """Put what `read_pages` gave into other pages, ids by group."""
        for group, ids in enumerate(pages):
            if not ids:
                continue
            self.reserve(group, max(ids) + 1)
            targets = mx.array(list(ids), mx.int32)
            for index, store in enumerate(self.stores):
                if isinstance(store, LayerPages) and store.window == self.windows[group]:
                    store.put(targets, [arrays[key] for key in sorted(arrays) if key.startswith(f"{index}.")])

    def read_state(self, slot: int) -> dict[str, mx.array]:
        """Copies of one slot: each recurrent layer's arrays under "<layer>.<array>", (1, …)."""
        found: dict[str, mx.array] = {}
        for index, store in enumerate(self.stores):
            if isinstance(store, LayerState):
                arrays = store.read(mx.array([slot]))
                found |= {f"{index}.{part}": a for part, a in enumerate(arrays) if a is not None}
        return found

    def write_state(self, slot: int, arrays: dict[str, mx.array]) -> None:
        """Put what `read_state` gave into another slot."""
        self.reserve_states(slot + 1)
        for index, store in enumerate(self.stores):
            if isinstance(store, LayerState):
                parts = [arrays.get(f"{index}.{part}") for part in range(len(store.pools))]
                store.write(mx.array([slot]), parts)

    def copy_states(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy state slots, in every recurrent layer."""
        source_ids, target_ids = mx.array(list(sources)), mx.array(list(targets))
        for store in self.stores:
            if isinstance(store, LayerState):
                store.copy(source_ids, target_ids)

    def arrays(self) -> list[mx.array]:
        """Everything that a step changes and that must be evaluated with it."""
        return [array for store in self.stores for array in store.arrays()]

    @property
    def nbytes(self) -> int:
        return sum(store.nbytes for store in self.stores)

    def _pages_of(self, group: int) -> Iterator[LayerPages]:
        for store in self.stores:
            if isinstance(store, LayerPages) and store.window == self.windows[group]:
                yield store

    def _call(self, ids: mx.array, step: Step, wanted: np.ndarray | None) -> mx.array:
        """One call of the definition: ids (B, L) → logits (R, V) of the rows in `wanted` (None: all)."""
        batch, length = ids.shape
        groups = {
            w: group_step(step, g, w, self.page_size, batch, length) for g, w in enumerate(self.windows)
        }
        caches, states = self._caches(groups, step)
        take = None if wanted is None else mx.array(wanted)
        if self._selection is not None:
            self._selection.take = take
        try:
            with self.adapters.call(step.row_adapters(), wanted if self._selection is not None else None):
                logits = self.model(ids, cache=caches)
        finally:
            if self._selection is not None:
                self._selection.take = None
        logits = logits.reshape(-1, logits.shape[-1])
        if self._selection is None and take is not None:
            logits = logits[take]
        self._keep_states(states, step)
        return logits

    def _caches(self, groups: dict[int | None, GroupStep], step: Step) -> tuple[list[Any], dict[int, Any]]:
        """The cache objects of one call, nested as the definition makes them, and the recurrent ones."""
        classes = import_definition("cache")
        leaves: list[Any] = []
        states: dict[int, Any] = {}
        for index, store in enumerate(self.stores):
            if isinstance(store, LayerPages):
                store.step = groups[store.window]
                leaves.append(store)
                continue
            cache = classes.ArraysCache(len(store.pools))
            if step.starts[0] > 0:  # a sequence's first tokens start from nothing, whatever its slot holds
                cache.cache = store.read(step.slots())
            leaves.append(cache)
            states[index] = cache
        return [_nested(entry, leaves, classes.CacheList) for entry in self.layout.tree], states

    def _keep_states(self, states: dict[int, Any], step: Step) -> None:
        for index, cache in states.items():
            store = self.stores[index]
            assert isinstance(store, LayerState)
            store.write(step.slots(), cache.cache)


def _nested(entry: Any, leaves: list[Any], cache_list: Any) -> Any:
    if isinstance(entry, tuple):
        return cache_list(*(_nested(part, leaves, cache_list) for part in entry))
    return leaves[entry]


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


def _together(step: Step, way: str) -> np.ndarray:
    """(S,) which segments share one call: sequences that decode. First tokens have no state to gather."""
    if way == EACH:
        return np.zeros(len(step.starts), bool)
    return (step.counts == 1) & (step.starts > 0)


def _calls(step: Step, together: np.ndarray) -> Iterator[tuple[Any, Step]]:
    """(row numbers, step) of each call: decoding sequences together, the others one by one."""
    first_row = np.cumsum(step.counts) - step.counts
    if together.any():
        yield mx.array(first_row[together].astype(np.int32)), step.part(np.flatnonzero(together))
    for segment in np.flatnonzero(~together):
        rows = slice(int(first_row[segment]), int(first_row[segment] + step.counts[segment]))
        yield rows, step.part(np.array([segment]))


def _call_order(step: Step, together: np.ndarray) -> mx.array | None:
    """How to put the calls' logits back into the order of the segments; None if they are."""
    segments = np.concatenate([np.flatnonzero(together), np.flatnonzero(~together)])
    produced = np.repeat(segments, step.wanted[segments])
    order = np.argsort(produced, kind="stable")
    return None if np.array_equal(order, np.arange(len(order))) else mx.array(order.astype(np.int32))


def install_attention() -> None:
    """Make definitions' attention look at its cache: ours goes to pages, any other to mlx-lm's own.

    Definitions import the function into their own globals, so every loaded one is patched; those
    imported later take the patched one from `base`.
    """
    base = import_definition("base")
    original = getattr(base.scaled_dot_product_attention, "original", base.scaled_dot_product_attention)
    replacement = base.scaled_dot_product_attention
    if replacement is original:
        replacement = _dispatching(original)
    for name, module in list(sys.modules.items()):
        if (
            name.startswith("mlx_lm.models.")
            and getattr(module, "scaled_dot_product_attention", None) is original
        ):
            module.scaled_dot_product_attention = replacement  # type: ignore[attr-defined]


def _dispatching(original: Any) -> Any:
    def scaled_dot_product_attention(
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        cache: Any,
        scale: float,
        mask: Any,
        sinks: Any = None,
    ) -> mx.array:
        if getattr(cache, "rows", False) is True:  # pages, or the trainer's packed rows
            return cache.attend(queries, scale, sinks)
        return original(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)

    scaled_dot_product_attention.original = original  # type: ignore[attr-defined]
    return scaled_dot_product_attention


def _install_selection(model: nn.Module) -> _Selection | None:
    """Let the trunk hand only the wanted rows to the head; None where no trunk can be told apart.

    The trunk is the outermost module below the model that owns its layers. Its class is exchanged for a
    subclass, so parameters and their names stay as they are.
    """
    trunk = find_trunk(model)
    if trunk is None:
        return None
    selection = getattr(trunk, "_row_selection", None)
    if selection is None:
        selection = trunk._row_selection = _Selection()
        trunk.__class__ = _selecting(type(trunk))
    return selection


def find_trunk(model: nn.Module) -> nn.Module | None:
    """The module below `model` whose list of layers the model's is."""
    layers = list(model.layers)
    for path, module in sorted(model.named_modules(), key=lambda item: item[0].count(".")):
        if not path or module is model:
            continue
        for value in module.values():
            if isinstance(value, list) and len(value) >= len(layers) and layers and value[0] is layers[0]:
                return module
    return None


def _selecting(trunk_class: type) -> type:
    class Selecting(trunk_class):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            out = super().__call__(*args, **kwargs)
            selection = self._row_selection
            if selection.capture:
                selection.captured = out
            take = selection.take
            if take is None or not isinstance(out, mx.array):
                return out
            return out.reshape(-1, 1, out.shape[-1])[take]  # (R, 1, H)

    Selecting.__name__ = trunk_class.__name__
    Selecting.__qualname__ = trunk_class.__qualname__
    return Selecting
