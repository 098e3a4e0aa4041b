"""Rank 0: an engine whose batches are carried out by every rank.

Knows: the engine's hook for several ranks, and what is sent when. Does not know HTTP, processes, or how
ranks were started and connected (rank.py, launch.py).

Before the first step the ranks agree on how much fits everywhere. Then each batch is announced before
this rank begins it, one step ahead of the device. A thread a rank listens for what comes back: that a
step is complete, tokens, or why a rank stops. Once a batch is announced nothing can be taken back, so a
failure on any rank ends the engine (EngineStopped); starting all ranks anew is the launcher's.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.nn as nn
import numpy as np

from mlxserve.config import EngineConfig
from mlxserve.distributed import collective
from mlxserve.distributed.channel import Channel, PeerLost
from mlxserve.distributed.frames import (
    DIGEST_BYTES,
    Diverged,
    Kind,
    Ledger,
    Room,
    Start,
    decode_error,
    decode_room,
    decode_tokens,
    decode_vector,
    encode_batch,
    encode_masks,
    encode_plain,
)
from mlxserve.distributed.handover import Outbox, Part, form_of
from mlxserve.distributed.rank import RankContext
from mlxserve.distributed.runners import StageRunner, TensorRunner
from mlxserve.engine.batch import Batch
from mlxserve.engine.engine import Engine
from mlxserve.engine.runner import Drawn, Forward, Limits, Runner, make_runner
from mlxserve.errors import EngineStopped, MlxServeError, Unsupported
from mlxserve.models.load import LoadedModel
from mlxserve.request import TokenLogprob
from mlxserve.text.tokenizer import Tokenizer

# Ranks measure their memory before the first step; this is how long they may take.
START_TIMEOUT_S = 120.0


def leader_engine(
    context: RankContext,
    loaded: LoadedModel,
    tokenizer: Tokenizer,
    config: EngineConfig,
    *,
    stage: Part | None = None,
    micro_batches: int | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Engine:
    """The engine of rank 0, on the thread that owns MLX; the others run `follower.serve_rank`.

    loaded: this rank's part of the model; `stage` its handle, of a pipeline. micro_batches: steps of a
    pipeline in flight at once, as many as stages unless told otherwise. Raises Unsupported for settings
    that hold for one process only, and what a rank answers while the ranks agree on their memory.
    """
    if config.cache_dir is not None:
        raise Unsupported(
            "A cache on disk holds the pages of one process; leave --cache-dir away with several ranks.",
            param="cache_dir",
        )
    if context.size == 1:
        return Engine(loaded, tokenizer, config, clock=clock)
    ranks = LeadingRanks(context, stage, micro_batches)
    try:
        return Engine(loaded, tokenizer, config, clock=clock, ranks=ranks)
    except BaseException:
        ranks.crew.stop()
        raise


class LeadingRanks:
    """The engine's `Ranks`: makes a runner that has every rank carry out each batch."""

    def __init__(self, context: RankContext, stage: Part | None, micro_batches: int | None) -> None:
        pipeline = context.split.mode == "pipeline"
        self.context = context
        self.stage = stage
        self.micro_batches = (micro_batches or context.size) if pipeline else 0
        self.crew = Crew(context)

    def agree(self, way: str, context: int, config: EngineConfig, limits: Limits) -> Limits:
        """What all ranks have room for. Raises what a rank answers instead."""
        handed = form_of(self.stage.hand_out()) if self.stage is not None else []
        # What this stage hands on is known since the engine measured its pages.
        start = Start.of(way, context, config, handed, self.context.gathered_bytes)
        room = self.crew.agree(start, Room(limits.pages, limits.state_slots))
        return Limits(room.pages, room.state_slots)

    def make_runner(
        self, model: nn.Module, way: str, config: EngineConfig, *, context: int, limits: Limits
    ) -> Runner:
        """A runner for rank 0's part, which announces each batch to the others."""
        kind: Any = PipelineLeader
        parts: dict[str, Any] = {"stage": self.stage, "after": self.context.after}
        if self.context.split.mode == "tensor":
            kind, parts = TensorLeader, {"group": self.context.group}
        kind = partial(kind, crew=self.crew, **parts)
        return make_runner(model, way, config, context=context, limits=limits, kind=kind)


@dataclass(slots=True)
class _Answer:
    """What the last stage gives back for a step or an embedding."""

    step: int
    tokens: list[int]
    logprobs: Mapping[int, TokenLogprob]
    vector: list[float]


