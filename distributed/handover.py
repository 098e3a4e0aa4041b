"""From one stage of a pipeline to the next: hidden states out, hidden states in, and a thread that sends.

Knows: a stage's handle, arrays, a channel. Does not know batches or who decides what runs.

    payload of a HIDDEN frame    u32 length of the head | head | bytes of every array, one after another
    head                         for each call of the definition: (dtype, shape) of each array it handed out

A step is one call of the definition or, where segments run apart, several; the next stage makes the same
calls in the same order, so their hidden states are taken from a queue.
"""

from __future__ import annotations

import queue
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
import msgspec
import numpy as np

from mlxserve.errors import EngineStopped

Calls = list[list[mx.array]]
_HEAD_LENGTH = struct.Struct("<I")
_Head = list[list[tuple[str, list[int]]]]
_decode_head = msgspec.msgpack.Decoder(_Head).decode
# Steps whose results wait to be sent; a stage that is further ahead waits.
MOST_WAITING = 16


class Part(Protocol):
    """A stage's handle, as stages.py makes it; its model's own call does the rest."""

    @property
    def first(self) -> bool: ...

    @property
    def last(self) -> bool: ...

    def hand_in(self, arrays: Sequence[mx.array]) -> None:
        """What the next call takes in place of what the stage before would have computed."""

    def hand_out(self) -> list[mx.array]:
        """What the last call has for the next stage."""


class StageCall:
    """Stands where a model is called, and hands its stage each call's hidden states.

    given: what the calls to come take in, in their order. handed: what the calls since `take` gave out.
    """

    def __init__(self, model: nn.Module, stage: Part) -> None:
        self.model = model
        self.stage = stage
        self.given: deque[list[mx.array]] = deque()
        self.handed: Calls = []

    def __call__(self, ids: mx.array, cache: Any = None) -> mx.array:
        if not self.stage.first:
            self.stage.hand_in(self.given.popleft())
        logits = self.model(ids, cache=cache)
        if not self.stage.last:
            self.handed.append(self.stage.hand_out())
        return logits

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def take(self) -> Calls:
        """What was handed out since the last time."""
        handed, self.handed = self.handed, []
        return handed


class Packed:
    """Hidden states on their way out: `head`, and `bodies`, arrays of bytes that may still be computed."""

    def __init__(self, calls: Calls) -> None:
        head = msgspec.msgpack.encode([form_of(arrays) for arrays in calls])
        self.head = _HEAD_LENGTH.pack(len(head)) + head
        self.bodies = [
            mx.contiguous(a).reshape(-1).view(mx.uint8) for arrays in calls for a in arrays if a.size
        ]

    def parts(self) -> list[bytes | memoryview]:
        """The frame's payload; waits for the arrays."""
        mx.eval(self.bodies)
        return [self.head, *(memoryview(body) for body in self.bodies)]  # type: ignore[arg-type]


def unpack(payload: bytearray) -> Calls:
    """What `Packed` was given, as new arrays."""
    (length,) = _HEAD_LENGTH.unpack_from(payload)
    at = _HEAD_LENGTH.size + length
    calls: Calls = []
    for arrays in _decode_head(memoryview(payload)[_HEAD_LENGTH.size : at]):
        calls.append([])
        for name, shape in arrays:
            dtype = getattr(mx, name)
            count = int(np.prod(shape, dtype=np.int64)) * dtype.size
            flat = mx.array(np.frombuffer(payload, np.uint8, count, at))
            calls[-1].append(flat.view(dtype).reshape(shape))
            at += count
    return calls


def form_of(arrays: Sequence[mx.array]) -> list[tuple[str, list[int]]]:
    """Each array's dtype, by name, and shape."""
    return [(str(a.dtype).removeprefix("mlx.core."), list(a.shape)) for a in arrays]


def placeholders(form: Sequence[tuple[str, list[int]]]) -> list[mx.array]:
    """Zeros of a form, to learn shapes with."""
    return [mx.zeros(shape, getattr(mx, name)) for name, shape in form]


class Outbox:
    """A thread that waits for arrays and then does what is to be done with them, in order.

    on_error: called on that thread with what it raised; nothing further is done then.
    """

    def __init__(self, on_error: Callable[[BaseException], None]) -> None:
        self._work: queue.Queue[tuple[Sequence[mx.array], Callable[[], None]] | None] = queue.Queue(
            MOST_WAITING
        )
        self._error: BaseException | None = None
        self._on_error = on_error
        self._thread = threading.Thread(target=self._run, name="mlxserve-outbox", daemon=True)
        self._thread.start()

    def put(self, arrays: Sequence[mx.array], then: Callable[[], None]) -> None:
        """Do `then` when `arrays`, whose computation has been started, are there. Raises an earlier error."""
        if self._error is not None:
            raise self._error
        self._work.put((arrays, then))

    def close(self) -> None:
        """Do what is still waiting, and end."""
        self._work.put(None)
        self._thread.join()

    def abandon(self) -> None:
        """End without waiting: what has not been sent may never be there."""
        self._error = self._error or EngineStopped("This rank has stopped.")
        with suppress(queue.Full):
            self._work.put_nowait(None)

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            if self._error is not None:
                continue
            try:
                mx.eval(*item[0])
                item[1]()
            except BaseException as error:
                self._error = error
                self._on_error(error)
