"""Rank 0: an engine whose batches are carried out by every rank.

Knows: the engine's hook for several ranks, and what is sent when. Does not know HTTP, processes, or how
ranks were started and connected (rank.py, launch.py).

Before the first step the ranks agree on how much fits everywhere. Then each batch is announced before
this rank begins it, one step ahead of the device. Once a batch is announced nothing can be taken back, so
a failure on any rank ends the engine (EngineStopped); starting all ranks anew is the launcher's.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.nn as nn
import numpy as np

from mlxserve.config import EngineConfig
from mlxserve.distributed.adapters import RankAdapters, holding
from mlxserve.distributed.channel import Channel
from mlxserve.distributed.crew import Crew, Tokens
from mlxserve.distributed.frames import Kind, Room, Start, decode_vector, encode_masks, encode_plain
from mlxserve.distributed.handover import Outbox, Part, form_of
from mlxserve.distributed.rank import RankContext
from mlxserve.distributed.runners import StageRunner, TensorRunner
from mlxserve.engine.adapters import Adapters
from mlxserve.engine.batch import Batch
from mlxserve.engine.engine import Engine
from mlxserve.engine.runner import Drawn, Forward, Limits, Runner, make_runner
from mlxserve.errors import EngineStopped, MlxServeError, Unsupported
from mlxserve.models.load import LoadedModel
from mlxserve.request import TokenLogprob
from mlxserve.text.tokenizer import Tokenizer


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

    def make_adapters(self, loaded: LoadedModel, way: str, users: Callable[[str], int]) -> Adapters:
        """Adapters that are put on every rank's part."""
        return RankAdapters(loaded, way, users, crew=self.crew, holding=holding(self.context, loaded))

    def make_runner(self, model: nn.Module, way: str, config: EngineConfig, **settings: Any) -> Runner:
        """A runner for rank 0's part, which announces each batch to the others."""
        kind: Any = PipelineLeader
        parts: dict[str, Any] = {"stage": self.stage, "after": self.context.after}
        if self.context.split.mode == "tensor":
            kind, parts = TensorLeader, {"group": self.context.group}
        kind = partial(kind, crew=self.crew, **parts)
        return make_runner(model, way, config, **settings, kind=kind)


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

    def embed(self, ids: list[int], adapter: str | None = None) -> list[float]:
        """As in one process, with every rank's part."""
        self.crew.send_all(Kind.EMBED, 0, encode_plain((ids, adapter)))
        with _announced(0):
            return super().embed(ids, adapter)


@dataclass(slots=True)
class _Returning(Drawn):
    """Tokens that the last stage sends back."""

    crew: Crew | None = None
    answer: Tokens | None = None

    def read(self) -> list[int]:
        assert self.crew is not None
        self.answer = self.crew.tokens(self.batch.step)
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

    def embed(self, ids: list[int], adapter: str | None = None) -> list[float]:
        """As in one process, stage by stage; behind the steps that are in flight."""
        self._embeddings += 1
        self.crew.send_all(Kind.EMBED, self._embeddings, encode_plain((ids, adapter)))
        with _announced(0):
            self.embedding(ids, adapter)
            self._hand_over(self._embeddings)
        return decode_vector(self.crew.reply().payload)

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
