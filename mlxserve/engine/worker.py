"""The one thread that owns MLX: it builds the engine, runs its loop, and answers from other threads.

Knows: threads, an inbox, the engine's steps. Does not know text, HTTP or asyncio.

MLX's lazy arrays belong to the thread that made them, so everything that touches one happens here: the
loading of the model too.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from mlxserve.config import EngineConfig
from mlxserve.engine.beside import Beside
from mlxserve.engine.engine import Engine
from mlxserve.engine.output_processor import Sink
from mlxserve.engine.threads import join_fully
from mlxserve.errors import EngineStopped, MlxServeError
from mlxserve.request import Request
from mlxserve.text.tokenizer import Tokenizer

T = TypeVar("T")
_Task = Callable[[Engine], None]


class Served(Protocol):
    """A loaded model and its figures, as callers see them."""

    @property
    def loaded(self) -> Loaded: ...
    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def config(self) -> EngineConfig: ...
    @property
    def adapters(self) -> Any: ...
    @property
    def notes(self) -> Sequence[str]: ...
    def stats(self) -> dict[str, Any]: ...


class Loaded(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def context(self) -> int: ...
    @property
    def config(self) -> Mapping[str, Any]: ...
    @property
    def generation_defaults(self) -> Mapping[str, Any]: ...
    @property
    def notes(self) -> Sequence[str]: ...


class Handle(Protocol):
    """An engine that runs somewhere else: on a thread (Worker), or in other processes. See Worker's methods."""

    trouble: str | None

    @property
    def engine(self) -> Served: ...
    @property
    def healthy(self) -> bool: ...
    def submit(self, request: Request, sink: Sink) -> None: ...
    def cancel(self, request_id: str) -> None: ...
    def call(self, work: Callable[[Any], T]) -> Future[T]: ...
    def beside(self, work: Callable[[Beside[T]], T]) -> Beside[T]: ...
    def close(self) -> None: ...


