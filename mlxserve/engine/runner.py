"""Carries out a batch: makes arrays of it, calls the model once, draws.

Knows: MLX, the model on its pages, tables and settings by slot. Does not know sequences, requests, text,
or what comes next. Everything here happens on the worker's thread.

The tokens of a step are not read before the next one is built: a position whose token nobody has read
takes it from the last step's array on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxserve.cache.pages import pages_for
from mlxserve.config import EngineConfig
from mlxserve.engine.adapters import Adapters
from mlxserve.engine.batch import Batch
from mlxserve.engine.capacity import Memory
from mlxserve.engine.sampler import Logprobs, Sampler
from mlxserve.errors import Unsupported
from mlxserve.models.layout import plain_caches
from mlxserve.models.load import LoadedModel
from mlxserve.models.multilora import AdapterStack
from mlxserve.models.paged import PagedModel
from mlxserve.models.step import SOLO, Step
from mlxserve.request import TokenLogprob

# Pages or state slots that a pool starts with.
SMALLEST_ROOM = 8


@dataclass(slots=True)
class Forward:
    """A forward pass on its way: logits (R, V) of the rows to draw from, in the order of the segments."""

    batch: Batch
    logits: mx.array | None
    slots: np.ndarray
    draws: np.ndarray


@dataclass(slots=True)
class Drawn:
    """Tokens on their way: (R,) int32 on the device; `read` waits for them."""

    batch: Batch
    tokens: mx.array | None
    logprobs: Logprobs | None

    def read(self) -> list[int]:
        return [] if self.tokens is None else self.tokens.tolist()  # type: ignore[return-value]

    def read_logprobs(self) -> dict[int, TokenLogprob]:
        """By row number, for the rows that asked; to be called after `read`."""
        found: dict[int, TokenLogprob] = {}
        if self.logprobs is None or self.tokens is None:
            return found
        tokens = self.tokens.tolist()
        chosen = self.logprobs.chosen.tolist()
        ids = self.logprobs.top_ids.tolist() if self.logprobs.top_ids is not None else None
        values = self.logprobs.top_values.tolist() if self.logprobs.top_values is not None else None
        for i, (row, wanted) in enumerate(zip(self.logprobs.rows, self.logprobs.wanted)):
            top = tuple(zip(ids[i][:wanted], values[i][:wanted])) if ids and values else ()  # type: ignore[index]
            found[row] = TokenLogprob(tokens[row], chosen[i], top)  # type: ignore[index, arg-type]
        return found


def _roomier(needed: int, room: int, limit: int) -> int:
    """The next size of a pool: a quarter more than now, so that growing stays rare, within its limit."""
    return min(max(needed, room + room // 4, SMALLEST_ROOM), limit)


@dataclass(frozen=True, slots=True)
class Limits:
    """The most ids each pool of arrays may have: pages by group, slots of recurrent state."""

    pages: tuple[int, ...]
    state_slots: int

    @classmethod
    def of(cls, memory: Memory) -> Limits:
        return cls(tuple(spec.pages for spec in memory.groups), memory.state_slots)


class SoloModel:
    """A definition that cannot be paged, with mlx-lm's own caches, one sequence at a time."""

    windows: tuple[int | None, ...] = ()

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.adapters = AdapterStack(model, mx.float32)
        self._caches: list[object] = []

    def forward(self, ids: mx.array, step: Step) -> mx.array:
        """Logits (R, V); a sequence that starts at 0 gets new caches."""
        if step.starts[0] == 0:
            self._caches = plain_caches(self.model)
        with self.adapters.call(step.row_adapters()):
            logits = self.model(ids[None], cache=self._caches)[0]  # (L, V)
        return logits[logits.shape[0] - int(step.wanted[0]) :]

    def arrays(self) -> list[mx.array]:
        from mlx.utils import tree_flatten

        found = tree_flatten([cache.state for cache in self._caches])  # type: ignore[attr-defined]
        return [array for _, array in found if isinstance(array, mx.array)]

    def copy_pages(self, group: int, sources: list[int], targets: list[int], places: list[int]) -> None:
        raise AssertionError("a model without pages copies none")

    def copy_states(self, sources: list[int], targets: list[int]) -> None:
        raise AssertionError("a model without state slots copies none")

    def reserve(self, group: int, pages: int) -> None:
        raise AssertionError("a model without pages has no room for them")

    def room(self, group: int) -> int:
        raise AssertionError("a model without pages has no room for them")

    def cut(self, group: int, pages: int) -> None:
        raise AssertionError("a model without pages has none to give back")

    def reserve_states(self, slots: int) -> None:
        raise AssertionError("a model without state slots has no room for them")

    def forget(self) -> None:
        self._caches = []

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays())