class Crew:
    """The other ranks, as rank 0 sees them."""

    def __init__(self, context: RankContext) -> None:
        self._context = context
        self._ledger = Ledger()
        self._digests: dict[int, bytes] = {}  # of announced steps that some rank has not completed
        self._done = {channel.rank: -1 for channel in context.followers}
        self._lock = threading.Lock()
        self._fault: EngineStopped | None = None
        self._answers: queue.SimpleQueue[_Answer | None] = queue.SimpleQueue()
        self._stopping = False
        self._threads: list[threading.Thread] = []

    # -- before the first step ---------------------------------------------------------------------------

    def agree(self, start: Start, room: Room) -> Room:
        """Tell every rank how to run, and find what all of them have room for."""
        self.send_all(Kind.START, 0, encode_plain(start))
        collective.prepare(self._context.group, start.gathered_bytes)
        for channel in self._context.followers:
            frame = channel.receive(START_TIMEOUT_S)
            if frame.kind == Kind.FAILED:
                raise decode_error(frame.payload, channel.rank)
            room = room.least(decode_room(frame.payload))
        self.send_all(Kind.MEMORY, 0, encode_plain(room))
        for channel in self._context.followers:
            thread = threading.Thread(
                target=self._listen, args=(channel,), name=f"mlxserve-rank-{channel.rank}", daemon=True
            )
            thread.start()
            self._threads.append(thread)
        return room

    # -- steps -------------------------------------------------------------------------------------------

    def announce(self, batch: Batch) -> None:
        """Send a batch to every rank. Raises EngineStopped once any rank has failed."""
        body = encode_batch(batch)
        digest = self._ledger.enter(batch.step, body)
        with self._lock:
            self._digests[batch.step] = digest
        self.send_all(Kind.BATCH, batch.step, digest, body)

    def send_last(self, kind: Kind, step: int, body: bytes) -> None:
        """Send something to the last rank alone."""
        self._raise_fault()
        self._context.followers[-1].send(kind, step, body)

    def send_all(self, kind: Kind, step: int, *parts: bytes) -> None:
        """Send the same to every rank. Raises EngineStopped once any rank has failed."""
        self._raise_fault()
        for channel in self._context.followers:
            channel.send(kind, step, *parts)

    def answer(self, step: int) -> _Answer:
        """What the last stage gives for a step; waits for it. Raises EngineStopped instead, if a rank fails."""
        try:
            found = self._answers.get(timeout=self._context.patience_s)
        except queue.Empty:
            raise PeerLost(
                f"Rank {self._context.size - 1} has not answered step {step} in {self._context.patience_s:g} s.",
                rank=self._context.size - 1,
            ) from None
        self._raise_fault()
        if found is None or found.step != step:
            raise Diverged(
                f"Rank {self._context.size - 1} did not answer step {step} when it was its turn.",
                rank=self._context.size - 1,
            )
        return found

    def stop(self) -> None:
        """Let the other ranks go, and take leave of them."""
        self._stopping = True
        for channel in self._context.followers:
            with suppress(PeerLost):
                channel.send(Kind.STOP, 0)
        for thread in self._threads:
            thread.join(START_TIMEOUT_S)

    def _raise_fault(self) -> None:
        if self._fault is not None:
            raise self._fault

    # -- what comes back -----------------------------------------------------------------------------------

    def _listen(self, channel: Channel) -> None:
        """One rank's answers, until it leaves."""
        try:
            while True:
                frame = channel.receive()
                if frame.kind == Kind.STOP:
                    return
                if frame.kind == Kind.FAILED:
                    raise decode_error(frame.payload, channel.rank)
                if frame.kind == Kind.VECTOR:
                    self._answers.put(_Answer(frame.step, [], {}, decode_vector(frame.payload)))
                else:
                    self._complete(channel.rank, frame.kind, frame.step, memoryview(frame.payload))
        except PeerLost as error:
            if not self._stopping:
                self.fail(channel.rank, error)
        except MlxServeError as error:
            self.fail(channel.rank, error)

    def _complete(self, rank: int, kind: int, step: int, payload: memoryview) -> None:
        """A rank has completed a step, with the tokens if it is the last stage."""
        with self._lock:
            if self._digests.get(step) != bytes(payload[:DIGEST_BYTES]):
                raise Diverged(
                    f"Rank {rank} and rank 0 no longer carry out the same steps (seen at step {step}).",
                    rank=rank,
                )
            before = min(self._done.values())
            self._done[rank] = step
            everywhere = min(self._done.values())
            for old in range(before, everywhere + 1):
                self._digests.pop(old, None)
        if kind == Kind.TOKENS:
            tokens, logprobs = decode_tokens(payload[DIGEST_BYTES:])
            self._answers.put(_Answer(step, tokens, logprobs, []))
        if everywhere > before:
            self._context.on_step(everywhere)

    def fail(self, rank: int, error: MlxServeError) -> None:
        """Rank `rank` is of no more use; the next call that needs it raises. From any thread."""
        if self._fault is None:
            self._fault = error if isinstance(error, EngineStopped) else EngineStopped(str(error))
        self._answers.put(None)
        self._context.on_fault(rank, str(error))


