"""Rank 0 of a served model: the engine on its thread, and the front's requests on a connection.

Knows: the worker, frames of calls.py. Does not know HTTP, or what happens when ranks are restarted.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from mlxserve.distributed.calls import Call, News, pack, pack_news, unpack, unpack_request
from mlxserve.distributed.channel import Channel, Listener
from mlxserve.distributed.faults import encode_error
from mlxserve.distributed.leader import leader_engine
from mlxserve.distributed.luggage import Luggage
from mlxserve.distributed.member import JOIN_S, TOKEN, Rank
from mlxserve.engine.adapters import AdapterInfo
from mlxserve.engine.engine import Engine
from mlxserve.engine.worker import Worker
from mlxserve.errors import EngineFailed, EngineStopped, MlxServeError

FIGURES_EVERY_S = 0.5
_NEWS_A_FRAME = 256


def lead(rank: Rank) -> None:
    """Come up, tell the supervisor, and serve the front until it leaves."""
    from mlxserve.distributed.calls import engine_settings
    from mlxserve.text.tokenizer import load_tokenizer

    def build() -> Engine:
        shard = rank.load()
        context = rank.join(shard)
        config = engine_settings(rank.job.engine)
        assert rank.files is not None
        tokenizer = load_tokenizer(rank.files.path)
        engine = leader_engine(context, shard.loaded, tokenizer, config, stage=shard.stage)
        rank.engine = engine
        rank.serve(shard)
        return engine

    worker = Worker(build, on_death=rank.end)
    host, port = rank.job.requests
    listener = Listener((str(host), int(port)), os.environ[TOKEN].encode())
    rank.control.say(up={"facts": facts_of(worker.engine), "figures": worker.engine.stats()})
    channel = listener.accept(JOIN_S)
    listener.close()
    Desk(worker, channel, rank.adapting).run()
    worker.close()


def facts_of(engine: Engine) -> dict[str, Any]:
    """What the front needs to know of a loaded model."""
    loaded = engine.loaded
    return {
        "name": loaded.name,
        "context": loaded.context,
        "config": dict(loaded.config),
        "generation_defaults": dict(loaded.generation_defaults),
        "notes": list(engine.notes),
        "weight_bytes": loaded.weight_bytes,
    }


def _ends(news: News) -> bool:
    return isinstance(news, MlxServeError) or news.finish_reason is not None


def _shown(error: BaseException) -> dict[str, Any]:
    """Any error as one for people."""
    return encode_error(error if isinstance(error, MlxServeError) else EngineFailed(str(error)))


class Desk:
    """Takes the front's calls for a worker and sends the news back, several in a frame.

    adapting: what surrounds the putting on of an adapter.
    """

    def __init__(
        self, worker: Worker, channel: Channel, adapting: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._worker, self._channel, self._adapting = worker, channel, adapting
        self._figures_s = 0.0
        self._out: queue.SimpleQueue[tuple[str, News] | None] = queue.SimpleQueue()
        self._luggage = Luggage()
        self._tasks: dict[Call, Callable[..., Any]] = {
            Call.EMBED: lambda batch, adapter, engine: engine.embed(batch, adapter),
            Call.LOAD: self._load,
            Call.DROP: lambda name, engine: engine.adapters.drop(name),
        }

    def run(self) -> None:
        """Until the front closes its connection."""
        writer = threading.Thread(target=self._write, name="mlxserve-news", daemon=True)
        writer.start()
        try:
            while True:
                frame = self._channel.receive()
                self._take(Call(frame.kind), frame.payload)
        except EngineStopped:
            self._out.put(None)

    def _take(self, call: Call, body: bytearray) -> None:
        if call is Call.SUBMIT:
            self._submit(body)
        elif call is Call.CANCEL:
            self._worker.cancel(unpack(body))
        elif call is Call.FILE:
            self._luggage.store(*unpack(body))
        else:
            number, *values = unpack(body)
            self._answer(number, partial(self._tasks[call], *values))

    def _submit(self, body: bytearray) -> None:
        request = unpack_request(body)
        try:
            self._worker.submit(request, lambda news: self._put(request.id, news))
        except MlxServeError as error:
            self._put(request.id, error)

    def _put(self, name: str, news: News) -> None:
        """News on its way out; that the whole engine has stopped is for the supervisor to say."""
        if not isinstance(news, EngineStopped):
            self._out.put((name, news))

    def _load(self, parcel: int, name: str, engine: Engine) -> AdapterInfo:
        """Put an adapter on the ranks, whose files have come before."""
        with self._luggage.unpacked(parcel) as folder, self._adapting():
            return engine.adapters.load(name, folder)

    def _answer(self, number: int, work: Callable[[Engine], Any]) -> None:
        """Send back what `work` returns or raises, when the engine has come to it."""
        future = self._worker.call(work)

        def send(_: Any) -> None:
            error = future.exception()
            value = None if error else future.result()
            with contextlib.suppress(EngineStopped):
                self._channel.send(Call.ANSWER, number, pack((value, _shown(error) if error else None)))

        future.add_done_callback(send)

    def _write(self) -> None:
        """On a thread of its own: what has gathered while the last frame was sent goes out together."""
        while (first := self._out.get()) is not None:
            news = [first]
            while len(news) < _NEWS_A_FRAME and not self._out.empty():
                item = self._out.get()
                if item is None:
                    return
                news.append(item)
            try:
                self._send_figures(ended=any(_ends(item) for _, item in news))
                self._channel.send(Call.NEWS, 0, pack_news(news))
            except EngineStopped:
                return

    def _send_figures(self, *, ended: bool) -> None:
        """Before a request's last news, so that its caller finds it counted; else now and then."""
        now = time.monotonic()
        if ended or now - self._figures_s > FIGURES_EVERY_S:
            self._figures_s = now
            self._channel.send(Call.FIGURES, 0, pack(self._worker.engine.stats()))
