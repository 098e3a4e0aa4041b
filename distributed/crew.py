"""The other ranks as rank 0 sees them: what is sent to all, and what comes back.

Knows: control channels, frames, which steps are complete where. Does not know models, or what a batch
means.

A thread a rank listens: that a step is complete, tokens, a reply, or why the rank stops. The first failure
of any rank is kept, and every later call raises it.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from mlxserve.distributed import collective
from mlxserve.distributed.channel import Channel, Frame, PeerLost
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
    encode_batch,
    encode_plain,
)
from mlxserve.distributed.rank import RankContext
from mlxserve.engine.batch import Batch
from mlxserve.errors import EngineStopped, MlxServeError
from mlxserve.request import TokenLogprob

T = TypeVar("T")
# Ranks measure their memory before the first step; this is how long they may take, and to say goodbye.
START_TIMEOUT_S = 120.0


@dataclass(slots=True)
class Tokens:
    """What the last stage of a pipeline gives back for a step."""

    step: int
    tokens: list[int]
    logprobs: Mapping[int, TokenLogprob]


class Crew:
    """Rank 0's side of the control channels. Calls come from one thread."""

    def __init__(self, context: RankContext) -> None:
        self._context = context
        self._ledger = Ledger()
        self._digests: dict[int, bytes] = {}  # of announced steps that some rank has not completed
        self._done = {channel.rank: -1 for channel in context.followers}
        self._lock = threading.Lock()
        self._fault: EngineStopped | None = None
        self._tokens: queue.SimpleQueue[Tokens | None] = queue.SimpleQueue()
        self._replies: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()
        self._stopping = False
        self._threads: list[threading.Thread] = []

    # -- what is sent ------------------------------------------------------------------------------------

    def agree(self, start: Start, room: Room) -> Room:
        """Tell every rank how to run, and find what all of them have room for. Raises what one answers instead."""
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

    def send_all(self, kind: Kind, step: int, *parts: bytes | memoryview) -> None:
        """Send the same to every rank. Raises EngineStopped once any rank has failed."""
        self._raise_fault()
        for channel in self._context.followers:
            channel.send(kind, step, *parts)

    def stop(self) -> None:
        """Let the other ranks go, and take leave of them."""
        self._stopping = True
        for channel in self._context.followers:
            with suppress(PeerLost):
                channel.send(Kind.STOP, 0)
        for thread in self._threads:
            thread.join(START_TIMEOUT_S)

    # -- what is waited for ------------------------------------------------------------------------------

    def tokens(self, step: int) -> Tokens:
        """What the last stage drew in a step; waits for it. Raises EngineStopped if a rank fails instead."""
        found = self._wait(self._tokens, f"step {step}")
        if found.step != step:
            rank = self._context.size - 1
            raise Diverged(f"Rank {rank} did not answer step {step} when it was its turn.", rank=rank)
        return found

    def reply(self) -> Frame:
        """An answer to something that is no step."""
        return self._wait(self._replies, "a question")

    def replies(self) -> list[Frame]:
        """Every rank's answer, in no order."""
        return [self.reply() for _ in self._context.followers]

    def _wait(self, answers: queue.SimpleQueue[T | None], what: str) -> T:
        self._raise_fault()
        try:
            found = answers.get(timeout=self._context.patience_s)
        except queue.Empty:
            rank, patience_s = self._context.size - 1, self._context.patience_s
            raise PeerLost(f"Rank {rank} has not answered {what} in {patience_s:g} s.", rank=rank) from None
        if found is None:
            self._raise_fault()
        assert found is not None
        return found

    def _raise_fault(self) -> None:
        if self._fault is not None:
            raise self._fault

    # -- what comes back, on the threads that listen -------------------------------------------------------

    def _listen(self, channel: Channel) -> None:
        """One rank's words, until it leaves."""
        try:
            while (frame := channel.receive()).kind != Kind.STOP:
                if frame.kind == Kind.FAILED:
                    raise decode_error(frame.payload, channel.rank)
                if frame.kind in (Kind.DONE, Kind.TOKENS):
                    self._complete(channel.rank, frame)
                else:
                    self._replies.put(frame)
        except PeerLost as error:
            if not self._stopping:
                self.fail(channel.rank, error)
        except MlxServeError as error:
            self.fail(channel.rank, error)

    def _complete(self, rank: int, frame: Frame) -> None:
        """A rank has completed a step, with the tokens if it is a pipeline's last stage."""
        payload = memoryview(frame.payload)
        before, now = self._enter(rank, frame.step, bytes(payload[:DIGEST_BYTES]))
        if frame.kind == Kind.TOKENS:
            self._tokens.put(Tokens(frame.step, *decode_tokens(payload[DIGEST_BYTES:])))
        if now > before:
            self._context.on_step(now)

    def _enter(self, rank: int, step: int, digest: bytes) -> tuple[int, int]:
        """Up to which step every rank was done before, and is now. Raises Diverged."""
        with self._lock:
            if self._digests.get(step) != digest:
                raise Diverged(
                    f"Rank {rank} and rank 0 no longer carry out the same steps (seen at step {step}).",
                    rank=rank,
                )
            before = min(self._done.values())
            self._done[rank] = step
            now = min(self._done.values())
            for old in range(before, now + 1):
                self._digests.pop(old, None)
        return before, now

    def fail(self, rank: int, error: MlxServeError) -> None:
        """Rank `rank` is of no more use: whoever waits is woken, every later call raises. From any thread."""
        if self._fault is None:
            self._fault = error if isinstance(error, EngineStopped) else EngineStopped(str(error))
        self._tokens.put(None)
        self._replies.put(None)
        self._context.on_fault(rank, str(error))