@contextmanager
def _announced(step: int) -> Iterator[None]:
    """Inside, the other ranks have gone on: whatever is raised here ends the engine."""
    try:
        yield
    except EngineStopped:
        raise
    except Exception as error:
        raise _no_way_back(step, error) from error


def _no_way_back(step: int | None, error: BaseException | None) -> EngineStopped:
    at = "" if step is None else f" {step}"
    return EngineStopped(
        f"Step{at} failed on rank 0 ({type(error).__name__}: {error}) while the other ranks carried it out."
    )


class _Leading(Runner):
    """What both kinds of leaders share."""

    crew: Crew

    def forget(self) -> None:
        """Raises EngineStopped: what the other ranks have computed cannot be taken back."""
        error = sys.exception()
        raise _no_way_back(None, error) from error

    def close(self) -> None:
        """Let the other ranks go."""
        self.crew.stop()


class TensorLeader(TensorRunner, _Leading):
    """Rank 0 of a tensor split."""

    def __init__(self, model: Any, *, crew: Crew, **settings: Any) -> None:
        super().__init__(model, **settings)
        self.crew = crew

    def forward(self, batch: Batch) -> Forward:
        """Start a step on every rank."""
        self.crew.announce(batch)
        with _announced(batch.step):
            return super().forward(batch)

    def draw(self, forward: Forward, masks: dict[int, np.ndarray]) -> Drawn:
        """Draw the step's tokens, and hand them to every rank."""
        with _announced(forward.batch.step):
            return super().draw(forward, masks)

    def embed(self, ids: list[int]) -> list[float]:
        """As in one process, with every rank's part."""
        self.crew.send_all(Kind.EMBED, 0, encode_plain(ids))
        with _announced(0):
            return super().embed(ids)


@dataclass(slots=True)
class _Returning(Drawn):
    """Tokens that the last stage sends back."""

    crew: Crew | None = None
    answer: _Answer | None = None

    def read(self) -> list[int]:
        assert self.crew is not None
        self.answer = self.crew.answer(self.batch.step)
        return self.answer.tokens

    def read_logprobs(self) -> dict[int, TokenLogprob]:
        return {} if self.answer is None else dict(self.answer.logprobs)


class PipelineLeader(StageRunner, _Leading):
    """The first stage of a pipeline."""

    def __init__(self, model: Any, *, crew: Crew, after: Channel, **settings: Any) -> None:
        super().__init__(model, **settings)
        self.crew = crew
        self._after = after
        self._outbox = Outbox(self._failed)
        self._embeddings = 0

    def forward(self, batch: Batch) -> Forward:
        """Start a step on every rank; the hidden states go out when they are there."""
        self.crew.announce(batch)
        with _announced(batch.step):
            forward = super().forward(batch)
            self._hand_over(batch.step)
            return forward

    def draw(self, forward: Forward, masks: dict[int, np.ndarray]) -> Drawn:
        """Have the last stage draw; its tokens come back when they are read."""
        if len(forward.slots):
            self.crew.send_last(Kind.MASKS, forward.batch.step, encode_masks(masks))
        return _Returning(forward.batch, None, None, self.crew)

    def embed(self, ids: list[int]) -> list[float]:
        """As in one process, stage by stage. No step may be in flight."""
        self._embeddings += 1
        self.crew.send_all(Kind.EMBED, self._embeddings, encode_plain(ids))
        with _announced(0):
            self.embedding(ids)
            self._hand_over(self._embeddings)
        return self.crew.answer(self._embeddings).vector

    def close(self) -> None:
        """Let the other ranks go."""
        self._outbox.close()
        super().close()

    def _hand_over(self, number: int) -> None:
        packed = self.packed
        assert packed is not None
        self._outbox.put(packed.bodies, lambda: self._after.send(Kind.HIDDEN, number, *packed.parts()))

    def _failed(self, error: BaseException) -> None:
        self.crew.fail(1, error if isinstance(error, MlxServeError) else _no_way_back(None, error))
