"""A rank other than 0: it carries out the batches it is sent, until it is told to stop.

Knows: frames, its runner, its neighbours. Does not know requests, the scheduler or text.

A step is started as soon as its frame is here, while the device is still busy with the one before; a
thread of its own waits for a step's end and says so. If anything goes wrong, rank 0 is told why and
`serve_rank` raises.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Any

import mlx.core as mx

from mlxserve.distributed import collective
from mlxserve.distributed.adapters import FollowerAdapters
from mlxserve.distributed.channel import Channel, Frame
from mlxserve.distributed.frames import (
    DIGEST_BYTES,
    Diverged,
    Kind,
    Ledger,
    Room,
    Start,
    decode_batch,
    decode_ids,
    decode_masks,
    decode_room,
    decode_start,
    encode_error,
    encode_plain,
    encode_tokens,
)
from mlxserve.distributed.handover import Outbox, Part, placeholders, unpack
from mlxserve.distributed.rank import RankContext
from mlxserve.distributed.runners import StageRunner, TensorRunner
from mlxserve.engine.memory import bound_mlx, machine_budget, measure, plan_memory
from mlxserve.engine.runner import Drawn, Limits, Runner, make_runner
from mlxserve.errors import EngineStopped, MlxServeError
from mlxserve.models.load import LoadedModel
from mlxserve.models.step import SOLO


def serve_rank(context: RankContext, loaded: LoadedModel, stage: Part | None = None) -> None:
    """Carry out rank 0's batches on this thread, which owns MLX; returns when rank 0 says stop.

    loaded: this rank's part of the model; `stage` its handle, of a pipeline. Raises PeerLost when a rank
    it talks to goes away, Diverged when the batches do not follow each other, and whatever a step raises.
    """
    assert context.control is not None
    follower = Follower(context, loaded, stage)
    try:
        follower.run()
    except BaseException as error:
        with suppress(MlxServeError):
            context.control.send(Kind.FAILED, follower.step, encode_error(error))
        raise


class Follower:
    """One rank's loop. step: the last one begun."""

    def __init__(self, context: RankContext, loaded: LoadedModel, stage: Part | None) -> None:
        assert context.control is not None
        self.step = 0
        self._context = context
        self._control: Channel = context.control
        self._loaded = loaded
        self._stage = stage
        self._ledger = Ledger()
        self._adapters = FollowerAdapters(context, loaded)
        self._outbox = Outbox(self._failed)

    def run(self) -> None:
        """From the first frame to the last."""
        bound_mlx()
        try:
            self._serve(self._prepare(decode_start(self._expect(Kind.START).payload)))
        except BaseException:
            self._outbox.abandon()
            raise
        self._outbox.close()
        self._control.send(Kind.STOP, self.step)

    # -- before the first step ---------------------------------------------------------------------------

    def _prepare(self, start: Start) -> Runner:
        """Say what fits here, hear what was agreed, and build the runner."""
        group = self._context.group
        collective.prepare(group, start.gathered_bytes)
        self._control.send(Kind.MEMORY, 0, encode_plain(self._room(start)))
        agreed = decode_room(self._expect(Kind.MEMORY).payload)
        kind: Any
        if self._stage is not None:
            kind = partial(StageRunner, stage=self._stage)
        else:
            assert group is not None, "a tensor split needs MLX's group of all ranks"
            kind = partial(TensorRunner, group=group)
        limits = Limits(agreed.pages, agreed.state_slots)
        runner = make_runner(
            self._loaded.model, start.way, start.config, context=start.context, limits=limits, kind=kind
        )
        runner.take_adapters(self._adapters.stack, self._adapters.id_of)
        return runner

    def _room(self, start: Start) -> Room:
        if start.way == SOLO:
            return Room((), 0)
        if self._stage is not None:
            self._stage.hand_in(placeholders(start.handed))
        sizes = measure(self._loaded.model, start.way, start.config)
        free = (machine_budget() - mx.get_active_memory()) // self._context.sharing
        memory = plan_memory(sizes, start.config, start.context, free)
        return Room(tuple(spec.pages for spec in memory.groups), memory.state_slots)

    # -- steps -------------------------------------------------------------------------------------------

    def _serve(self, runner: Runner) -> None:
        while (frame := self._control.receive()).kind != Kind.STOP:
            if frame.kind == Kind.BATCH:
                self._carry_out(runner, frame)
            elif frame.kind == Kind.EMBED:
                self._embed(runner, frame)
            elif frame.kind == Kind.ADAPTER:
                self._take_adapter(frame)
            elif frame.kind == Kind.ADOPT:
                self._adapters.adopt()
            elif frame.kind == Kind.DROP:
                self._adapters.drop(frame.payload.decode())
            else:
                raise EngineStopped(f"Rank 0 sent a frame of kind {frame.kind}, which has no place here.")

    def _carry_out(self, runner: Runner, frame: Frame) -> None:
        """Start one step; its end is told by the outbox."""
        body = self._ledger.expect(frame.step, frame.payload, self._context.rank)
        digest = bytes(frame.payload[:DIGEST_BYTES])
        batch = decode_batch(frame.step, body)
        self.step = batch.step
        if isinstance(runner, StageRunner):
            self._take_over(runner, batch.step)
        forward = runner.forward(batch)
        if isinstance(runner, StageRunner) and not runner.stage.last:
            self._hand_over(runner, batch.step, digest)
            return
        masks = {}
        if isinstance(runner, StageRunner) and len(forward.slots):
            masks = decode_masks(self._expect(Kind.MASKS, batch.step).payload)
        drawn = runner.draw(forward, masks)
        waits = [_marker(runner)] if drawn.tokens is None else [drawn.tokens]
        kind = Kind.DONE if self._stage is None else Kind.TOKENS
        self._outbox.put(waits, partial(self._finish, kind, drawn, digest))

    def _finish(self, kind: Kind, drawn: Drawn, digest: bytes) -> None:
        """On the outbox's thread: the step is complete."""
        step = drawn.batch.step
        if kind == Kind.TOKENS:
            self._control.send(kind, step, digest, encode_tokens(drawn.read(), drawn.read_logprobs()))
        else:
            self._control.send(kind, step, digest)
        self._context.on_step(step)

    def _take_over(self, runner: StageRunner, number: int) -> None:
        """Wait for the hidden states of a step or an embedding."""
        assert self._context.before is not None
        frame = self._context.before.receive()
        if frame.kind != Kind.HIDDEN or frame.step != number:
            raise Diverged(
                f"Rank {self._context.before.rank} handed over step {frame.step} where {number} was due.",
                rank=self._context.before.rank,
            )
        runner.give(unpack(frame.payload))

    def _hand_over(self, runner: StageRunner, number: int, digest: bytes | None) -> None:
        """Send hidden states on when they are there; with a digest, the step is then complete here."""
        packed, after = runner.packed, self._context.after
        assert packed is not None and after is not None

        def send() -> None:
            after.send(Kind.HIDDEN, number, *packed.parts())
            if digest is not None:
                self._control.send(Kind.DONE, number, digest)
                self._context.on_step(number)

        self._outbox.put(packed.bodies, send)

    def _embed(self, runner: Runner, frame: Frame) -> None:
        ids, adapter = decode_ids(frame.payload)
        if not isinstance(runner, StageRunner):
            runner.embed(ids, adapter)
            return
        self._take_over(runner, frame.step)
        vector = runner.embedding(ids, adapter)
        if runner.stage.last:
            self._outbox.put(
                [vector], lambda: self._control.send(Kind.VECTOR, frame.step, encode_plain(vector.tolist()))
            )
        else:
            self._hand_over(runner, frame.step, None)

    def _take_adapter(self, frame: Frame) -> None:
        try:
            elsewhere = self._adapters.take(frame.payload, frame.step)
        except MlxServeError as error:
            self._control.send(Kind.REFUSED, 0, encode_error(error))
            return
        if elsewhere is not None:
            self._control.send(Kind.ADAPTER, 0, encode_plain(elsewhere))

    # -- frames --------------------------------------------------------------------------------------------

    def _expect(self, kind: Kind, step: int = 0) -> Frame:
        frame = self._control.receive()
        if frame.kind != kind or frame.step != step:
            raise EngineStopped(f"Rank 0 sent a frame of kind {frame.kind} where {kind.name} was due.")
        return frame

    def _failed(self, error: BaseException) -> None:
        """On the outbox's thread: tell rank 0 at once, the loop may be waiting for a frame."""
        with suppress(MlxServeError):
            self._control.send(Kind.FAILED, self.step, encode_error(error))


def _marker(runner: Runner) -> mx.array:
    """A small array that is there when everything the step writes is; it holds none of it."""
    marker = mx.depends(mx.array(0), runner.model.arrays())
    mx.async_eval(marker)
    return marker
