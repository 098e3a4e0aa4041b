"""The loop: schedule, run, commit, draw; what fails in it, and requests in and out.

Knows: how scheduler, runner and output fit together. Does not know text (output_processor.py), threads
(worker.py) or where requests come from. All calls happen on one thread, which owns MLX.

A step, with the next one built before the last one's tokens are read:

1. schedule step n + 1 (its tokens may be in flight)      scheduler.py
2. start its forward pass on the device                   runner.py
3. commit the tokens of step n, and send them on          scheduler.py, output_processor.py
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
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from mlxserve.config import EngineConfig
from mlxserve.engine.adapters import Adapters
from mlxserve.engine.failures import explained, to_fail
from mlxserve.engine.memory import bound_mlx, page_groups, plan_for
from mlxserve.engine.output_processor import OutputProcessor, Sink
from mlxserve.engine.persist import open_persistence
from mlxserve.engine.runner import Drawn, Forward, Limits, Ranks, Runner, make_runner
from mlxserve.engine.scheduler import Scheduler
from mlxserve.engine.stats import Counters, figures
from mlxserve.errors import EngineStopped, PromptTooLong, Unsupported, UsageError
from mlxserve.models.check import choose_way
from mlxserve.models.load import LoadedModel
from mlxserve.models.paged import PagedModel
from mlxserve.models.step import SOLO
from mlxserve.request import Request, SamplingParams
from mlxserve.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from mlxserve.engine.grammar import Constraint, Grammars


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
        self.memory, self.sizes = plan_for(loaded, self.way, self.config)
        make_adapters = Adapters if ranks is None else ranks.make_adapters
        self.adapters = make_adapters(loaded, self.way, lambda digest: self.output.users_of(digest))
        self.runner = self._make_runner(ranks)
        self.runner.take_adapters(self.adapters.stack, self.adapters.id_of)
        self.scheduler = Scheduler(
            self.config,
            self.memory,
            tokenizer.eos_token_ids,
            _random_seed,
            micro_batches=self.micro_batches,
        )
        cache, model = self.scheduler.cache, self.runner.model
        self.persistence = open_persistence(loaded, self.way, self.config, cache, model)
        self.counters = Counters()
        self.output = OutputProcessor(
            tokenizer, self.scheduler, self.adapters, self.persistence, self.counters, clock
        )
        self.notes = [*loaded.notes, *self._notes()]
        self._pending: deque[Drawn] = deque()
        self._last_commit_s = self._woken_s = clock()

    def _make_runner(self, ranks: Ranks | None) -> Runner:
        """The runner; with several ranks, one that has as much room as all of them have."""
        limits, context = Limits.of(self.memory), self.loaded.context
        if ranks is None:
            return make_runner(self.loaded.model, self.way, self.config, context=context, limits=limits)
        limits = ranks.agree(self.way, context, self.config, limits)
        groups = tuple(replace(spec, pages=n) for spec, n in zip(self.memory.groups, limits.pages))
        self.memory = replace(self.memory, groups=groups, state_slots=limits.state_slots)
        return ranks.make_runner(self.loaded.model, self.way, self.config, context=context, limits=limits)

    # -- the loop ----------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._pending)

    def step(self) -> None:
        """One step. An exception in it fails the requests it touched; the others go on."""
        started = self.clock()
        for request_id in self.output.late(started):
            self.cancel(request_id)
        try:
            self._advance()
        except Exception as error:
            self._recover(error)
        if self.persistence is not None and not self.has_work:
            self.persistence.flush()
        self.counters.busy_s += self.clock() - started
        if self.config.check and not self.has_work:
            self.scheduler.check()

    def _advance(self) -> None:
        """The four parts of a step, as they are numbered above."""
        if self.micro_batches:
            self._fill_pipeline()
            self._commit_oldest()
            return
        batch = self.scheduler.schedule()
        forward = self.runner.forward(batch) if batch is not None else None
        self._commit_oldest()
        if forward is not None:
            self._draw(forward)
        if not self.config.overlap:
            self._commit_oldest()

    def _fill_pipeline(self) -> None:
        """Start steps over other sequences until as many are in flight as may be, or nobody is free."""
        while len(self._pending) < self.micro_batches:
            batch = self.scheduler.schedule()
            if batch is None:
                return
            self._draw(self.runner.forward(batch))

    def _draw(self, forward: Forward) -> None:
        self._pending.append(self.runner.draw(forward, self._masks(forward)))

    def _masks(self, forward: Forward) -> dict[int, np.ndarray]:
        """Packed masks of the rows under a grammar whose sequences still wait for this draw, by slot."""
        constraints = self.output.constraints(forward.slots.tolist())
        if not constraints:
            return {}
        return dict(zip(constraints, self.grammars.masks(list(constraints.values()))))

    def _commit_oldest(self) -> None:
        """Read the tokens of the oldest step in flight, and send them on."""
        if not self._pending:
            return
        drawn = self._pending.popleft()
        tokens, logprobs = drawn.read(), drawn.read_logprobs()
        now = self.clock()
        if self.persistence is not None:
            self.persistence.flush()
        self._measure(drawn, now)
        for row, sequence, token in self.scheduler.commit(drawn.batch, tokens, now):
            self.output.deliver(sequence, token, logprobs.get(row))
        self.counters.steps += 1

    def _measure(self, drawn: Drawn, now: float) -> None:
        """How long the step took, for the pace of those to come."""
        counts = [segment.count for segment in drawn.batch.segments]
        streams = counts.count(1)
        prompt_tokens = sum(counts) - streams
        self.counters.prompt_tokens += prompt_tokens
        self.scheduler.pace.record(prompt_tokens, streams, now - max(self._last_commit_s, self._woken_s))
        self._last_commit_s = now

    def wake(self) -> None:
        """Work arrived after a pause: the pause is not counted as a step's time."""
        self._woken_s = self.clock()

    def settle(self) -> None:
        """Read and deliver the tokens on their way, so that the device is free for other work."""
        try:
            while self._pending:
                self._commit_oldest()
        except Exception as error:
            self._recover(error)

    def _recover(self, error: Exception) -> None:
        """Fail the requests of the steps on their way, or shed the largest one if memory ran out.

        Raises EngineStopped, if that is what the step raised: nothing can be computed any more.
        """
        if isinstance(error, EngineStopped):
            raise error
        self._pending.clear()
        touched = self.scheduler.abandon()
        self.runner.forget()
        for sequence in to_fail(touched, error):
            self.output.fail(sequence, explained(error, len(sequence.tokens), self.bytes_per_token))
        name = type(error).__name__
        self.counters.errors[name] = self.counters.errors.get(name, 0) + 1

    # -- requests ----------------------------------------------------------------------------------------

    def add(self, request: Request, sink: Sink, constraint: Constraint | None = None) -> None:
        """Queue a request; its deltas, or one error, go to `sink`. Raises what the scheduler refuses, and
        ModelNotFound for an adapter that is not loaded.

        constraint: the request's compiled grammar, where another thread has made it (`compile_grammar`).
        """
        if request.id in self.output:
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
        sequence = self.scheduler.add(request, self.clock())
        if self.persistence is not None:
            self.persistence.restore(request.prompt, request.adapter)
        self.output.open(sequence, sink, constraint)

    def cancel(self, request_id: str) -> None:
        """End a request now; what it held is free for the next step. Unknown ids are ignored."""
        self.output.cancel(request_id)

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

    # -- the memory --------------------------------------------------------------------------------------

    def limit_cache(self, limit_bytes: int) -> None:
        """Let pages and recurrent state take `limit_bytes` together from now on, between two steps.

        Less than now evicts cached prefixes, and running requests whose pages go start anew; what is more
        is taken on demand. Room for the longest request that is here stays, and the slots of state do.
        Where several ranks hold the model, what they agreed on stays too.
        """
        if self.sizes is None or not self.memory.groups or self._shared:
            return
        budget = limit_bytes - self.memory.state_slots * self.sizes.slot_bytes
        groups = page_groups(self.sizes, self.config, self.loaded.context, budget)
        self.scheduler.resize(tuple(spec.pages for spec in groups))
        self.memory = self.scheduler.memory
        self.runner.resize(Limits.of(self.memory))

    # -- figures, and the end --------------------------------------------------------------------------------

    @property
    def bytes_per_token(self) -> int:
        """Bytes of K/V that one more token of a sequence takes."""
        return sum(self.memory.page_bytes) // self.config.page_size

    def _notes(self) -> Iterator[str]:
        """What is not as somebody may expect, a sentence each."""
        config = self.config
        if self.way == SOLO:
            yield f"Requests are served one at a time and share no prefixes: {self.reason}."
            if config.kv_bits != 16:
                yield f"The cache stays in 16 bits: {self.loaded.name} is not paged."
        if config.cache_dir is not None and self.persistence is None:
            yield "Nothing is kept on disk: the model's own cache has no pages, or prefixes are not cached."
        kept_whole = 0 if self.sizes is None else self.sizes.kept_whole
        if kept_whole and config.kv_bits != 16:
            yield (
                f"{kept_whole} of the layers keep their cache in 16 bits: "
                f"groups of {config.kv_group_size} do not divide the width of their keys or values."
            )

    def stats(self) -> dict[str, Any]:
        """Figures of now and since the start; bytes, tokens, seconds as named."""
        pools = zip(self.scheduler.pools, self.memory.page_bytes)
        return {
            **figures(self.scheduler, self.counters),
            "disk_hits": 0 if self.persistence is None else self.persistence.disk.hits,
            "kv_bytes": self.runner.model.nbytes,
            "kv_limit_bytes": sum(pool.total * page_bytes for pool, page_bytes in pools),
            "weight_bytes": self.loaded.weight_bytes,
            "adapter_bytes": self.adapters.stack.nbytes,
            "peak_bytes": mx.get_peak_memory(),
            "way": self.way,
        }

    def close(self) -> None:
        """Write what is still to go to disk; let other ranks go."""
        if self.persistence is not None:
            self.persistence.close()
        self.runner.close()


def _random_seed() -> int:
    return random.SystemRandom().getrandbits(63)
