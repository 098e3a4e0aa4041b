"""The front: an engine in this process's eyes, while ranks elsewhere compute, die and come back.

A command such as `serve` runs as the launcher's child, apart from all ranks, so that no rank's end is its
own: HTTP connections, queued requests and what they have received so far live here. `FrontWorker` stands
where engine/worker.Worker does. When an epoch of ranks fails, open streams get an error; requests of whose
answer nobody has seen a part, and those whose caller wants it whole, wait, and are sent to the next epoch
together with the tokens they already have.

Knows: the launcher's lines, rank 0's connection, requests in flight. Does not know how ranks are started
or watched (supervise.py). No array is made in this process.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import queue
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from mlxserve.config import EngineConfig, LoadConfig
from mlxserve.distributed.calls import (
    Call,
    News,
    pack,
    plain_settings,
    unpack,
    unpack_news,
)
from mlxserve.distributed.channel import Channel, connect
from mlxserve.distributed.choose import choose_split
from mlxserve.distributed.faults import RankFailed, decode_error
from mlxserve.distributed.hosts import Host
from mlxserve.distributed.launch import LAUNCH
from mlxserve.distributed.locate import describe
from mlxserve.distributed.luggage import FrontAdapters
from mlxserve.distributed.split import Split
from mlxserve.distributed.wire import decode, encode
from mlxserve.errors import Busy, EngineStopped, MlxServeError, ModelUnsupported, Unsupported
from mlxserve.models.resolve import ModelFiles
from mlxserve.request import Delta, Request
from mlxserve.text.tokenizer import Tokenizer, load_tokenizer

CONNECT_S = 30.0

Sink = Callable[[News], None]


def start_ranks(files: ModelFiles, load: LoadConfig, engine: EngineConfig) -> FrontWorker:
    """The ranks of this launch with a model on them, once they are up. Raises as FrontWorker does."""
    if files.kind == "gguf":
        raise ModelUnsupported(
            f"{files.name} is a GGUF file, which is only read whole; several ranks need a folder with safetensors."
        )
    setting = json.loads(os.environ[LAUNCH])
    hosts = [Host(**host) for host in setting["hosts"]]
    split = choose_split(files, hosts, setting["split"], load, engine, setting["link"])
    launcher = socket.socket(fileno=int(setting["fd"]))
    return FrontWorker(launcher, files, load_tokenizer(files.path), load, engine, split)


def launched() -> bool:
    """True in a front: the process was started by `mlxserve launch`."""
    return LAUNCH in os.environ


@dataclass(frozen=True, slots=True)
class Facts:
    """The model as rank 0 loaded it."""

    name: str
    context: int
    config: Mapping[str, Any]
    generation_defaults: Mapping[str, Any]
    notes: list[str]
    weight_bytes: int


@dataclass(slots=True)
class _Open:
    """A request that has not ended: what its caller has received of the answer so far.

    digest: what its adapter's name meant when it came.
    """

    request: Request
    digest: str | None
    sink: Sink
    tokens: list[int] = field(default_factory=list)

    @property
    def survives(self) -> bool:
        """Whether the next epoch can take it up without anybody noticing."""
        return self.request.whole or not self.tokens

    def resumed(self) -> Request:
        return replace(self.request, resume=tuple(self.tokens))


class FrontEngine:
    """What callers ask of an engine: facts, the tokenizer, figures, embeddings."""

    def __init__(self, worker: FrontWorker, facts: Facts, tokenizer: Tokenizer, config: EngineConfig) -> None:
        self._worker = worker
        self.loaded = facts
        self.tokenizer = tokenizer
        self.config = config
        self.adapters = worker.adapters
        divided = (
            [f"Divided over {worker.split.size} ranks: {worker.split}."] if worker.split.size > 1 else []
        )
        self.notes = [*divided, *facts.notes]

    def stats(self) -> dict[str, Any]:
        """Rank 0's figures as it last told them; while there is no rank, its requests wait here."""
        figures = self._worker.figures
        if self._worker.trouble is None:
            return figures
        return {**figures, "queue": self._worker.held, "running": 0}

    def limit_cache(self, limit_bytes: int) -> None:
        """Nothing: ranks have agreed on their memory among themselves, and take none of this process's."""

    def embed(self, batch: list[list[int]], adapter: str | None = None) -> list[list[float]]:
        """Vectors by rank 0's engine. Raises RankFailed while there is none, and what it raises."""
        vectors: list[list[float]] = self._worker.ask(Call.EMBED, batch, adapter).result()
        return vectors


