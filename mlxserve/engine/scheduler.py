"""Who computes what in the next step.

Knows: sequences, tokens left to compute, arrivals, priorities. Does not know where anything lies (pages,
slots, the prefix tree: cache_manager.py), text or MLX: whether a token ends an answer is told by ids alone,
stop strings by whoever calls `finish`.

A step is: `schedule()` → a Batch, which the runner carries out → `commit(batch, tokens)`. The next step
may be scheduled before the last one is committed: a token that nobody has read yet counts as *in flight*,
and its position is scheduled all the same. A row computed for a sequence that turns out to have ended is
dropped at its commit.

Prefill and decode are one thing: a sequence has tokens left to compute; the step in which none are left
draws the next token. Decoding sequences come first, then prompts in order of arrival, then new ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace

from mlxserve.config import EngineConfig
from mlxserve.engine.batch import Admission, Batch, Segment
from mlxserve.engine.cache_manager import CacheManager
from mlxserve.engine.capacity import Memory, refuse_hopeless
from mlxserve.engine.pace import Pace
from mlxserve.engine.sequence import Planned, Sequence, Status
from mlxserve.engine.shared_prefix import held_back
from mlxserve.engine.waiting import WaitingQueue
from mlxserve.errors import Busy
from mlxserve.request import FinishReason, Priority, Request


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
        self.eos = eos
        self.seed_of = seed_of
        self.micro_batches = micro_batches
        self.cache = CacheManager(config, memory)
        self.page_size = config.page_size
        self.pools, self.states, self.tree = self.cache.pools, self.cache.states, self.cache.tree
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []  # in order of arrival
        self.pace = Pace(config.gap_target_s, config.min_chunk, config.step_tokens)
        self.preemptions = 0
        self._arrivals = 0
        self._step = 0
        self._now: dict[int, Planned] = {}  # by arrival: the step being scheduled
        self._on_the_way: deque[list[Sequence]] = deque()  # steps not yet committed

    # -- requests in and out -----------------------------------------------------------------------------

    def add(self, request: Request, now_s: float = 0.0) -> Sequence:
        """Queue a request. Raises PromptTooLong, DoesNotFit (can never run) or Busy (queue full)."""
        refuse_hopeless(request, self.memory, self.config)
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
    def memory(self) -> Memory:
        """What there is room for; `resize` changes it."""
        return self.cache.memory

    @property
    def has_work(self) -> bool:
        return bool(self.running or len(self.waiting) or self._on_the_way)

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
                room -= self._plan(batch, sequence, self.cache.chunk(sequence, room))
        self._admit(batch, room)
        planned = list(self._now.values())
        if not planned:
            return None
        batch.segments = [entry.segment for entry in planned]
        self.cache.publish(batch, planned)
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

    def commit(self, batch: Batch, tokens: list[int], now_s: float = 0.0) -> list[tuple[int, Sequence, int]]:
        """Take in what the step drew, a token for each segment with `sample`, in their order.

        Returns (row, sequence, tokens[row]) for those still wanted; a sequence that ended by an id or by its
        limit is FINISHED when this returns. Batches are committed in the order in which they were scheduled.
        """
        step = zip(batch.segments, self._on_the_way.popleft(), strict=True)
        drawing = [sequence for segment, sequence in step if segment.sample]
        news = []
        for row, (sequence, token) in enumerate(zip(drawing, tokens, strict=True)):
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
            news.append((row, sequence, token))
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

    def _plan(self, batch: Batch, sequence: Sequence, count: int) -> int:
        """Plan `count` tokens of a running sequence; 0 if it had to give way for lack of pages."""
        start, stop = sequence.computed, sequence.computed + count
        while not self.cache.extend(batch, sequence, stop):
            victim = self._youngest()
            self._preempt(victim)
            if victim is sequence:
                return 0
        self.cache.release_slid_out(sequence, start)
        known = stop <= len(sequence.tokens)
        sample = count == sequence.to_compute
        tokens = sequence.tokens[start:stop] if known else None
        segment = Segment(sequence.slot, start, count, tokens, sample, draw=sequence.generated)
        sequence.computed = stop
        sequence.in_flight += sample
        checkpoint = self.cache.checkpoint(sequence, count)
        self._now[sequence.arrival] = Planned(sequence, segment, checkpoint)
        return count

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
            room -= self._plan(batch, sequence, self.cache.chunk(sequence, room))

    def _next_waiting(self) -> Sequence | None:
        return next((s for s in self.waiting if not s.in_flight and not self._held_back(s)), None)

    def _held_back(self, sequence: Sequence) -> bool:
        """True while it is worth waiting for a prefix that somebody is computing."""
        return self.cache.reuse and held_back(sequence, self.running, self.page_size)

    def _make_way(self, sequence: Sequence) -> bool:
        """Let a running batch request give way to an interactive one; False if there is none."""
        if sequence.request.priority is not Priority.INTERACTIVE or not self.running:
            return False
        victim = self._youngest()
        if victim.request.priority is not Priority.BATCH or victim.arrival in self._now:
            return False
        self._preempt(victim)
        return True

    def _start(self, batch: Batch, sequence: Sequence) -> bool:
        """Let a waiting sequence run; False if what it needs cannot be had now."""
        if not self.cache.admit(batch, sequence, self.running):
            return False
        sequence.status = Status.RUNNING
        self._insert_running(sequence)
        batch.admitted.append(_admission(sequence))
        return True

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
        if entry.checkpoint is not None:
            self.cache.drop_checkpoint(entry.checkpoint)

    def _leave(self, sequence: Sequence, *, keep: bool) -> None:
        """Stop running; with `keep`, what is computed stays cached as long as it may."""
        self.cache.free(sequence, keep=keep)
        self.running.remove(sequence)

    # -- the memory --------------------------------------------------------------------------------------

    def resize(self, pages: tuple[int, ...]) -> None:
        """Give each group this many pages from now on, between two steps, or what one request here needs.

        What only the cache holds in those that go is evicted; running sequences that hold one start anew.
        """
        self._now = {}
        here = [*self.running, *self.waiting]
        for group, wanted in enumerate(pages):
            total = max(wanted, self.cache.needed(group, here))
            for sequence in [s for s in self.running if max(s.tables[group], default=0) >= total]:
                self._preempt(sequence)
            self.cache.resize(group, total)

    def check(self) -> None:
        """Raise unless every page is accounted for: free + held = total, references exact, tree sound."""
        self.cache.check(self.running)


def _admission(sequence: Sequence) -> Admission:
    params = replace(sequence.request.params, seed=sequence.seed)
    return Admission(
        sequence.slot,
        params,
        sequence.seed,
        tuple(sequence.tokens) if _needs_history(params) else (),
        sequence.prompt_tokens,
        sequence.request.adapter,
        sequence.state_slot,
    )


def _needs_history(params: object) -> bool:
    neutral = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    return any(getattr(params, name) not in (None, value) for name, value in neutral.items())
