"""The front alone: a launcher and a rank 0 played by the test, over real sockets."""

from __future__ import annotations

import queue
import shutil
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlxserve.config import EngineConfig, LoadConfig
from mlxserve.distributed.calls import (
    Call,
    engine_settings,
    load_settings,
    pack,
    pack_news,
    unpack,
    unpack_request,
)
from mlxserve.distributed.channel import Channel, Listener
from mlxserve.distributed.faults import Mismatch, RankFailed, decode_error, encode_error
from mlxserve.distributed.front import FrontWorker
from mlxserve.distributed.luggage import Luggage
from mlxserve.distributed.split import Split
from mlxserve.distributed.wire import decode, encode
from mlxserve.engine.adapters import AdapterInfo
from mlxserve.errors import Busy, DoesNotFit, EngineStopped, MlxServeError, ModelNotFound, PromptTooLong
from mlxserve.models.adapters import digest_of
from mlxserve.models.resolve import ModelFiles
from mlxserve.request import Delta, FinishReason, Request, SamplingParams
from tests import tiny
from tests.adapters import write_adapter
from tests.distributed.processes import WAIT_S, until

TOKEN = b"secret of this test"
FACTS = {
    "name": "toy",
    "context": 64,
    "config": {},
    "generation_defaults": {"top_k": 3},
    "notes": ["a note"],
    "weight_bytes": 7,
}


class Launcher:
    """Plays the launcher and, for each epoch, rank 0."""

    def __init__(self) -> None:
        self.socket, self.theirs = socket.socketpair()
        self.lines = self.socket.makefile("rb")
        self.channels: queue.Queue[Channel] = queue.Queue()

    def hear(self) -> dict[str, Any]:
        return decode(self.lines.readline()) or {}

    def say(self, **message: Any) -> None:
        self.socket.sendall(encode(message))

    def up(self) -> None:
        """A new epoch; its connection comes to `channels`."""
        listener = Listener(("127.0.0.1", 0), TOKEN)

        def accept() -> None:
            self.channels.put(listener.accept(WAIT_S))
            listener.close()

        threading.Thread(target=accept, daemon=True).start()
        where = {"requests": ["127.0.0.1", listener.port], "token": TOKEN.decode()}
        self.say(event="up", facts=FACTS, figures={"queue": 0, "running": 1}, **where)

    def channel(self) -> Channel:
        return self.channels.get(timeout=WAIT_S)


class Sink:
    """What a caller has got."""

    def __init__(self) -> None:
        self.news: list[Delta | MlxServeError] = []

    def __call__(self, news: Delta | MlxServeError) -> None:
        self.news.append(news)

    def last(self, count: int) -> Delta | MlxServeError:
        until(lambda: len(self.news) >= count)
        assert len(self.news) == count
        return self.news[-1]


@pytest.fixture
def launcher() -> Iterator[Launcher]:
    made = Launcher()
    yield made
    made.socket.close()


@pytest.fixture
def front(launcher: Launcher) -> Iterator[FrontWorker]:
    launcher.up()
    worker = make(launcher)
    assert launcher.hear()["split"] == "tensor:2"
    yield worker
    worker.close()


def make(launcher: Launcher, **settings: Any) -> FrontWorker:
    files = ModelFiles("folder", Path("/models/toy"), "toy", "path")
    engine = EngineConfig(max_queue=2, max_sequences=1)
    return FrontWorker(
        launcher.theirs,
        files,
        None,
        LoadConfig(),
        engine,
        Split.tensor(2),
        **settings,  # type: ignore[arg-type]
    )


def request(name: str, **settings: Any) -> Request:
    params = SamplingParams(max_tokens=9, seed=1, stop=["x"], logit_bias={3: 1.5}, schema={"type": "object"})
    return Request(name, [1, 2, 3], params, **settings)


def submitted(channel: Channel) -> Request:
    frame = channel.receive(WAIT_S)
    assert frame.kind == Call.SUBMIT
    return unpack_request(frame.payload)


def test_what_travels_is_what_arrives(front: FrontWorker, launcher: Launcher) -> None:
    channel, sink = launcher.channel(), Sink()
    sent = request("a", adapter="fine", deadline_s=2.5)
    front.submit(sent, sink)
    got = submitted(channel)
    assert unpack(pack(got)) == unpack(pack(sent)), "tuples may come back as lists"
    assert (
        got.params.logit_bias == {3: 1.5} and got.adapter == "fine" and isinstance(got.params, SamplingParams)
    )
    delta = Delta("hé", (4, 5), finish_reason=FinishReason.STOP, stopped_by="x")
    channel.send(Call.NEWS, 0, pack_news([("a", delta), ("unknown", delta)]))
    assert sink.last(1) == delta
    assert front.engine.loaded.notes == ["a note"] and front.healthy and front.trouble is None


