"""What a server does when things go wrong: clients that leave, engines that fail, readers that sleep."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from mlxserve.errors import Busy, EngineFailed, EngineStopped, PromptTooLong, UsageError
from mlxserve.request import Delta, FinishReason
from tests.server.stub import RunningServer, StubEngine, running
from tests.server.wire import data_of, events_of, lines_of

HI = [{"role": "user", "content": "hi"}]
APIS = {
    "openai": ("/v1/chat/completions", {"model": "stub", "messages": HI}),
    "completions": ("/v1/completions", {"model": "stub", "prompt": "hi", "max_tokens": 4000}),
    "responses": ("/v1/responses", {"model": "stub", "input": "hi"}),
    "anthropic": ("/v1/messages", {"model": "stub", "messages": HI, "max_tokens": 4000}),
    "ollama": ("/api/chat", {"model": "stub", "messages": HI}),
    "infill": ("/infill", {"model": "stub", "input_prefix": "a", "n_predict": -1}),
}
ALL = pytest.mark.parametrize("api", list(APIS))


def eventually(holds: Callable[[], bool], what: str, seconds: float = 60) -> None:
    """Waits for a condition; no test depends on how fast it comes.

    Looks are counted, not the clock: a machine that stood still meanwhile has used up none of the time.
    """
    for _ in range(int(seconds * 100)):
        if holds():
            return
        time.sleep(0.01)
    pytest.fail(what)


def post(http: httpx.Client, api: str, **body: Any) -> httpx.Response:
    path, base = APIS[api]
    return http.post(path, json={**base, **body})


@contextmanager
def raw_request(server: RunningServer, api: str, **body: Any) -> Iterator[socket.socket]:
    """A request over a plain socket, whose reading and closing the test controls."""
    path, base = APIS[api]
    content = json.dumps({**base, **body}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as line:
        line.sendall(head + content)
        yield line


# -- case 18: cancellation --------------------------------------------------------------------------


@ALL
def test_case_18_a_closed_stream_cancels(
    server: RunningServer, stub: StubEngine, http: httpx.Client, api: str
) -> None:
    stub.script = ["tick ", 0.005] * 5000
    tasks = server.tasks()
    with raw_request(server, api, stream=True) as line:
        seen = b""
        while seen.count(b"tick") < 3:
            seen += line.recv(4096)
    eventually(lambda: stub.running == 0, "the generation went on")
    assert len(stub.cancelled) == 1
    eventually(lambda: server.tasks() <= tasks, "a task stayed behind")
    stub.script = ["fine"]
    assert post(http, api).status_code == 200


@ALL
def test_case_18_a_closed_whole_request_cancels(server: RunningServer, stub: StubEngine, api: str) -> None:
    stub.script = [60.0]
    with raw_request(server, api, stream=False):
        eventually(lambda: stub.running == 1, "the generation did not start")
    eventually(lambda: stub.running == 0, "the generation went on")
    assert len(stub.cancelled) == 1


def test_case_18_all_choices_are_cancelled(server: RunningServer, stub: StubEngine) -> None:
    stub.script = ["tick ", 0.005] * 5000
    with raw_request(server, "openai", stream=True, n=4) as line:
        while b"tick" not in line.recv(4096):
            pass
    eventually(lambda: stub.running == 0, "a choice went on")
    assert len(stub.cancelled) == 4


# -- case 22: containment ---------------------------------------------------------------------------


@ALL
@pytest.mark.parametrize("fault", [EngineFailed("A step failed."), ValueError("unforeseen")])
def test_case_22_an_error_before_the_first_token(
    http: httpx.Client, stub: StubEngine, api: str, fault: Exception
) -> None:
    stub.script = [fault]
    for stream in (False, True):
        answer = post(http, api, stream=stream)
        assert answer.status_code == 500
        assert "error" in answer.json()
    stub.script = ["fine"]
    assert post(http, api).status_code == 200


def test_case_22_an_error_in_mid_stream(http: httpx.Client, stub: StubEngine) -> None:
    stub.script = ["Hel", EngineFailed("A step failed.")]
    events = data_of(post(http, "openai", stream=True))
    assert events[-1]["error"]["message"] == "A step failed."
    assert "[DONE]" not in events
    assert not any(c["finish_reason"] for e in events[:-1] for c in e["choices"])
    name, data = events_of(post(http, "anthropic", stream=True))[-1]
    assert (name, data["error"]["type"]) == ("error", "api_error")
    assert lines_of(post(http, "ollama", stream=True))[-1] == {"error": "A step failed."}
    assert events_of(post(http, "responses", stream=True))[-1][0] == "response.failed"


def test_case_22_others_go_on(server: RunningServer, http: httpx.Client, stub: StubEngine) -> None:
    gate = asyncio.Event()

    def script(request: Any) -> list[Any]:
        return ["good ", gate, "end"] if request.params.seed == 1 else [EngineFailed("A step failed.")]

    stub.script = script
    answers: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: answers.append(post(http, "openai", seed=1)))
    thread.start()
    eventually(lambda: stub.running == 1, "the good one did not start")
    assert post(http, "openai", seed=2).status_code == 500
    server.loop.call_soon_threadsafe(gate.set)
    thread.join(10)
    assert answers[0].json()["choices"][0]["message"]["content"] == "good end"


def test_case_22_a_dead_engine_shows() -> None:
    engine = StubEngine()
    with running(engine) as server, httpx.Client(base_url=server.url, timeout=60, verify=False) as http:
        post(http, "openai")
        assert http.get("/health").json() == {"status": "ok"}
        assert http.get("/ready").status_code == 200
        engine.dead = True
        engine.script = [EngineStopped("The engine has stopped.")]
        assert http.get("/health").status_code == 503
        assert http.get("/ready").status_code == 503
        assert post(http, "openai").status_code == 503


# -- queues, readers, heartbeats --------------------------------------------------------------------


@ALL
def test_a_full_queue_says_when_to_come_back(http: httpx.Client, stub: StubEngine, api: str) -> None:
    stub.script = [Busy("The queue is full.", retry_after_s=7)]
    for stream in (False, True):
        answer = post(http, api, stream=stream)
        assert answer.status_code == 429
        assert answer.headers["retry-after"] == "7"


@ALL
def test_what_the_engine_refuses_has_its_status(http: httpx.Client, stub: StubEngine, api: str) -> None:
    for error in (
        UsageError("This schema cannot be enforced: pattern.", param="schema"),
        PromptTooLong("Needs 9 pages of 8.", needed=9, limit=8),
    ):
        stub.script = [error]
        for stream in (False, True):
            answer = post(http, api, stream=stream)
            assert answer.status_code == 400
            assert str(error) in answer.text


@pytest.mark.parametrize(
    ("api", "beat"),
    [
        ("openai", b": keep-alive"),
        ("responses", b": keep-alive"),
        ("anthropic", b"event: ping"),
        ("ollama", b'"content":""'),
    ],
)
def test_heartbeats_by_the_clock(api: str, beat: bytes) -> None:
    engine = StubEngine()
    gate = asyncio.Event()
    engine.script = [gate, "done"]
    with running(engine, heartbeat_s=0.05) as server, raw_request(server, api, stream=True) as line:
        seen = b""
        while seen.count(beat) < 3:
            seen += line.recv(4096)
        assert b"200 OK" in seen
        server.loop.call_soon_threadsafe(gate.set)
        while b"done" not in seen:
            seen += line.recv(4096)


def test_an_error_after_a_heartbeat_ends_the_stream() -> None:
    engine = StubEngine()
    gate = asyncio.Event()
    engine.script = [gate, EngineFailed("A step failed.")]
    with running(engine, heartbeat_s=0.05) as server, raw_request(server, "openai", stream=True) as line:
        seen = b""
        while b"keep-alive" not in seen:
            seen += line.recv(4096)
        server.loop.call_soon_threadsafe(gate.set)
        while b"A step failed." not in seen:
            piece = line.recv(4096)
            assert piece, "the stream ended without the error"
            seen += piece


def test_a_slow_reader_blocks_nobody_and_is_given_up() -> None:
    engine = StubEngine()
    with (
        running(engine, write_timeout_s=0.5, heartbeat_s=0.2) as server,
        httpx.Client(base_url=server.url, timeout=60, verify=False) as http,
    ):
        # More than sockets take: 200 MB, of which nothing is read.
        engine.script = [Delta("x" * 100_000, (1,))] * 2000
        with raw_request(server, "openai", stream=True):
            eventually(lambda: engine.running == 1, "the stream did not start")
            engine.script = ["quick"]
            assert post(http, "openai").json()["choices"][0]["message"]["content"] == "quick"
            eventually(lambda: engine.running == 0, "the sleeping reader was kept")
        assert len(engine.cancelled) == 1


def test_a_heartbeat_that_nobody_takes_gives_the_reader_up() -> None:
    engine = StubEngine()
    engine.script = [Delta("x" * 32_000_000, (1,)), asyncio.Event()]  # much, then nothing for ever
    with running(engine, write_timeout_s=0.3, heartbeat_s=0.1) as server:
        with raw_request(server, "ollama", stream=True):
            eventually(lambda: engine.running == 1, "the stream did not start")
            eventually(lambda: engine.running == 0, "the sleeping reader was kept")
        assert len(engine.cancelled) == 1


def test_last_words_that_nobody_takes_are_given_up() -> None:
    engine = StubEngine()
    engine.script = [Delta("x" * 32_000_000, (1,)), EngineFailed("A step failed.")]
    with running(engine, write_timeout_s=0.3, heartbeat_s=0.1) as server:
        tasks = server.tasks()
        with raw_request(server, "openai", stream=True):
            eventually(lambda: len(engine.seen) == 1 and engine.running == 0, "the stream did not start")
            eventually(lambda: server.tasks() <= tasks, "the answer waits for its reader for ever")


def test_500_connections_that_drop_leave_nothing(
    server: RunningServer, stub: StubEngine, http: httpx.Client
) -> None:
    stub.script = ["tick ", 0.002] * 1000
    post(http, "openai", max_tokens=1)
    tasks, draws = server.tasks(), random.Random(4)
    apis = list(APIS)

    def client(number: int) -> None:
        for i in range(25):
            chance = random.Random(number * 100 + i)
            try:
                with raw_request(server, chance.choice(apis), stream=chance.random() < 0.7) as line:
                    line.settimeout(0.02)
                    for _ in range(chance.randrange(4)):
                        line.recv(chance.choice([1, 100, 4096]))
            except OSError:
                pass

    threads = [threading.Thread(target=client, args=(draws.randrange(10**6),)) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    eventually(lambda: stub.running == 0, "a generation stayed behind")
    eventually(lambda: server.tasks() <= tasks, f"{server.tasks() - tasks} tasks stayed behind")
    assert all(entry.users == 0 for entry in server.models.loaded)
    assert server.app.state.service.working == 0
    stub.script = ["fine"]
    assert post(http, "openai").json()["choices"][0]["message"]["content"] == "fine"


def test_many_at_once(server: RunningServer, stub: StubEngine) -> None:
    stub.script = lambda request: [f"seed {request.params.seed} ", 0.01, "end"]

    async def ask(client: httpx.AsyncClient, seed: int) -> str:
        path, base = APIS["openai"]
        events = data_of(await client.post(path, json={**base, "seed": seed, "stream": True}))
        return "".join(c["delta"].get("content") or "" for e in events[:-1] for c in e["choices"])

    async def all_of_them() -> list[str]:
        async with httpx.AsyncClient(base_url=server.url, timeout=30, verify=False) as client:
            return await asyncio.gather(*(ask(client, seed) for seed in range(64)))

    assert asyncio.run(all_of_them()) == [f"seed {seed} end" for seed in range(64)]


def test_an_answer_that_ends_in_an_error_is_an_error(http: httpx.Client, stub: StubEngine) -> None:
    stub.script = ["half", FinishReason.ERROR]
    answer = post(http, "openai")
    assert answer.status_code == 500