class FrontWorker:
    """Brings up the ranks and hands them requests. Any thread may call its methods.

    Raises what kept the ranks from coming up: Mismatch, HostUnreachable, a rank's own ModelError, …
    on_death: called once, with the error, when the launcher has given up.
    """

    def __init__(
        self,
        launcher: socket.socket,
        files: ModelFiles,
        tokenizer: Tokenizer,
        load: LoadConfig,
        engine: EngineConfig,
        split: Split,
        *,
        on_death: Callable[[BaseException], None] | None = None,
    ) -> None:
        self.trouble: str | None = "The ranks are being started."
        self._on_death = on_death
        self.figures: dict[str, Any] = {}
        self._max_queue = engine.max_queue + engine.max_sequences
        self._open: dict[str, _Open] = {}
        self._asked: dict[int, Future[Any]] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.RLock()
        self._channel: Channel | None = None
        self._dead: MlxServeError | None = None
        self._closed = False
        self._up: Future[Facts] = Future()
        self._launcher = launcher
        self.split = split
        self.adapters = FrontAdapters(self)
        self._outbox: queue.SimpleQueue[tuple[Channel, Call, bytes] | None] = queue.SimpleQueue()
        threading.Thread(target=self._write, name="mlxserve-calls", daemon=True).start()
        threading.Thread(target=self._listen, name="mlxserve-launcher", daemon=True).start()
        settings = {"load": plain_settings(load), "engine": plain_settings(engine)}
        self._say(do="open", model=describe(files), split=str(split), **settings)
        self.engine = FrontEngine(self, self._up.result(), tokenizer, engine)

    @property
    def healthy(self) -> bool:
        """False once the ranks will not come back. While they are being restarted, `trouble` says why."""
        return self._dead is None and not self._closed

    @property
    def held(self) -> int:
        """Requests that have not ended."""
        return len(self._open)

    def submit(self, request: Request, sink: Sink) -> None:
        """Hand over a request, or keep it until there are ranks. `sink` gets deltas, or one error."""
        with self._lock:
            self._refuse_if_gone()
            if len(self._open) >= self._max_queue:
                raise Busy(f"{len(self._open)} requests are waiting; come back later.")
            digest = self.adapters.digest(request.adapter)
            self._open[request.id] = _Open(request, digest, sink)
            self.tell(Call.SUBMIT, pack(request))

    def cancel(self, request_id: str) -> None:
        """End a request; its sink hears no more. Unknown ids are ignored."""
        with self._lock:
            self._open.pop(request_id, None)
            self.tell(Call.CANCEL, pack(request_id))

    def call(self, work: Callable[[Any], Any]) -> Future[Any]:
        """What `work` returns or raises, given this engine."""
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(work(self.engine))
            except BaseException as error:
                future.set_exception(error)

        self._refuse_if_gone()
        threading.Thread(target=run, daemon=True).start()
        return future

    def beside(self, work: Callable[[Any], Any]) -> Any:
        """Raises Unsupported: no device is here to do it on."""
        raise Unsupported("Ranks that serve a model do no other work beside it.", param="model")

    def ask(self, call: Call, *values: Any) -> Future[Any]:
        """A question to rank 0. Raises RankFailed while there is none; so does the answer if it fails then."""
        with self._lock:
            self._refuse_if_gone()
            if self._channel is None:
                raise RankFailed(self.trouble or "No rank is there to ask.")
            number = next(self._numbers)
            answer = self._asked[number] = Future()
            self.tell(call, pack((number, *values)))
        return answer

    def tell(self, call: Call, body: bytes) -> None:
        """To rank 0 if it is there; what is lost is sent again to the next epoch. Never waits."""
        with self._lock:
            if self._channel is not None:
                self._outbox.put((self._channel, call, body))

    def close(self) -> None:
        """End the ranks; requests that have not ended get EngineStopped."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._outbox.put(None)
            self._say(do="close")
            self._cut()
            self._fail_all(EngineStopped("The engine was closed before this request was finished."))

    # -- the launcher --------------------------------------------------------------------------------------

    def _say(self, **message: Any) -> None:
        try:
            self._launcher.sendall(encode(message))
        except OSError:
            self._die(EngineStopped("The launcher has ended."))

    def _listen(self) -> None:
        with contextlib.suppress(OSError), self._launcher.makefile("rb") as lines:
            for line in lines:
                message = decode(line)
                if message is not None:
                    self._hear(message)
        self._die(EngineStopped("The launcher has ended, and the ranks with it."))

    def _hear(self, message: dict[str, Any]) -> None:
        match message.get("event"):
            case "up":
                self._come_up(message)
            case "down":
                self._go_down(str(message["reason"]))
            case "failed":
                self._die(decode_error(message["error"]))

    def _come_up(self, message: dict[str, Any]) -> None:
        """A new epoch: connect, and send it every request that has not ended."""
        host, port = message["requests"]
        try:
            token = str(message["token"]).encode()
            channel = connect((host, int(port)), token, rank=0, peer=0, timeout_s=CONNECT_S)
        except EngineStopped:
            return  # its end will be told
        with self._lock:
            if self._closed:
                channel.close()
                return
            self._channel, self.trouble = channel, None
            self.figures = message["figures"]
            self.adapters.send_again()
            stale = [name for name, entry in self._open.items() if not self._sent_again(entry)]
            sinks = [self._open.pop(name).sink for name in stale]
        for sink in sinks:
            sink(RankFailed("A rank failed, and the adapter of this request is no longer what it was."))
        threading.Thread(target=self._receive, args=(channel,), name="mlxserve-news", daemon=True).start()
        if not self._up.done():
            self._up.set_result(Facts(**message["facts"]))

    def _sent_again(self, entry: _Open) -> bool:
        """Send a request to the new epoch, unless its adapter's name means something else by now."""
        as_it_was = entry.digest == self.adapters.digest(entry.request.adapter)
        if as_it_was:
            self.tell(Call.SUBMIT, pack(entry.resumed()))
        return as_it_was

    def _go_down(self, reason: str) -> None:
        """An epoch has failed: streams end with the reason, the others wait for the next one."""
        error = RankFailed(reason)
        with self._lock:
            self.trouble = reason
            self._cut()
            lost = [name for name, entry in self._open.items() if not entry.survives]
            sinks = [self._open.pop(name).sink for name in lost]
        for sink in sinks:
            sink(error)

    def _die(self, error: MlxServeError) -> None:
        with self._lock:
            if self._dead is not None or self._closed:
                return
            self._dead, self.trouble = error, error.message
            self._cut()
        self._fail_all(error)
        if not self._up.done():
            self._up.set_exception(error)
        elif self._on_death is not None:
            self._on_death(error)

    # -- rank 0 --------------------------------------------------------------------------------------------

    def _write(self) -> None:
        """On a thread of its own: a rank that takes nothing holds up nobody."""
        while (letter := self._outbox.get()) is not None:
            channel, call, body = letter
            if channel is self._channel:
                with contextlib.suppress(EngineStopped):  # the receiving side finds out too
                    channel.send(call, 0, body)

    def _cut(self) -> None:
        """No more words with this epoch; questions to it are answered with an error."""
        with self._lock:
            channel, self._channel = self._channel, None
            asked, self._asked = self._asked, {}
        if channel is not None:
            channel.close()
        for answer in asked.values():
            answer.set_exception(RankFailed(self.trouble or "A rank has failed."))

    def _receive(self, channel: Channel) -> None:
        try:
            while True:
                frame = channel.receive()
                if frame.kind == Call.NEWS:
                    for sink, news in self._sorted(channel, unpack_news(frame.payload)):
                        sink(news)
                elif frame.kind == Call.FIGURES:
                    self.figures = unpack(frame.payload)
                else:
                    self._answered(frame.step, *unpack(frame.payload))
        except (EngineStopped, OSError):
            with self._lock:
                if self._channel is channel:
                    self.trouble = self.trouble or "Rank 0 has closed its connection."
                    self._cut()

    def _sorted(self, channel: Channel, news: list[tuple[str, News]]) -> Iterator[tuple[Sink, News]]:
        """Who gets what; of an epoch that is over nobody gets anything."""
        for name, item in news:
            with self._lock:
                entry = self._open.get(name)
                if entry is None or self._channel is not channel:
                    continue
                if isinstance(item, Delta):
                    entry.tokens += item.token_ids
                if not isinstance(item, Delta) or item.finish_reason is not None:
                    del self._open[name]
            yield entry.sink, item

    def _answered(self, number: int, value: Any, error: Mapping[str, Any] | None) -> None:
        with self._lock:
            answer = self._asked.pop(number, None)
        if answer is None:
            return
        if error is not None:
            answer.set_exception(decode_error(error))
        else:
            answer.set_result(value)

    # -- ends ----------------------------------------------------------------------------------------------

    def _refuse_if_gone(self) -> None:
        if self._dead is not None:
            raise EngineStopped(self._dead.message)
        if self._closed:
            raise EngineStopped("The engine is closed.")

    def _fail_all(self, error: MlxServeError) -> None:
        with self._lock:
            entries, self._open = list(self._open.values()), {}
        for entry in entries:
            entry.sink(error)
