"""The loop: schedule, run, draw, commit; and text for whoever waits.

Knows: how scheduler, runner and text streams fit together, and what to do when a step fails. Does not
know threads (worker.py) or where requests come from. All calls happen on one thread, which owns MLX.

A step, with the next one built before the last one's tokens are read:

1. schedule step n + 1 (its tokens may be in flight)      scheduler.py
2. start its forward pass on the device                   runner.py
3. read and commit the tokens of step n                   scheduler.py, text
4. draw the tokens of step n + 1                          sampler.py

Grammars need the value of a token before the next one is drawn: 3 comes before 4, and their masks are made
while the device is busy with 2.

Where the model is a pipeline over several processes, 3 is at another place: steps over disjoint sets of
sequences are in flight, as many as there are stages, and the oldest is committed before the next is built.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from mlxserve.cache.disk import DiskTier
from mlxserve.config import EngineConfig
from mlxserve.engine.adapters import Adapters
from mlxserve.engine.capacity import Memory
from mlxserve.engine.memory import Sizes, bound_mlx, machine_budget, measure, page_groups, plan_memory
from mlxserve.engine.runner import Drawn, Forward, Limits, Ranks, Runner, make_runner
from mlxserve.engine.scheduler import Scheduler
from mlxserve.engine.sequence import Sequence as Running
from mlxserve.engine.sequence import Status
from mlxserve.errors import (
    DoesNotFit,
    EngineFailed,
    EngineStopped,
    MlxServeError,
    PromptTooLong,
    Unsupported,
    UsageError,
)
from mlxserve.models.check import choose_way
from mlxserve.models.load import LoadedModel
from mlxserve.models.paged import SOLO, PagedModel
from mlxserve.request import Delta, FinishReason, Metrics, Request, SamplingParams, TokenLogprob
from mlxserve.text.stream import TextStream
from mlxserve.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from mlxserve.engine.grammar import Constraint, Grammars
    from mlxserve.engine.persist import Persistence

Sink = Callable[[Delta | MlxServeError], None]


@dataclass(slots=True)
class _Stream:
    """One request's way out: its text so far, and who listens."""

    sequence: Running
    text: TextStream
    sink: Sink
    deadline_s: float | None
    constraint: Constraint | None = None


@dataclass(slots=True)
class Counters:
    """What has happened since the start."""

    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    forced_tokens: int = 0
    finished: int = 0
    failed: int = 0
    busy_s: float = 0.0
    errors: dict[str, int] = field(default_factory=dict)


