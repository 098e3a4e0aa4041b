"""What running sequences hold: pages, a slot each, recurrent state, and their places in the prefix tree.

Knows: the pools, the tree, and in which page each position of a sequence lies. Does not know MLX, nor whose
turn it is: where pages are short it says so, and the scheduler decides who gives way.

    admit                          a slot, and what is cached of the prompt
    extend, checkpoint, publish    step by step: pages in, state kept, prompts for others to reuse
    free                           everything back; what was computed stays cached as long as it may

What the runner must be told of (tables, copies, states) is written into the batch of the step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from mlxserve.cache.pages import HOLE, GroupSpec, OutOfPages, PagePool, first_live_page, pages_for
from mlxserve.cache.prefix import Match, PrefixTree
from mlxserve.config import EngineConfig
from mlxserve.engine.batch import Batch
from mlxserve.engine.capacity import Memory, most_pages
from mlxserve.engine.sequence import Planned, Sequence


class CacheManager:
    """Who holds which pages and slots of one engine, in plain integers. Single-threaded."""

    def __init__(self, config: EngineConfig, memory: Memory) -> None:
        self.config = config
        self.memory = memory
        self.page_size = config.page_size
        self.pools = [PagePool(spec.pages) for spec in memory.groups]
        self.states = PagePool(memory.state_slots) if memory.state_slots else None
        self.tree = PrefixTree(memory.groups, self.pools, config.page_size, self.states)
        self.reuse = config.prefix_cache and bool(memory.groups or memory.state_slots)
        # Recurrent state is checkpointed where a prompt's last whole page ends, and its last whole block.
        self.block_tokens = self.page_size
        self._windows = [(g, spec.window) for g, spec in enumerate(memory.groups) if spec.window is not None]
        self._free_slots = list(range(config.max_sequences - 1, -1, -1))

    def take_pages(self, group: int, count: int) -> list[int]:
        """Fresh pages, evicting what only the tree holds if need be. Raises OutOfPages."""
        pool = self.pools[group]
        if pool.free < count:
            self.tree.evict(group, count - pool.free)
        return pool.allocate(count)

    def take_state(self) -> int | None:
        """A slot for recurrent state, evicting a checkpoint if need be; None if there is none to be had."""
        if self.states is None or not (self.states.free or self.tree.evict_states(1)):
            return None
        return self.states.allocate(1)[0]

    # -- a sequence is admitted ----------------------------------------------------------------------------

    def admit(self, batch: Batch, sequence: Sequence, running: list[Sequence]) -> bool:
        """Give a sequence a slot and whatever prefix is cached; False if its pages do not fit now.

        running: those whose needs come first.
        """
        if not self._free_slots:
            return False
        match = self._match(sequence)
        if not self._fits(sequence, match, running) or not self._has_state(sequence):
            if match is not None:
                self.tree.abandon(match)
            return False
        sequence.slot = self._free_slots.pop()
        sequence.tables = [[] for _ in self.memory.groups]
        sequence.computed = 0
        if match is not None:
            self._take_over(batch, sequence, match)
        return True

    def _match(self, sequence: Sequence) -> Match | None:
        if not self.reuse:
            return None
        # At least one token is computed: its logits are what the next one is drawn from.
        return self.tree.acquire(sequence.request.adapter, sequence.tokens, len(sequence.tokens) - 1)

    def _fits(self, sequence: Sequence, match: Match | None, running: list[Sequence]) -> bool:
        """Do the rest of its prompt's pages fit, beside what running sequences still need?"""
        if not running:
            return True
        shared = match.length if match is not None else 0
        for group, spec in enumerate(self.memory.groups):
            rest = pages_for(len(sequence.tokens), self.page_size) - shared // self.page_size
            needed = min(rest, most_pages(len(sequence.tokens), spec, self.config))
            promised = sum(self._promised(other, group, spec) for other in running)
            if max(needed, 1) + promised > self.pools[group].available:
                return False
        return True

    def _promised(self, other: Sequence, group: int, spec: GroupSpec) -> int:
        """Pages a running sequence will take next: the rest of its prompt, or one to go on with."""
        if other.decoding:
            return 1
        rest = pages_for(len(other.tokens), self.page_size) - len(other.tables[group])
        return min(max(rest, 1), most_pages(len(other.tokens), spec, self.config))

    def _has_state(self, sequence: Sequence) -> bool:
        """Give it a slot for its recurrent state, if the model has any; False if there is none to be had."""
        if self.states is None:
            return True
        sequence.state_slot = self.take_state()
        return sequence.state_slot is not None

    def _take_over(self, batch: Batch, sequence: Sequence, match: Match) -> None:
        """Enter a cached prefix into the sequence's tables; the page it ends in is copied."""
        sequence.cursor = match.cursor
        sequence.computed = match.length
        if not sequence.preemptions:
            sequence.cached_tokens = match.length
        for group, (shared, source) in enumerate(zip(match.shared, match.copy)):
            table = sequence.tables[group]
            table += shared
            if source is not None:
                (target,) = self.take_pages(group, 1)
                batch.copies.append((group, source, target))
                table.append(target)
                self.pools[group].release([source])  # read before anything of this step is written
            elif match.length % self.page_size:
                table.append(HOLE)
            live = ((i, page) for i, page in enumerate(table) if page != HOLE)
            batch.pages += [(group, sequence.slot, i, page) for i, page in live]
        if match.state is not None and self.states is not None:
            assert sequence.state_slot is not None
            batch.restores.append((match.state, sequence.state_slot))
            self.states.release([match.state])

    # -- step by step --------------------------------------------------------------------------------------

    def extend(self, batch: Batch, sequence: Sequence, stop: int) -> bool:
        """Pages for positions up to `stop` in every group; False where they are not to be had.

        Those of some groups may have come then: calling again, when somebody gave way, takes the rest.
        """
        needed = pages_for(stop, self.page_size)
        for group, table in enumerate(sequence.tables):
            first = len(table)
            if first >= needed:
                continue
            try:
                pages = self.take_pages(group, needed - first)
            except OutOfPages:
                return False
            table += pages
            batch.pages += [(group, sequence.slot, first + i, page) for i, page in enumerate(pages)]
        return True

    def release_slid_out(self, sequence: Sequence, position: int) -> None:
        """Give back pages that no query at `position` or later looks at."""
        for group, window in self._windows:
            table = sequence.tables[group]
            index = first_live_page(position, window, self.page_size) - 1
            while index >= 0 and table[index] != HOLE:
                self.pools[group].release([table[index]])
                table[index] = HOLE
                index -= 1

    def chunk(self, sequence: Sequence, room: int) -> int:
        """How many tokens of a prompt to take; with recurrent state, up to where a checkpoint belongs."""
        count = min(sequence.to_compute, room)
        if self.states is None or not self.reuse:
            return count
        stop = sequence.computed + count
        for size in (self.block_tokens, self.page_size):
            boundary = (len(sequence.tokens) - 1) // size * size
            if sequence.computed < boundary < stop:
                return boundary - sequence.computed
        if stop < boundary and stop // self.page_size * self.page_size > sequence.computed:
            return stop // self.page_size * self.page_size - sequence.computed
        return count

    def checkpoint(self, sequence: Sequence, count: int) -> int | None:
        """A slot for the recurrent state after this prompt chunk, if a later prompt may resume there."""
        if self.states is None or not self.reuse or sequence.computed % self.page_size:
            return None
        if sequence.computed > len(sequence.tokens) or (count == 1 and sequence.generated > 1):
            return None
        return self.take_state()

    def drop_checkpoint(self, slot: int) -> None:
        """Give back what `checkpoint` gave: the step will not compute it after all."""
        assert self.states is not None
        self.states.release([slot])

    def publish(self, batch: Batch, planned: Iterable[Planned]) -> None:
        """Let others reuse the prompts of this step; whoever does comes in a later step.

        With recurrent state a prefix is of use only where there is a checkpoint.
        """
        if not self.reuse:
            return
        for entry in planned:
            sequence, segment = entry.sequence, entry.segment
            if entry.checkpoint is not None:
                assert sequence.state_slot is not None
                batch.checkpoints.append((sequence.state_slot, entry.checkpoint))
                self._insert(batch, sequence, segment.start + segment.count, entry.checkpoint)
            elif self.states is None and segment.tokens is not None and segment.count > 1:
                self._insert(batch, sequence, segment.start + segment.count)

    def _insert(self, batch: Batch | None, sequence: Sequence, length: int, state: int | None = None) -> None:
        """Record computed tokens in the tree; where it has equal pages, the sequence takes the tree's."""
        if sequence.cursor is None:
            return
        first = sequence.cursor.position // self.page_size
        before = [table[first:] for table in sequence.tables]
        self.tree.insert(sequence.cursor, sequence.tokens, sequence.tables, length=length, state=state)
        if batch is None:
            return
        for group, (old, table) in enumerate(zip(before, sequence.tables)):
            for i, page in enumerate(old):
                if table[first + i] != page:
                    batch.later_pages.append((group, sequence.slot, first + i, table[first + i]))

    # -- a sequence leaves ---------------------------------------------------------------------------------

    def free(self, sequence: Sequence, *, keep: bool) -> None:
        """Give back slot, pages and state; with `keep`, what is computed stays cached as long as it may."""
        if sequence.cursor is not None:
            if keep and self.states is None:
                self._insert(None, sequence, min(sequence.computed, len(sequence.tokens)))
            self.tree.release(sequence.cursor)
            sequence.cursor = None
        for pool, table in zip(self.pools, sequence.tables):
            pool.release([page for page in table if page != HOLE])
        sequence.tables = []
        if sequence.state_slot is not None and self.states is not None:
            self.states.release([sequence.state_slot])
            sequence.state_slot = None
        self._free_slots.append(sequence.slot)
        sequence.slot = -1

    # -- all of it -----------------------------------------------------------------------------------------

    def needed(self, group: int, sequences: Iterable[Sequence]) -> int:
        """The least pages of a group with which each of `sequences` can be computed to its end."""
        spec = self.memory.groups[group]
        return max((most_pages(s.longest, spec, self.config) for s in sequences), default=1)

    def resize(self, group: int, total: int) -> None:
        """Let a group have `total` pages; no sequence may hold one of those that go."""
        self.tree.evict_from(group, total)
        self.pools[group].resize(total)
        groups = list(self.memory.groups)
        groups[group] = replace(groups[group], pages=total)
        self.memory = replace(self.memory, groups=tuple(groups))

    def check(self, running: list[Sequence]) -> None:
        """Raise unless every page is accounted for: free + held = total, references exact, tree sound."""
        self.tree.check()
        for group, pool in enumerate(self.pools):
            expected = dict(self.tree.pages_referenced(group))
            for page in _held(running, group):
                expected[page] = expected.get(page, 0) + 1
            pool.check(expected)
        if self.states is not None:
            slots = dict(self.tree.states_referenced())
            for sequence in running:
                assert sequence.state_slot is not None
                slots[sequence.state_slot] = slots.get(sequence.state_slot, 0) + 1
            self.states.check(slots)


def _held(running: Iterable[Sequence], group: int) -> Iterator[int]:
    for sequence in running:
        yield from (page for page in sequence.tables[group] if page != HOLE)
