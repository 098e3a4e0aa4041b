"""Long work beside an engine's steps, in turns: while it moves, the worker's thread stands still.

Knows: two threads and whose turn it is. Does not know what the work does.

MLX's lazy arrays belong to the thread that made them, so such work (a training) keeps to a thread of its own
and moves only while the engine does not:

    worker    step  step ─────────── step ─────────── step …
    work           ╰─ until pause() ─╯   ╰─ pause() ─╯

The work says where it can be interrupted, and how long it wants to be left alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from mlxserve.errors import Cancelled
from mlxserve.text.tokenizer import Tokenizer

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TrainingBase:
    """A served model as a trainer may have it: modules of its own over the served arrays."""

    name: str
    path: Path
    model: Any
    config: dict[str, Any]
    tokenizer: Tokenizer


class Beside(Generic[T]):
    """One piece of work. `work` gets this object; `future` holds what it returns or raises."""

    def __init__(self, work: Callable[[Beside[T]], T]) -> None:
        self.future: Future[T] = Future()
        self._work = work
        self._stopped = False
        self._limit_s: float | None = None
        self._rest_s: float | None = 0.0
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, name="mlxserve-beside", daemon=True)
        self._thread.start()

    # -- from any thread -------------------------------------------------------------------------------------

    def stop(self) -> None:
        """The next `pause` raises Cancelled in the work."""
        self._stopped = True

    # -- on the worker's thread ------------------------------------------------------------------------------

    def turn(self, limit_s: float | None) -> float | None:
        """Let the work move to its next pause. How many seconds it then wants to rest; None: it has ended.

        limit_s: how long somebody who waits for tokens may wait; None where nobody does.
        """
        self._limit_s = limit_s
        self._go.release()
        self._back.acquire()
        return self._rest_s

    def end(self) -> None:
        """Stop the work, and let it move until it has ended."""
        self.stop()
        while self.turn(None) is not None:
            pass
        self._thread.join()

    # -- on the work's thread --------------------------------------------------------------------------------

    def pause(self, rest_s: float = 0.0) -> float | None:
        """Stand still until the next turn; its limit in seconds, None for none. Raises Cancelled once stopped."""
        self._rest_s = rest_s
        self._back.release()
        self._go.acquire()
        if self._stopped:
            raise Cancelled("The work was stopped.")
        return self._limit_s

    def _run(self) -> None:
        self.future.set_running_or_notify_cancel()  # whoever loses interest calls `stop`
        self._go.acquire()
        try:
            if self._stopped:
                raise Cancelled("The work was stopped.")
            result: Any = self._work(self)
        except BaseException as error:
            self.future.set_exception(error)
        else:
            self.future.set_result(result)
        self._rest_s = None
        self._back.release()
