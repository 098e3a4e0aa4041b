"""Who computes what in the next step, and in which pages.

Knows: sequences, tokens left to compute, pages, the prefix tree. No MLX, no text: whether a token ends
an answer is told by ids alone, stop strings by whoever calls `finish`.

A step is: `schedule()` → a Batch, which the runner carries out → `commit(batch, tokens)`. The next step
may be scheduled before the last one is committed: a token that nobody has read yet counts as *in flight*,
and its position is scheduled all the same. A row computed for a sequence that turns out to have ended is
dropped at its commit.

Prefill and decode are one thing: a sequence has tokens left to compute; the step in which none are left
draws the next token. Decoding sequences come first, then prompts in order of arrival, then new ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from mlxserve.cache.pages import HOLE, GroupSpec, OutOfPages, PagePool, first_live_page, pages_for
from mlxserve.cache.prefix import Match, PrefixTree
from mlxserve.config import EngineConfig
from mlxserve.engine.batch import Admission, Batch, Segment
from mlxserve.engine.pace import Pace
from mlxserve.engine.sequence import Sequence, Status
from mlxserve.engine.waiting import WaitingQueue
from mlxserve.errors import Busy, DoesNotFit, PromptTooLong
from mlxserve.request import FinishReason, Priority, Request


@dataclass(frozen=True, slots=True)
class Memory:
    """What the engine has: page groups, slots of recurrent state (0: the model has none), the context."""

    groups: tuple[GroupSpec, ...]
    state_slots: int
    context: int
    page_bytes: tuple[int, ...] = ()


@dataclass(slots=True)
class _Planned:
    """A sequence's part in a step; checkpoint: the state slot to copy its state to after the step."""

    sequence: Sequence
    segment: Segment
    checkpoint: int | None = None