class Engine:
    """One loaded model, serving many requests. Not thread-safe: see worker.py.

    ranks: other processes that hold parts of the model, where there are any.
    Raises DoesNotFit if the machine has no memory for even one page.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        tokenizer: Tokenizer,
        config: EngineConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
        ranks: Ranks | None = None,
    ) -> None:
        self.loaded = loaded
        self.tokenizer = tokenizer
        self.clock = clock
        self.way, self.reason = choose_way(loaded.config)
        self.config = config if self.way != SOLO else replace(config, max_sequences=1)
        bound_mlx()
        self._shared = ranks is not None
        self.micro_batches = 0 if ranks is None else ranks.micro_batches
        self.memory = self._plan_memory()
        make_adapters = Adapters if ranks is None else ranks.make_adapters
        self.adapters = make_adapters(loaded, self.way, self._users_of)
        self.runner = self._make_runner(ranks)
        self.runner.take_adapters(self.adapters.stack, self.adapters.id_of)
        self.scheduler = Scheduler(
            self.config,
            self.memory,
            tokenizer.eos_token_ids,
            _random_seed,
            micro_batches=self.micro_batches,
        )
        self.persistence = self._open_disk()
        self.counters = Counters()
        self.notes = [*loaded.notes, *self._notes()]
        self._streams: dict[str, _Stream] = {}
        self._of: dict[Running, _Stream] = {}
        self._pending: deque[Drawn] = deque()
        self._last_commit_s = self._woken_s = clock()

    # -- requests ----------------------------------------------------------------------------------------

    def add(self, request: Request, sink: Sink, constraint: Constraint | None = None) -> None:
        """Queue a request; its deltas, or one error, go to `sink`. Raises what the scheduler refuses, and
        ModelNotFound for an adapter that is not loaded.

        constraint: the request's compiled grammar, where another thread has made it (`compile_grammar`).
        """
        if request.id in self._streams:
            raise UsageError(f"A request with the id {request.id!r} is already here.", param="id")
        bad = next((t for t in request.params.logit_bias if t >= self.tokenizer.vocab_size), None)
        if bad is not None:
            raise UsageError(
                f"logit_bias names token {bad}; the vocabulary has {self.tokenizer.vocab_size}.",
                param="logit_bias",
            )
        if constraint is None:
            constraint = self.compile_grammar(request.params)
        if request.adapter is not None:
            request = replace(request, adapter=self.adapters.digest(request.adapter))
        now = self.clock()
        sequence = self.scheduler.add(request, now)
        if self.persistence is not None:
            self.persistence.restore(request.prompt, request.adapter)
        deadline = None if request.deadline_s is None else now + request.deadline_s
        text = TextStream(self.tokenizer, request.params.stop, continues=self._goes_on(request))
        stream = _Stream(sequence, text, sink, deadline, constraint)
        self._streams[request.id] = self._of[sequence] = stream
        if request.resume:
            self._resume(stream)
        if constraint is not None:
            self._force(stream)

    def _resume(self, stream: _Stream) -> None:
        """Take up an answer where another engine left it: its tokens, and the state of text and grammar."""
        tokens = list(stream.sequence.request.resume)
        self.scheduler.force(stream.sequence, tokens, self.clock())
        for token in tokens:
            stream.text.push(token)
            if stream.constraint is not None:
                stream.constraint.accept(token)

    def _goes_on(self, request: Request) -> bool:
        """True where the answer is one text with the prompt's; a prompt of special tokens has none."""
        return request.continues and any(i not in self.tokenizer.special_ids for i in request.prompt)

    def compile_grammar(self, params: SamplingParams) -> Constraint | None:
        """A constraint for settings that ask for one; any thread may call. Raises Unsupported with a reason."""
        return self.grammars.compile(params) if params.constrained else None

    @cached_property
    def grammars(self) -> Grammars:
        """Compiled grammars of this model's vocabulary."""
        from mlxserve.engine.grammar import Grammars

        return Grammars(self.tokenizer, self.vocabulary)

    @cached_property
    def vocabulary(self) -> int:
        """How many logits a row has: the model's own count, which may exceed the tokenizer's."""
        text = self.loaded.config.get("text_config") or {}
        return int(
            self.loaded.config.get("vocab_size") or text.get("vocab_size") or self.tokenizer.vocab_size
        )

    def cancel(self, request_id: str) -> None:
        """End a request now; what it held is free for the next step. Unknown ids are ignored."""
        stream = self._streams.get(request_id)
        if stream is not None:
            self.scheduler.finish(stream.sequence, FinishReason.CANCELLED)
            self._close(stream, "")

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._pending)

    # -- the loop ----------------------------------------------------------------------------------------

    def step(self) -> None:
        """One step. An exception in it fails the requests it touched; the others go on."""
        self._expire()
        started = self.clock()
        try:
            self._advance()
        except Exception as error:
            self._recover(error)
        if self.persistence is not None and not self.has_work:
            self.persistence.flush()
        self.counters.busy_s += self.clock() - started
        if self.config.check and not self.has_work:
            self.scheduler.check()

    def settle(self) -> None:
        """Read and deliver the tokens on their way, so that the device is free for other work."""
        try:
            while self._pending:
                self._commit_oldest()
        except Exception as error:
            self._recover(error)

    def _advance(self) -> None:
        if self.micro_batches:
            self._fill_pipeline()
            self._commit_oldest()
            return
        batch = self.scheduler.schedule()
        forward = self.runner.forward(batch) if batch is not None else None
        self._commit_oldest()
        if forward is not None:
            self._pending.append(self.runner.draw(forward, self._masks(forward)))
        if not self.config.overlap:
            self._commit_oldest()

    def _fill_pipeline(self) -> None:
        """Start steps over other sequences until as many are in flight as may be, or nobody is free."""
        while len(self._pending) < self.micro_batches:
            batch = self.scheduler.schedule()
            if batch is None:
                return
            forward = self.runner.forward(batch)
            self._pending.append(self.runner.draw(forward, self._masks(forward)))

    def _commit_oldest(self) -> None:
        if self._pending:
            self._commit(self._pending.popleft())

    def _masks(self, forward: Forward) -> dict[int, np.ndarray]:
        """Packed masks of the rows under a grammar whose sequences still wait for this draw."""
        if not any(stream.constraint for stream in self._streams.values()):
            return {}
        drawing = set(forward.slots.tolist())
        streams = [
            stream
            for stream in self._streams.values()
            if stream.constraint is not None and stream.sequence.in_flight and stream.sequence.slot in drawing
        ]
        constraints = [stream.constraint for stream in streams if stream.constraint is not None]
        rows = self.grammars.masks(constraints) if constraints else ()
        return {stream.sequence.slot: row for stream, row in zip(streams, rows)}

    def _commit(self, drawn: Drawn) -> None:
        tokens = drawn.read()
        logprobs = drawn.read_logprobs()
        now = self.clock()
        if self.persistence is not None:
            self.persistence.flush()
        self._measure_pace(drawn, now)
        prompt_done = [s for s in drawn.batch.segments if s.count > 1]
        self.counters.prompt_tokens += sum(segment.count for segment in prompt_done)
        row_of = {}
        if logprobs:
            drawing = [segment for segment in drawn.batch.segments if segment.sample]
            row_of = {segment.slot: row for row, segment in enumerate(drawing)}
        slots = {sequence: sequence.slot for sequence in self.scheduler.running} if logprobs else {}
        for sequence, token in self.scheduler.commit(drawn.batch, tokens, now):
            row = row_of.get(slots.get(sequence, -1))
            self._deliver(sequence, token, None if row is None else logprobs.get(row))
        self.counters.steps += 1

    def _measure_pace(self, drawn: Drawn, now: float) -> None:
        counts = [segment.count for segment in drawn.batch.segments]
        streams = counts.count(1)
        self.scheduler.pace.record(
            sum(counts) - streams, streams, now - max(self._last_commit_s, self._woken_s)
        )
        self._last_commit_s = now

    def wake(self) -> None:
        """Work arrived after a pause: the pause is not counted as a step's time."""
        self._woken_s = self.clock()

    def _deliver(self, sequence: Running, token: int, logprob: TokenLogprob | None) -> None:
        """Turn one token into text and send it on; a stop string or a complete grammar ends the answer."""
        stream = self._of.get(sequence)
        if stream is None:
            return
        self.counters.generated_tokens += 1
        params = sequence.request.params
        if self.persistence is not None and len(sequence.tokens) == sequence.prompt_tokens + 1:
            self.persistence.save(sequence.request.prompt, sequence.request.adapter)
        ended_by_id = sequence.finish_reason is FinishReason.STOP
        text = "" if ended_by_id else stream.text.push(token)
        try:
            complete = stream.constraint is not None and not ended_by_id and stream.constraint.accept(token)
        except MlxServeError as error:
            self._fail(sequence, error)
            return
        if (stream.text.stopped or complete) and sequence.status is not Status.FINISHED:
            self.scheduler.finish(sequence, FinishReason.STOP)
        elif stream.text.stopped:
            sequence.finish_reason = FinishReason.STOP
        logprobs = () if logprob is None or params.logprobs is None else (logprob,)
        if sequence.status is Status.FINISHED:
            self._close(stream, text, (token,), logprobs)
        else:
            stream.sink(Delta(text, (token,), logprobs))
            if stream.constraint is not None:
                self._force(stream)

    def _force(self, stream: _Stream) -> None:
        """Take the tokens that a grammar leaves no choice about, without a forward pass for each.

        A single one is drawn in the step on its way anyway. Not where log-probabilities were asked for:
        these come from logits.
        """
        assert stream.constraint is not None
        sequence = stream.sequence
        forced = stream.constraint.forced()
        room = (sequence.request.params.max_tokens or 1) - len(sequence.tokens) + sequence.prompt_tokens
        if len(forced) < 2 or len(forced) >= room or sequence.request.params.logprobs is not None:
            return
        self.scheduler.force(sequence, forced, self.clock())
        for token in forced:
            stream.constraint.accept(token)
        text = "".join(stream.text.push(token) for token in forced)
        self.counters.generated_tokens += len(forced)
        self.counters.forced_tokens += len(forced)
        if stream.text.stopped:
            self.scheduler.finish(sequence, FinishReason.STOP)
            self._close(stream, text, tuple(forced))
        else:
            stream.sink(Delta(text, tuple(forced)))

    def _close(
        self,
        stream: _Stream,
        text: str,
        tokens: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprob, ...] = (),
    ) -> None:
        """The last delta of a request: what was held back, the reason, the figures."""
        sequence = stream.sequence
        text += stream.text.finish()
        if stream.text.stopped and sequence.finish_reason is FinishReason.LENGTH:
            sequence.finish_reason = FinishReason.STOP
        self._forget(stream)
        if self.persistence is not None:
            self.persistence.save(sequence.tokens[:-1], sequence.request.adapter)
        self.counters.finished += 1
        self.counters.cached_tokens += sequence.cached_tokens
        stream.sink(
            Delta(
                text,
                tokens,
                logprobs,
                sequence.finish_reason,
                self._metrics(sequence),
                stopped_by=stream.text.stop,
            )
        )

    def _metrics(self, sequence: Running) -> Metrics:
        first = sequence.first_token_s
        return Metrics(
            prompt_tokens=sequence.prompt_tokens,
            cached_tokens=sequence.cached_tokens,
            completion_tokens=len(sequence.tokens) - sequence.prompt_tokens,
            time_to_first_token_s=None if first is None else first - sequence.arrived_s,
            total_s=self.clock() - sequence.arrived_s,
            preemptions=sequence.preemptions,
        )

    def _forget(self, stream: _Stream) -> None:
        del self._streams[stream.sequence.request.id]
        del self._of[stream.sequence]
        if stream.sequence.request.adapter is not None:
            self.adapters.tidy()

    def _users_of(self, digest: str) -> int:
        return sum(s.sequence.request.adapter == digest for s in self._streams.values())

    def _expire(self) -> None:
        now = self.clock()
        late = [s for s in self._streams.values() if s.deadline_s is not None and now > s.deadline_s]
        for stream in late:
            self.cancel(stream.sequence.request.id)

    # -- when a step fails ---------------------------------------------------------------------------------

    def _recover(self, error: Exception) -> None:
        """Fail the requests of the steps on their way, or shed the largest one if memory ran out.

        Raises EngineStopped, if that is what the step raised: nothing can be computed any more.
        """
        if isinstance(error, EngineStopped):
            raise error
        self._pending.clear()
        touched = self.scheduler.abandon()
        self.runner.forget()
        if _out_of_memory(error) and touched:
            touched = [max(touched, key=lambda sequence: len(sequence.tokens))]
        for sequence in touched:
            self._fail(sequence, error)
        name = type(error).__name__
        self.counters.errors[name] = self.counters.errors.get(name, 0) + 1

    def _fail(self, sequence: Running, error: Exception) -> None:
        stream = self._of.get(sequence)
        if stream is None:
            return
        self.scheduler.finish(sequence, FinishReason.ERROR)
        self._forget(stream)
        self.counters.failed += 1
        stream.sink(self._explained(sequence, error))

    def _explained(self, sequence: Running, error: Exception) -> MlxServeError:
        if isinstance(error, MlxServeError):
            return error
        if not _out_of_memory(error):
            return EngineFailed(f"A step of the engine failed ({type(error).__name__}: {error}); try again.")
        held = len(sequence.tokens)
        return DoesNotFit(
            f"Memory ran out while {held} tokens of this request were held; it was the largest. "
            "Ask for less, or give the cache a smaller share.",
            needed_bytes=self.bytes_per_token * held,
            available_bytes=mx.get_active_memory(),
        )

    def embed(self, batch: list[list[int]], adapter: str | None = None) -> list[list[float]]:
        """The mean of the trunk's last hidden states of each sequence, scaled to length 1."""
        digest = None if adapter is None else self.adapters.digest(adapter)
        if not isinstance(self.runner.model, PagedModel):
            raise Unsupported(f"{self.loaded.name} gives no embeddings: its layers cannot be read apart.")
        for ids in batch:
            if not 0 < len(ids) <= self.loaded.context:
                raise PromptTooLong(
                    f"The input has {len(ids)} tokens; it may have 1 to {self.loaded.context}.",
                    needed=len(ids),
                    limit=self.loaded.context,
                )
        return [self.runner.embed(ids, digest) for ids in batch]

    # -- set-up and figures ----------------------------------------------------------------------------------

    def _notes(self) -> list[str]:
        """What a person should know of how this model is served."""
        notes = []
        if self.way == SOLO:
            notes.append(f"Requests are served one at a time and share no prefixes: {self.reason}.")
        if self.config.kv_bits != 16 and self.way == SOLO:
            notes.append(f"The cache stays in 16 bits: {self.loaded.name} is not paged.")
        if self.config.cache_dir is not None and not self.can_persist:
            notes.append(
                "Nothing is kept on disk: the model's own cache has no pages, or prefixes are not cached."
            )
        if self.kept_whole and self.config.kv_bits != 16:
            notes.append(
                f"{self.kept_whole} of the layers keep their cache in 16 bits: "
                f"groups of {self.config.kv_group_size} do not divide the width of their keys or values."
            )
        return notes

    def _open_disk(self) -> Persistence | None:
        if self.config.cache_dir is None or not self.can_persist:
            return None
        from mlxserve.engine.persist import BLOCK_PAGES, Persistence

        form = f"{self.loaded.digest}:{self.way}:{self.config.kv_bits}:{self.config.kv_group_size}"
        fingerprint = f"{form}:{self.config.page_size}:{self.loaded.dtype}"
        disk = DiskTier(
            self.config.cache_dir,
            self.config.cache_dir_bytes,
            fingerprint,
            BLOCK_PAGES * self.config.page_size,
        )
        assert isinstance(self.runner.model, PagedModel)
        self.scheduler.cache.block_tokens = disk.block_tokens
        return Persistence(disk, self.scheduler.cache, self.runner.model)

    @property
    def can_persist(self) -> bool:
        """Prefixes can go to disk where they lie in pages and slots of state."""
        return self.config.prefix_cache and bool(self.memory.groups or self.memory.state_slots)

    def close(self) -> None:
        """Write what is still to go to disk; let other ranks go."""
        if self.persistence is not None:
            self.persistence.close()
        self.runner.close()

    def _plan_memory(self) -> Memory:
        self._sizes: Sizes | None = None
        self.kept_whole = 0
        if self.way == SOLO:
            return Memory((), 0, self.loaded.context)
        self._sizes = measure(self.loaded.model, self.way, self.config)
        self.kept_whole = self._sizes.kept_whole
        free = machine_budget() - mx.get_active_memory()
        return plan_memory(self._sizes, self.config, self.loaded.context, free)

    def _make_runner(self, ranks: Ranks | None) -> Runner:
        """The runner; with several ranks, one that has as much room as all of them have."""
        limits = Limits(tuple(spec.pages for spec in self.memory.groups), self.memory.state_slots)
        context = self.loaded.context
        if ranks is None:
            return make_runner(self.loaded.model, self.way, self.config, context=context, limits=limits)
        limits = ranks.agree(self.way, context, self.config, limits)
        groups = tuple(replace(spec, pages=n) for spec, n in zip(self.memory.groups, limits.pages))
        self.memory = replace(self.memory, groups=groups, state_slots=limits.state_slots)
        return ranks.make_runner(self.loaded.model, self.way, self.config, context=context, limits=limits)

    def limit_cache(self, limit_bytes: int) -> None:
        """Let pages and recurrent state take `limit_bytes` together from now on, between two steps.

        Less than now evicts cached prefixes, and running requests whose pages go start anew; what is more
        is taken on demand. Room for the longest request that is here stays, and the slots of state do.
        Where several ranks hold the model, what they agreed on stays too.
        """
        if self._sizes is None or not self.memory.groups or self._shared:
            return
        budget = limit_bytes - self.memory.state_slots * self._sizes.slot_bytes
        groups = page_groups(self._sizes, self.config, self.loaded.context, budget)
        self.scheduler.resize(tuple(spec.pages for spec in groups))
        self.memory = self.scheduler.memory
        self.runner.resize(Limits(tuple(spec.pages for spec in self.memory.groups), self.memory.state_slots))

    @property
    def bytes_per_token(self) -> int:
        """Bytes of K/V that one more token of a sequence takes."""
        return sum(self.memory.page_bytes) // self.config.page_size

    def stats(self) -> dict[str, Any]:
        """Figures of now and since the start; bytes, tokens, seconds as named."""
        scheduler, counters, tree = self.scheduler, self.counters, self.scheduler.tree.stats
        total = sum(pool.total for pool in scheduler.pools)
        return {
            "queue": len(scheduler.waiting),
            "running": len(scheduler.running),
            "pages_total": total,
            "pages_free": sum(pool.free for pool in scheduler.pools),
            "pages_cached": sum(pool.idle for pool in scheduler.pools),
            "prefix_lookup_tokens": tree.lookup_tokens,
            "prefix_hit_tokens": tree.hit_tokens,
            "prefix_hit_rate": tree.hit_tokens / tree.lookup_tokens if tree.lookup_tokens else 0.0,
            "generated_tokens": counters.generated_tokens,
            "forced_tokens": counters.forced_tokens,
            "prompt_tokens": counters.prompt_tokens,
            "tokens_per_s": counters.generated_tokens / counters.busy_s if counters.busy_s else 0.0,
            "preemptions": scheduler.preemptions,
            "steps": counters.steps,
            "finished": counters.finished,
            "failed": counters.failed,
            "disk_hits": 0 if self.persistence is None else self.persistence.disk.hits,
            "kv_bytes": self.runner.model.nbytes,
            "kv_limit_bytes": sum(p.total * b for p, b in zip(scheduler.pools, self.memory.page_bytes)),
            "weight_bytes": self.loaded.weight_bytes,
            "adapter_bytes": self.adapters.stack.nbytes,
            "peak_bytes": mx.get_peak_memory(),
            "way": self.way,
        }


def _random_seed() -> int:
    return random.SystemRandom().getrandbits(63)


def _out_of_memory(error: Exception) -> bool:
    text = str(error).lower()
    return isinstance(error, MemoryError) or any(
        word in text for word in ("out of memory", "malloc", "bad_alloc", "insufficient memory")
    )
