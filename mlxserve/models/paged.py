"""Runs an mlx-lm definition on paged memory: any number of sequences, each at its own position.

What a step is, and the ways in which it may run, is in models/step.py; how definitions come to look at pages in
models/hooks.py.

Knows: definitions, layouts, arrays. Does not know requests, tokens' meaning or scheduling.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxserve.cache.state import LayerState
from mlxserve.cache.store import GroupStep, LayerPages
from mlxserve.errors import ModelUnsupported
from mlxserve.models.definitions import import_definition
from mlxserve.models.hooks import install_activation, install_attention, install_selection, on_pages
from mlxserve.models.layout import Layout, plain_caches, read_layout
from mlxserve.models.multilora import AdapterStack
from mlxserve.models.step import GROUPED, ROWS, Step, call_order, calls, group_step, together, wanted_rows


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
        self._selection = install_selection(model)
        install_attention()
        install_activation()

    def forward(self, ids: mx.array, step: Step) -> mx.array:
        """Logits (R, V) of the wanted rows, in the order of the segments; ids is (T,)."""
        self._clear_fresh(step)
        if self.way == ROWS:
            return self._call(ids[:, None], step, wanted_rows(step))
        joined = together(step, self.way)
        logits = []
        for rows, part in calls(step, joined):
            part_logits = self._call(ids[rows].reshape(len(part.starts), -1), part, wanted_rows(part))
            if part.wanted.any():
                logits.append(part_logits)
        order = call_order(step, joined)
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
            heads = wanted if self._selection is not None else None
            with on_pages(), self.adapters.call(step.row_adapters(), heads):
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