class Scheduler:
    """One model's scheduler. Single-threaded.

    eos: ids that end an answer. `seed_of` gives a seed to a request that has none. micro_batches: how many
    steps are in flight at once over disjoint sets of streams; 0 where a step may go on with tokens that
    nobody has read.
    """

    def __init__(
        self,
        config: EngineConfig,
        memory: Memory,
        eos: frozenset[int],
        seed_of: Callable[[], int],
        *,
        micro_batches: int = 0,
    ) -> None:
        self.config = config
        self.memory = memory
        self.eos = eos
        self.seed_of = seed_of
        self.micro_batches = micro_batches
        self.page_size = config.page_size
        self.pools = [PagePool(spec.pages) for spec in memory.groups]
        self.states = PagePool(memory.state_slots) if memory.state_slots else None
        self.tree = PrefixTree(memory.groups, self.pools, config.page_size, self.states)
        self.reuse = config.prefix_cache and bool(memory.groups or memory.state_slots)
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []  # in order of arrival
        self.pace = Pace(config.gap_target_s, config.min_chunk, config.step_tokens)
        self.preemptions = 0
        # Recurrent state is checkpointed where a prompt's last whole page ends, and its last whole block.
        self.block_tokens = self.page_size
        self._free_slots = list(range(config.max_sequences - 1, -1, -1))
        self._arrivals = 0
        self._step = 0
        self._now: dict[int, _Planned] = {}  # by arrival: the step being scheduled
        self._on_the_way: deque[list[Sequence]] = deque()  # steps not yet committed

    # -- requests in and out -----------------------------------------------------------------------------

    def add(self, request: Request, now_s: float = 0.0) -> Sequence:
        """Queue a request. Raises PromptTooLong, DoesNotFit (can never run) or Busy (queue full)."""
        self._refuse_hopeless(request)
        if len(self.waiting) >= self.config.max_queue:
            raise Busy(f"The queue is full ({self.config.max_queue} requests are waiting); try again later.")
        seed = request.params.seed
        sequence = Sequence(
            request,
            seed=self.seed_of() if seed is None else seed,
            arrival=self._arrivals,
            arrived_s=now_s,
            tokens=list(request.prompt),
        )
        self._arrivals += 1
        self.waiting.add(sequence)
        return sequence

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence now, running or waiting; its pages are given back."""
        if sequence.status is Status.FINISHED:
            return
        if sequence.status is Status.WAITING:
            self.waiting.remove(sequence)
        else:
            self._leave(sequence, keep=reason is not FinishReason.ERROR)
        sequence.status = Status.FINISHED
        sequence.finish_reason = reason

    @property
    def has_work(self) -> bool:
        return bool(self.running or len(self.waiting) or self._on_the_way)

    def _refuse_hopeless(self, request: Request) -> None:
        wanted = len(request.prompt) + (request.params.max_tokens or 1)
        if not request.prompt:
            raise PromptTooLong("The prompt is empty; it needs at least one token.", needed=0, limit=1)
        if wanted > self.memory.context:
            raise PromptTooLong(
                f"The prompt has {len(request.prompt)} tokens and max_tokens is {request.params.max_tokens}, "
                f"{wanted} together; the context holds {self.memory.context}.",
                needed=wanted,
                limit=self.memory.context,
            )
        for group, spec in enumerate(self.memory.groups):
            needed = self._most_pages(wanted - 1, spec)
            if needed > spec.pages:
                size = self.memory.page_bytes[group] if self.memory.page_bytes else self.page_size
                raise DoesNotFit(
                    f"The request needs {needed} pages of {self.page_size} tokens in the cache, "
                    f"which has {spec.pages}; give it more memory or ask for less.",
                    needed_bytes=needed * size,
                    available_bytes=spec.pages * size,
                )

    def _most_pages(self, tokens: int, spec: GroupSpec) -> int:
        """Pages of a group that a sequence of `tokens` positions ever holds at once."""
        whole = pages_for(tokens, self.page_size)
        if spec.window is None:
            return whole
        return min(whole, pages_for(spec.window + self.config.step_tokens, self.page_size) + 1)

    # -- a step ------------------------------------------------------------------------------------------

    def schedule(self) -> Batch | None:
        """The next step, or None when nothing can be computed now."""
        batch = Batch(self._step)
        self._now = {}
        room = self.config.step_tokens
        for sequence in self._streams():
            if room > 0 and sequence.status is Status.RUNNING and sequence.may_run:
                room -= self._plan(batch, sequence, 1)
        # Streams whose last token is on its way wait for it too: it is read when this step has been begun.
        room = min(room, self.pace.budget(sum(sequence.decoding for sequence in self.running)))
        for sequence in [s for s in self.running if not s.decoding and not s.in_flight]:
            if room > 0 and sequence.status is Status.RUNNING:
                room -= self._plan(batch, sequence, self._chunk(sequence, room))
        self._admit(batch, room)
        planned = list(self._now.values())
        if not planned:
            return None
        batch.segments = [entry.segment for entry in planned]
        self._share(batch, planned)
        self._on_the_way.append([entry.sequence for entry in planned])
        self._step += 1
        return batch

    def _streams(self) -> list[Sequence]:
        """Decoding sequences of the next step: all, or a micro-batch's share of those that wait for none."""
        streams = [s for s in self.running if s.decoding]
        if not self.micro_batches:
            return streams
        share = -(-len(streams) // self.micro_batches)
        return [s for s in streams if not s.in_flight][:share]

    @property
    def steps_begun(self) -> int:
        """How many batches have been made."""
        return self._step

    def commit(self, batch: Batch, tokens: list[int], now_s: float = 0.0) -> list[tuple[Sequence, int]]:
        """Take in what the step drew, a token for each segment with `sample`, in their order.

        Returns (sequence, token) for those still wanted; a sequence that ended by an id or by its limit is
        FINISHED when this returns. Batches are committed in the order in which they were scheduled.
        """
        drawn = iter(tokens)
        news = []
        for segment, sequence in zip(batch.segments, self._on_the_way.popleft(), strict=True):
            if not segment.sample:
                continue
            token = next(drawn)
            if sequence.status is Status.FINISHED:
                continue
            if sequence.void_draws:
                sequence.void_draws -= 1
                continue
            sequence.in_flight -= 1
            sequence.tokens.append(token)
            if sequence.first_token_s is None:
                sequence.first_token_s = now_s
            self._end_if_done(sequence, token)
            news.append((sequence, token))
        return news

    def force(self, sequence: Sequence, tokens: list[int], now_s: float) -> None:
        """Append tokens that a grammar leaves no choice about; a draw already on its way does not count.

        The next step computes them together, as it would a prompt.
        """
        sequence.void_draws += sequence.in_flight
        sequence.in_flight = 0
        sequence.tokens += tokens
        if sequence.first_token_s is None:
            sequence.first_token_s = now_s

    def abandon(self) -> list[Sequence]:
        """Forget every step on its way, and what was computed: after a step has failed.

        Returns the sequences those steps touched, still running or waiting. All running ones go back to
        the queue to be computed anew; nothing that was cached is trusted any more.
        """
        touched = list(dict.fromkeys(sequence for step in self._on_the_way for sequence in step))
        self._on_the_way.clear()
        self._now = {}
        for sequence in list(self.running):
            sequence.in_flight = sequence.void_draws = 0
            self._preempt(sequence, keep=False)
        self.tree.clear()
        return [sequence for sequence in touched if sequence.status is not Status.FINISHED]

    def _end_if_done(self, sequence: Sequence, token: int) -> None:
        params = sequence.request.params
        if (token in self.eos and not params.ignore_eos) or token in params.stop_token_ids:
            self.finish(sequence, FinishReason.STOP)
        elif len(sequence.tokens) - sequence.prompt_tokens >= (params.max_tokens or 1):
            self.finish(sequence, FinishReason.LENGTH)

    # -- one sequence in a step --------------------------------------------------------------------------

    def _chunk(self, sequence: Sequence, room: int) -> int:
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

    def _plan(self, batch: Batch, sequence: Sequence, count: int) -> int:
        """Plan `count` tokens of a running sequence; 0 if it had to give way for lack of pages."""
        start, stop = sequence.computed, sequence.computed + count
        if not self._ensure_pages(batch, sequence, stop):
            return 0
        self._release_slid_out(sequence, start)
        known = stop <= len(sequence.tokens)
        sample = count == sequence.to_compute
        tokens = sequence.tokens[start:stop] if known else None
        segment = Segment(sequence.slot, start, count, tokens, sample, draw=sequence.generated)
        sequence.computed = stop
        sequence.in_flight += sample
        self._now[sequence.arrival] = _Planned(sequence, segment, self._checkpoint_slot(sequence, count))
        return count

    def _ensure_pages(self, batch: Batch, sequence: Sequence, stop: int) -> bool:
        """Pages for positions up to `stop` in every group; the youngest sequence gives way if need be."""
        needed = pages_for(stop, self.page_size)
        for group, table in enumerate(sequence.tables):
            while len(table) < needed:
                try:
                    pages = self.take_pages(group, needed - len(table))
                except OutOfPages:
                    victim = self._youngest()
                    self._preempt(victim)
                    if victim is sequence:
                        return False
                    continue
                first = len(table)
                table += pages
                batch.pages += [(group, sequence.slot, first + i, page) for i, page in enumerate(pages)]
        return True

    def take_pages(self, group: int, count: int) -> list[int]:
        """Fresh pages, evicting what only the tree holds if need be. Raises OutOfPages."""
        pool = self.pools[group]
        if pool.free < count:
            self.tree.evict(group, count - pool.free)
        return pool.allocate(count)

    def _release_slid_out(self, sequence: Sequence, position: int) -> None:
        """Give back pages that no query at `position` or later looks at."""
        for group, spec in enumerate(self.memory.groups):
            if spec.window is None:
                continue
            table = sequence.tables[group]
            index = first_live_page(position, spec.window, self.page_size) - 1
            while index >= 0 and table[index] != HOLE:
                self.pools[group].release([table[index]])
                table[index] = HOLE
                index -= 1

    def _checkpoint_slot(self, sequence: Sequence, count: int) -> int | None:
        """A slot for the recurrent state after this prompt chunk, if a later prompt may resume there."""
        if self.states is None or not self.reuse or sequence.computed % self.page_size:
            return None
        if sequence.computed > len(sequence.tokens) or (count == 1 and sequence.generated > 1):
            return None
        if not self.states.free and not self.tree.evict_states(1):
            return None
        return self.states.allocate(1)[0]

    def _share(self, batch: Batch, planned: list[_Planned]) -> None:
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

    # -- admission ---------------------------------------------------------------------------------------

    def _admit(self, batch: Batch, room: int) -> None:
        """Start waiting sequences, in the queue's order, while slots, pages and room last."""
        while room > 0 and (sequence := self._next_waiting()) is not None:
            if not self._start(batch, sequence):
                # Whoever comes later does not overtake it: it would starve.
                if not self._make_way(sequence):
                    return
                continue
            self.waiting.remove(sequence)
            self.waiting.served(sequence)
            room -= self._plan(batch, sequence, self._chunk(sequence, room))

    def _next_waiting(self) -> Sequence | None:
        return next((s for s in self.waiting if not s.in_flight and not self._held_back(s)), None)

    def _make_way(self, sequence: Sequence) -> bool:
        """Let a running batch request give way to an interactive one; False if there is none."""
        if sequence.request.priority is not Priority.INTERACTIVE or not self.running:
            return False
        victim = self._youngest()
        if victim.request.priority is not Priority.BATCH or victim.arrival in self._now:
            return False
        self._preempt(victim)
        return True

    def _held_back(self, sequence: Sequence) -> bool:
        """True while another sequence is computing a prefix that this one can take over when it is done."""
        leader = sequence.waits_for
        if leader is not None:
            if leader.status is Status.RUNNING and leader.computed < sequence.waits_until:
                return True
            sequence.waits_for = None
        if not self.reuse:
            return False
        for other in self.running:
            if other.decoding or other.request.adapter != sequence.request.adapter:
                continue
            shared = self._shared_pages(sequence, other) * self.page_size
            if shared > other.computed:
                sequence.waits_for, sequence.waits_until = other, shared
                return True
        return False

    def _shared_pages(self, sequence: Sequence, other: Sequence) -> int:
        """Whole pages of tokens that both start with, the last token of `sequence` left out."""
        size, mine, theirs = self.page_size, sequence.tokens, other.tokens
        most = min(len(mine) - 1, len(theirs)) // size
        low, high = 0, most
        while low < high:  # prefixes either agree or not: halve
            middle = (low + high + 1) // 2
            if mine[low * size : middle * size] == theirs[low * size : middle * size]:
                low = middle
            else:
                high = middle - 1
        return low

    def _start(self, batch: Batch, sequence: Sequence) -> bool:
        """Give a waiting sequence a slot and whatever prefix is cached; False if its pages do not fit now."""
        if not self._free_slots:
            return False
        match = self._match(sequence)
        if not self._fits(sequence, match) or not self._take_state_slot(sequence):
            if match is not None:
                self.tree.abandon(match)
            return False
        sequence.status = Status.RUNNING
        sequence.slot = self._free_slots.pop()
        sequence.tables = [[] for _ in self.memory.groups]
        sequence.computed = 0
        if match is not None:
            self._take_over(batch, sequence, match)
        self._insert_running(sequence)
        params = replace(sequence.request.params, seed=sequence.seed)
        batch.admitted.append(
            Admission(
                sequence.slot,
                params,
                sequence.seed,
                tuple(sequence.tokens) if _needs_history(params) else (),
                sequence.prompt_tokens,
                sequence.request.adapter,
                sequence.state_slot,
            )
        )
        return True

    def _match(self, sequence: Sequence) -> Match | None:
        if not self.reuse:
            return None
        # At least one token is computed: its logits are what the next one is drawn from.
        return self.tree.acquire(sequence.request.adapter, sequence.tokens, len(sequence.tokens) - 1)

    def _fits(self, sequence: Sequence, match: Match | None) -> bool:
        """Do the rest of its prompt's pages fit, beside what running sequences still need?"""
        if not self.running:
            return True
        shared = match.length if match is not None else 0
        for group, spec in enumerate(self.memory.groups):
            rest = pages_for(len(sequence.tokens), self.page_size) - shared // self.page_size
            needed = min(rest, self._most_pages(len(sequence.tokens), spec))
            promised = sum(self._promised(other, group, spec) for other in self.running)
            if max(needed, 1) + promised > self.pools[group].available:
                return False
        return True

    def _promised(self, other: Sequence, group: int, spec: GroupSpec) -> int:
        """Pages a running sequence will take next: the rest of its prompt, or one to go on with."""
        if other.decoding:
            return 1
        rest = pages_for(len(other.tokens), self.page_size) - len(other.tables[group])
        return min(max(rest, 1), self._most_pages(len(other.tokens), spec))

    def _take_state_slot(self, sequence: Sequence) -> bool:
        if self.states is None:
            return True
        if not self.states.free and not self.tree.evict_states(1):
            return False
        (sequence.state_slot,) = self.states.allocate(1)
        return True

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

    def _insert_running(self, sequence: Sequence) -> None:
        place = len(self.running)
        while place and self.running[place - 1].arrival > sequence.arrival:
            place -= 1
        self.running.insert(place, sequence)

    # -- giving way --------------------------------------------------------------------------------------

    def _youngest(self) -> Sequence:
        """Who gives way: batch before interactive, then the latest to arrive."""
        return max(self.running, key=lambda s: (s.request.priority is Priority.BATCH, s.arrival))

    def _preempt(self, sequence: Sequence, *, keep: bool = True) -> None:
        """Take a running sequence's pages; it keeps its tokens and is computed anew later."""
        self._unplan(sequence)
        self._leave(sequence, keep=keep)
        sequence.status = Status.WAITING
        sequence.computed = 0
        sequence.preemptions += 1
        self.preemptions += 1
        self.waiting.add(sequence, front=True)

    def _unplan(self, sequence: Sequence) -> None:
        """Take back what the step being scheduled was to compute for it."""
        entry = self._now.pop(sequence.arrival, None)
        if entry is None:
            return
        sequence.computed = entry.segment.start
        sequence.in_flight -= entry.segment.sample
        if entry.checkpoint is not None and self.states is not None:
            self.states.release([entry.checkpoint])

    def _leave(self, sequence: Sequence, *, keep: bool) -> None:
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
        self.running.remove(sequence)
        self._free_slots.append(sequence.slot)
        sequence.slot = -1

    def resize(self, pages: tuple[int, ...]) -> None:
        """Give each group this many pages from now on, between two steps, or what one request here needs.

        What only the cache holds in those that go is evicted; running sequences that hold one start anew.
        """
        self._now = {}
        here = [*self.running, *self.waiting]
        for group, (spec, wanted) in enumerate(zip(self.memory.groups, pages)):
            total = max(wanted, *(self._most_pages(sequence.longest, spec) for sequence in here), 1)
            for sequence in [s for s in self.running if max(s.tables[group], default=0) >= total]:
                self._preempt(sequence)
            self.tree.evict_from(group, total)
            self.pools[group].resize(total)
        groups = (replace(spec, pages=pool.total) for spec, pool in zip(self.memory.groups, self.pools))
        self.memory = replace(self.memory, groups=tuple(groups))

    # -- books -------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise unless every page is accounted for: free + held = total, references exact, tree sound."""
        self.tree.check()
        for group, pool in enumerate(self.pools):
            expected = dict(self.tree.pages_referenced(group))
            for page in self._held(group):
                expected[page] = expected.get(page, 0) + 1
            pool.check(expected)
        if self.states is not None:
            slots = dict(self.tree.states_referenced())
            for sequence in self.running:
                assert sequence.state_slot is not None
                slots[sequence.state_slot] = slots.get(sequence.state_slot, 0) + 1
            self.states.check(slots)

    def _held(self, group: int) -> Iterator[int]:
        for sequence in self.running:
            yield from (page for page in sequence.tables[group] if page != HOLE)


def _needs_history(params: object) -> bool:
    neutral = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    return any(getattr(params, name) not in (None, value) for name, value in neutral.items())