class Worker:
    """Starts a thread that builds an engine and serves it. `build` runs there; what it raises is raised here.

    on_death: called once, with the error, if the loop cannot go on.
    """

    def __init__(
        self, build: Callable[[], Engine], *, on_death: Callable[[BaseException], None] | None = None
    ) -> None:
        self._inbox: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._ready: Future[Engine] = Future()
        self._on_death = on_death
        self._sinks: dict[str, Sink] = {}
        self._calls: set[Future[Any]] = set()
        self._lock = threading.Lock()
        self._beside: deque[Beside[Any]] = deque()
        self._due_s = 0.0  # when the work beside wants its next turn
        self._dead: BaseException | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, args=(build,), name="mlxserve-engine", daemon=True)
        self._thread.start()
        try:
            self.engine = self._ready.result()
        except BaseException:
            self._closed = True
            raise

    # Why nothing is computed at the moment, where that will pass by itself; here it never does.
    trouble: str | None = None

    @property
    def healthy(self) -> bool:
        return self._thread.is_alive() and self._dead is None and not self._closed

    def submit(self, request: Request, sink: Sink) -> None:
        """Queue a request from any thread. `sink` is called on the worker's thread: deltas, or one error."""
        self._register(request.id, sink)
        self._inbox.put(lambda engine: self._add(engine, request))

    def cancel(self, request_id: str) -> None:
        """End a request from any thread, within one step."""
        self._inbox.put(lambda engine: engine.cancel(request_id))

    def call(self, work: Callable[[Engine], T]) -> Future[T]:
        """Run `work` with the engine between two steps; the future holds what it returns or raises."""
        future: Future[T] = Future()

        def task(engine: Engine) -> None:
            if not future.set_running_or_notify_cancel():
                return
            self._calls.discard(future)
            try:
                future.set_result(work(engine))
            except BaseException as error:
                future.set_exception(error)

        with self._lock:
            self._refuse_if_gone()
            self._calls.add(future)
        self._inbox.put(task)
        return future

    def beside(self, work: Callable[[Beside[T]], T]) -> Beside[T]:
        """Start long work that takes turns with the engine's steps, one such work after another.

        While answers run it gets at most half of the time, and a turn's limit is the engine's gap target.
        """
        with self._lock:
            self._refuse_if_gone()
            seat = Beside(work)
            self._beside.append(seat)
        self._inbox.put(lambda _: None)  # an idle loop looks up
        return seat

    def close(self) -> None:
        """Stop the loop; requests still running get EngineStopped. Returns when the thread has ended."""
        with self._lock:
            begun, self._closed = self._closed, True
        if not begun:
            self._inbox.put(None)
        if threading.current_thread() is not self._thread:
            join_fully(self._thread)

    # -- on the worker's thread ----------------------------------------------------------------------------

    def _run(self, build: Callable[[], Engine]) -> None:
        try:
            engine = build()
        except BaseException as error:
            self._ready.set_exception(error)
            return
        self._ready.set_result(engine)
        try:
            self._serve(engine)
            engine.close()
            self._tell_all(EngineStopped("The engine was closed before this request was finished."))
        except BaseException as error:
            self._die(error)
        finally:
            while self._beside:
                self._beside.popleft().end()

    def _serve(self, engine: Engine) -> None:
        while True:
            idle = not engine.has_work
            if not self._take_in(engine, self._patience_s() if idle else 0.0):
                return
            if idle:
                engine.wake()
            if engine.has_work:
                engine.step()
            if self._beside and time.monotonic() >= self._due_s:
                self._give_turn(engine)

    def _patience_s(self) -> float | None:
        """How long an idle loop may wait for news: until the work beside wants its turn, else for ever."""
        return max(0.0, self._due_s - time.monotonic()) if self._beside else None

    def _give_turn(self, engine: Engine) -> None:
        engine.settle()
        seat, busy = self._beside[0], engine.has_work
        began = time.monotonic()
        rest_s = seat.turn(engine.config.gap_target_s if busy else None)
        now = time.monotonic()
        if rest_s is None:
            self._beside.popleft()
        self._due_s = now + max(rest_s or 0.0, now - began if busy else 0.0)
        engine.wake()

    def _take_in(self, engine: Engine, wait_s: float | None) -> bool:
        """Do what is in the inbox, waiting so long for the first (None: for ever); False to end."""
        with contextlib.suppress(queue.Empty):
            task = self._inbox.get(block=wait_s != 0.0, timeout=wait_s)
            while task is not None:
                task(engine)
                task = self._inbox.get_nowait()
            return False
        return True

    def _add(self, engine: Engine, request: Request) -> None:
        sink = self._sinks.get(request.id)
        if sink is None:
            return
        try:
            engine.add(request, self._watching(request.id, sink))
        except MlxServeError as error:
            self._drop(request.id)
            _tell(sink, error)

    def _watching(self, request_id: str, sink: Sink) -> Sink:
        """`sink`, and the request is forgotten with its last word."""

        def deliver(news: Any) -> None:
            if isinstance(news, MlxServeError) or news.finish_reason is not None:
                self._drop(request_id)
            sink(news)

        return deliver

    # -- who waits for an answer -----------------------------------------------------------------------------

    def _register(self, request_id: str, sink: Sink) -> None:
        with self._lock:
            self._refuse_if_gone()
            self._sinks[request_id] = sink

    def _drop(self, request_id: str) -> None:
        with self._lock:
            self._sinks.pop(request_id, None)

    def _refuse_if_gone(self) -> None:
        if self._dead is not None:
            raise EngineStopped(f"The engine has stopped ({type(self._dead).__name__}: {self._dead}).")
        if self._closed:
            raise EngineStopped("The engine is closed.")

    def _tell_all(self, error: MlxServeError) -> None:
        with self._lock:
            sinks, self._sinks = list(self._sinks.values()), {}
            calls, self._calls = self._calls, set()
        for sink in sinks:
            _tell(sink, error)
        for future in calls:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)

    def _die(self, error: BaseException) -> None:
        with self._lock:
            self._dead = error
        self._tell_all(EngineStopped(f"The engine has stopped ({type(error).__name__}: {error})."))
        if self._on_death is not None:
            self._on_death(error)


def _tell(sink: Sink, error: MlxServeError) -> None:
    """A last word; whoever cannot take it has left, and the others are told all the same."""
    with contextlib.suppress(Exception):
        sink(error)