def test_settings_survive_the_way() -> None:
    from mlxserve.distributed.calls import plain_settings

    load = LoadConfig(dtype="float32", quantize_bits=4, rope={"rope_theta": 1e4})
    engine = EngineConfig(kv_bits=8, cache_dir=Path("/tmp/x"))
    assert load_settings(plain_settings(load)) == load
    assert engine_settings(plain_settings(engine)) == engine


@pytest.mark.parametrize(
    "error",
    [
        PromptTooLong("long", needed=9, limit=8),
        DoesNotFit("big", needed_bytes=9, available_bytes=8),
        Busy("later", retry_after_s=3.0),
        Mismatch("They differ."),
    ],
)
def test_errors_keep_their_class_and_numbers(error: MlxServeError) -> None:
    back = decode_error(unpack(pack(encode_error(error))))
    assert type(back) is type(error) and str(back) == str(error) and vars(back) == vars(error)


def test_after_a_fault_streams_end_and_the_others_go_on(front: FrontWorker, launcher: Launcher) -> None:
    """Four requests: a stream in mid-reply, one that waits, a whole one in mid-reply, and one that comes after."""
    channel = launcher.channel()
    front._max_queue = 9
    stream, waiting, whole, late = Sink(), Sink(), Sink(), Sink()
    front.submit(request("stream"), stream)
    front.submit(request("waiting"), waiting)
    front.submit(request("whole", whole=True), whole)
    channel.send(Call.NEWS, 0, pack_news([("stream", Delta("a", (7,))), ("whole", Delta("b", (8, 9)))]))
    whole.last(1)
    launcher.say(event="down", reason="Rank 1 (mac2) was killed by SIGKILL.")
    ended = stream.last(2)
    assert isinstance(ended, RankFailed) and str(ended) == "Rank 1 (mac2) was killed by SIGKILL."
    assert front.trouble == str(ended) and front.healthy
    front.submit(request("late"), late)
    assert front.engine.stats()["queue"] == 3
    launcher.up()
    again = launcher.channel()
    sent = {each.id: list(each.resume) for each in (submitted(again) for _ in range(3))}
    assert sent == {"waiting": [], "whole": [8, 9], "late": []}
    again.send(Call.NEWS, 0, pack_news([("whole", Delta("c", (10,), finish_reason=FinishReason.LENGTH))]))
    assert whole.last(2) == Delta("c", (10,), finish_reason=FinishReason.LENGTH)
    assert front.trouble is None and not waiting.news and not late.news


def test_a_cancelled_request_is_not_taken_up_again(front: FrontWorker, launcher: Launcher) -> None:
    channel = launcher.channel()
    front.submit(request("a"), Sink())
    submitted(channel)
    front.cancel("a")
    assert channel.receive(WAIT_S).kind == Call.CANCEL
    launcher.say(event="down", reason="gone")
    until(lambda: front.trouble)
    front.submit(request("b"), Sink())
    launcher.up()
    assert submitted(launcher.channel()).id == "b"


def test_the_queue_has_an_end(front: FrontWorker, launcher: Launcher) -> None:
    launcher.say(event="down", reason="gone")
    until(lambda: front.trouble)
    for name in "abc":
        front.submit(request(name), Sink())
    with pytest.raises(Busy):
        front.submit(request("d"), Sink())


def test_embeddings_are_asked_for_and_refused_while_nobody_is_there(
    front: FrontWorker, launcher: Launcher
) -> None:
    channel = launcher.channel()
    asked = front.call(lambda engine: engine.embed([[1, 2]]))
    frame = channel.receive(WAIT_S)
    number, batch, adapter = unpack(frame.payload)
    assert frame.kind == Call.EMBED and batch == [[1, 2]] and adapter is None
    channel.send(Call.ANSWER, number, pack(([[0.5, 0.5]], None)))
    assert asked.result(WAIT_S) == [[0.5, 0.5]]
    launcher.say(event="down", reason="Rank 1 is gone.")
    until(lambda: front.trouble)
    with pytest.raises(RankFailed, match="Rank 1 is gone"):
        front.call(lambda engine: engine.embed([[1]])).result(WAIT_S)


# -- adapters -----------------------------------------------------------------------------------------------------


def adapter_folder(place: Path, seed: int) -> Path:
    return write_adapter(place, tiny.build("llama"), seed, endings=("layers.0.mlp.up_proj",))


def arrived(channel: Channel, place: Path) -> tuple[int, str]:
    """Play rank 0 until a LOAD: its files, as they came, in `place`; its number and name."""
    luggage = Luggage()
    while (frame := channel.receive(WAIT_S)).kind == Call.FILE:
        luggage.store(*unpack(frame.payload))
    assert frame.kind == Call.LOAD
    number, parcel, name = unpack(frame.payload)
    with luggage.unpacked(parcel) as folder:
        shutil.copytree(folder, place)
    assert not folder.exists()
    return number, name