class Runner:
    """One model's arrays by slot. slots: how many sequences run at once; context: tokens of the longest."""

    def __init__(
        self, model: PagedModel | SoloModel, *, slots: int, context: int, page_size: int, limits: Limits
    ) -> None:
        self.model = model
        self._adapter_id: Callable[[str], int] | None = None
        self.sampler = Sampler(slots)
        self.page_size = page_size
        columns = pages_for(context, page_size) + 1
        self.tables = [np.zeros((slots, columns), np.int32) for _ in model.windows]
        self.state_slots = np.zeros(slots, np.int32)
        self.adapters = np.zeros(slots, np.int32)
        self._state_room = 0
        self._limits = limits
        self._last: mx.array | None = None  # tokens of the last step
        self._row_of_slot = np.zeros(slots, np.int32)

    def take_adapters(self, stack: AdapterStack, id_of: Callable[[str], int]) -> None:
        """From now on admissions may name adapters; id_of: the stack's number of a name."""
        self.model.adapters, self._adapter_id = stack, id_of

    def _number_of(self, adapter: str | None) -> int:
        """An adapter's number in the stack; 0 for none."""
        return 0 if adapter is None or self._adapter_id is None else self._adapter_id(adapter)

    def forward(self, batch: Batch) -> Forward:
        """Start a step: tables and settings first, then pages copied, the model, checkpoints taken."""
        forward = self._build(batch)
        mx.async_eval(*([] if forward.logits is None else [forward.logits]), *self.model.arrays())
        return forward

    def _build(self, batch: Batch) -> Forward:
        """The step's graph; nothing runs yet."""
        self._enter(batch)
        step, ids, draw_from = self._arrays(batch)
        logits = self.model.forward(ids, step)
        if batch.checkpoints:
            self.model.copy_states(*map(list, zip(*batch.checkpoints)))
        self._apply(batch.later_pages)
        slots = np.array([batch.segments[i].slot for i in draw_from], np.int32)
        draws = np.array([batch.segments[i].draw for i in draw_from], np.int64)
        return Forward(batch, logits if draw_from else None, slots, draws)

    def draw(self, forward: Forward, masks: dict[int, np.ndarray]) -> Drawn:
        """Draw the step's tokens; masks: packed bits of allowed tokens for slots under a grammar."""
        if forward.logits is None:
            return Drawn(forward.batch, None, None)
        tokens, logprobs = self._sample(forward.logits, forward, masks)
        mx.async_eval(tokens, *self.sampler.arrays(), *(logprobs.arrays() if logprobs else ()))
        self._last = tokens
        self._row_of_slot[forward.slots] = np.arange(len(forward.slots), dtype=np.int32)
        return Drawn(forward.batch, tokens, logprobs)

    def _sample(
        self, logits: mx.array, forward: Forward, masks: dict[int, np.ndarray]
    ) -> tuple[mx.array, Logprobs | None]:
        """Tokens (R,) of the step's rows; nothing runs yet."""
        return self.sampler.draw(logits, forward.slots, forward.draws, masks)

    def embed(self, ids: list[int], adapter: str | None = None) -> list[float]:
        """The mean of the trunk's output over one sequence, scaled to length 1; no page is touched.

        adapter: the one that all its tokens have, as admissions name it.
        Raises Unsupported where the definition is not paged: its layers cannot be read apart.
        """
        return self._embedding(ids, adapter).tolist()  # type: ignore[return-value]

    def _embedding(self, ids: list[int], adapter: str | None) -> mx.array:
        if not isinstance(self.model, PagedModel):
            raise Unsupported("This model gives no embeddings: its layers cannot be read apart.")
        mean = (
            self.model.hidden(mx.array(ids), self._number_of(adapter)).astype(mx.float32).mean(axis=0)
        )  # (H,)
        return mean / mx.maximum(mx.linalg.norm(mean), 1e-12)

    def close(self) -> None:
        """Nothing runs after this."""

    def _enter(self, batch: Batch) -> None:
        for admission in batch.admitted:
            self.sampler.admit(admission)
            self.adapters[admission.slot] = self._number_of(admission.adapter)
            if admission.state_slot is not None:
                self.state_slots[admission.slot] = admission.state_slot
        self._reserve(batch)
        self._apply(batch.pages)
        self._copy(batch)
        if batch.restores:
            self.model.copy_states(*map(list, zip(*batch.restores)))

    def _copy(self, batch: Batch) -> None:
        """Copy pages up to where each sequence goes on: what lies behind is another's."""
        for group in {group for group, _, _ in batch.copies}:
            pairs = [(source, target) for g, source, target in batch.copies if g == group]
            table, size = self.tables[group], self.page_size
            kept = {int(table[s.slot, s.start // size]): s.start % size for s in batch.segments}
            places = [kept.get(target, 0) for _, target in pairs]
            self.model.copy_pages(group, [source for source, _ in pairs], [t for _, t in pairs], places)

    def _reserve(self, batch: Batch) -> None:
        """Grow the arrays to the ids this step uses for the first time."""
        for group, limit in enumerate(self._limits.pages):
            needed = max((page for g, _, _, page in batch.pages if g == group), default=-1) + 1
            room = self.model.room(group)
            if needed > room:
                self.model.reserve(group, _roomier(needed, room, limit))
        slots = [admission.state_slot for admission in batch.admitted if admission.state_slot is not None]
        needed = max([*slots, *(target for _, target in batch.checkpoints)], default=-1) + 1
        if needed > self._state_room:
            self._state_room = _roomier(needed, self._state_room, self._limits.state_slots)
            self.model.reserve_states(self._state_room)

    def resize(self, limits: Limits) -> None:
        """New limits, between two steps; arrays that are larger give their memory back."""
        self._limits = limits
        for group, pages in enumerate(limits.pages):
            self.model.cut(group, pages)

    def forget(self) -> None:
        """Drop what was computed, after a step has failed; tables and settings come with admissions."""
        self.model.forget()
        self._last = None

    def _apply(self, changes: list[tuple[int, int, int, int]]) -> None:
        for group, slot, index, page in changes:
            self.tables[group][slot, index] = page

    def _arrays(self, batch: Batch) -> tuple[Step, mx.array, list[int]]:
        """The step's plan, its token ids (T,), and which segments are drawn from."""
        segments = batch.segments
        slots = np.array([segment.slot for segment in segments], np.int32)
        counts = np.array([segment.count for segment in segments], np.int64)
        draw_from = [i for i, segment in enumerate(segments) if segment.sample]
        wanted = np.zeros(len(segments), np.int64)
        wanted[draw_from] = 1
        starts = np.array([segment.start for segment in segments], np.int64)
        tables = [self._columns(table, slots, starts, counts) for table in self.tables]
        step = Step(starts, counts, wanted, tables, self.state_slots[slots], self.adapters[slots])
        return step, self._ids(batch, slots, counts), draw_from

    def _columns(
        self, table: np.ndarray, slots: np.ndarray, starts: np.ndarray, counts: np.ndarray
    ) -> np.ndarray:
        """(S, MB): the rows of these slots, as wide as the longest of them."""
        return table[slots, : pages_for(int((starts + counts).max()), self.page_size)]

    def _ids(self, batch: Batch, slots: np.ndarray, counts: np.ndarray) -> mx.array:
        """(T,) token ids: from the host where known, else from the last step's draw."""
        host: list[int] = []
        unknown: list[int] = []
        sources: list[int] = []
        for segment in batch.segments:
            if segment.tokens is None:
                unknown.append(len(host))
                sources.append(int(self._row_of_slot[segment.slot]))
                host.append(0)
            else:
                host.extend(segment.tokens)
        if not unknown:
            return mx.array(host, mx.int32)
        assert self._last is not None
        if len(unknown) == len(host):
            rows = len(self._last) if sources == list(range(len(sources))) else -1
            return self._last if rows == len(host) else self._last[mx.array(sources)]
        ids = mx.array(host, mx.int32)
        ids[mx.array(unknown)] = self._last[mx.array(sources)]
        return ids


def make_runner(
    model: nn.Module,
    way: str,
    config: EngineConfig,
    *,
    context: int,
    limits: Limits,
    kind: type[Runner] = Runner,
) -> Runner:
    """A runner of class `kind` for a definition that runs in `way`; its pools grow on demand."""
    on_pages: PagedModel | SoloModel
    if way == SOLO:
        on_pages = SoloModel(model)
    else:
        on_pages = PagedModel(
            model,
            way,
            page_size=config.page_size,
            group_pages=[0] * len(limits.pages),
            kv_bits=config.kv_bits,
            kv_group_size=config.kv_group_size,
        )
    return kind(
        on_pages, slots=config.max_sequences, context=context, page_size=config.page_size, limits=limits
    )


class Ranks(Protocol):
    """Other processes that hold parts of the model, as an engine is handed them.

    micro_batches: 0 where a step's tokens stay on the device for the next one. Otherwise steps leave this
    process, so many are in flight at once, and a sequence is in one of them at most.
    """

    micro_batches: int

    def agree(self, way: str, context: int, config: EngineConfig, limits: Limits) -> Limits:
        """What all ranks have room for, given what this one has. Raises what a rank answers."""

    def make_adapters(self, loaded: LoadedModel, way: str, users: Callable[[str], int]) -> Adapters:
        """The adapters of the model, wherever its layers are."""

    def make_runner(
        self, model: nn.Module, way: str, config: EngineConfig, *, context: int, limits: Limits
    ) -> Runner:
        """The runner that has every rank carry out each batch."""