def load(front: FrontWorker, channel: Channel, name: str, folder: Path, place: Path) -> AdapterInfo:
    """Have an adapter loaded, as rank 0 would."""
    asked = front.call(lambda engine: engine.adapters.load(name, folder))
    number, said = arrived(channel, place)
    digest = digest_of(folder)
    assert said == name and digest_of(place) == digest, "the same files, byte for byte"
    info = AdapterInfo(name, "/elsewhere", digest, "lora", 4, 1, 9)
    channel.send(Call.ANSWER, number, pack((info, None)))
    return asked.result(WAIT_S)


def test_adapters_are_sent_and_sent_again(
    front: FrontWorker, launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlxserve.distributed.luggage.PIECE_BYTES", 700)
    channel, folder = launcher.channel(), adapter_folder(tmp_path / "a", 1)
    info = load(front, channel, "a", folder, tmp_path / "first")
    assert info.path == str(folder) and front.engine.adapters.listed == [info]
    front.submit(request("r", adapter="a"), Sink())
    submitted(channel)
    launcher.say(event="down", reason="gone")
    until(lambda: front.trouble)
    with pytest.raises(RankFailed, match="gone"):
        front.call(lambda engine: engine.adapters.load("b", folder)).result(WAIT_S)
    launcher.up()
    again = launcher.channel()
    assert arrived(again, tmp_path / "second")[1] == "a", "in front of the request that names it"
    assert digest_of(tmp_path / "second") == info.digest
    assert submitted(again).adapter == "a"
    dropped = front.call(lambda engine: engine.adapters.drop("a"))
    frame = again.receive(WAIT_S)
    number, name = unpack(frame.payload)
    assert frame.kind == Call.DROP and name == "a"
    again.send(Call.ANSWER, number, pack((1, None)))
    assert dropped.result(WAIT_S) == 1 and front.engine.adapters.listed == []


def test_an_adapter_that_is_another_one_by_now_answers_nothing(
    front: FrontWorker, launcher: Launcher, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Ranks fail; one adapter's folder has changed meanwhile, another's name was dropped."""
    channel, kept = launcher.channel(), Sink()
    folders = {
        name: adapter_folder(tmp_path / name, seed) for seed, name in enumerate(("same", "other", "none"))
    }
    for name, folder in folders.items():
        load(front, channel, name, folder, tmp_path / f"{name}-sent")
    front._max_queue = 9
    front.submit(request("same", adapter="same"), kept)
    lost = {name: Sink() for name in ("other", "none")}
    for name, sink in lost.items():
        front.submit(request(name, adapter=name), sink)
    launcher.say(event="down", reason="gone")
    until(lambda: front.trouble)
    assert front.engine.adapters.drop("none") == 0
    with pytest.raises(ModelNotFound, match="'none'"):
        front.engine.adapters.drop("none")
    shutil.rmtree(folders["other"])
    adapter_folder(folders["other"], 9)
    launcher.up()
    again = launcher.channel()
    assert arrived(again, tmp_path / "again")[1] == "same" and submitted(again).id == "same"
    for sink in lost.values():
        assert isinstance(error := sink.last(1), RankFailed) and "no longer what it was" in str(error)
    assert [info.name for info in front.engine.adapters.listed] == ["same"] and not kept.news
    assert "'other' is not on the ranks that were started anew" in caplog.text


def test_files_at_fault_are_named_where_they_are(front: FrontWorker, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=f"no adapter folder {tmp_path}/none"):
        front.call(lambda engine: engine.adapters.load("a", tmp_path / "none")).result(WAIT_S)


@pytest.mark.parametrize("way", ["given up", "launcher gone"])
def test_the_end_of_all_ranks_ends_every_request(launcher: Launcher, way: str) -> None:
    launcher.up()
    deaths: list[BaseException] = []
    front = make(launcher, on_death=deaths.append)
    sink = Sink()
    front.submit(request("a", whole=True), sink)
    if way == "given up":
        launcher.say(event="failed", error=encode_error(RankFailed("Rank 1 died too often.")))
    else:
        launcher.socket.shutdown(socket.SHUT_RDWR)
    ended = sink.last(1)
    assert isinstance(ended, EngineStopped) and not front.healthy
    until(lambda: deaths)
    with pytest.raises(EngineStopped):
        front.submit(request("b"), Sink())


def test_what_keeps_ranks_from_coming_up_is_raised(launcher: Launcher) -> None:
    launcher.say(event="failed", error=encode_error(Mismatch("rank 1 has another tensor q")))
    with pytest.raises(Mismatch, match="another tensor q"):
        make(launcher)
