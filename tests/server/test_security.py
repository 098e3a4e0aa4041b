"""Who may call, and with how much."""

from __future__ import annotations

import socket
import time
from typing import Any

import httpx
import pytest
from starlette.datastructures import Headers

from mlxserve.config import ServerConfig
from mlxserve.server.faults import NotAuthorized
from mlxserve.server.lifecycle import warnings_for
from mlxserve.server.security import KeyRing, host_name, is_loopback
from tests.server.stub import StubEngine, running

CHAT = {"model": "stub", "messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "Bearer one"},
        {"Authorization": "bearer two"},
        {"x-api-key": "two"},
        {"api-key": "one"},
    ],
)
def test_any_of_the_keys_opens(headers: dict[str, str]) -> None:
    KeyRing(["one", "two"]).check(Headers(headers))


@pytest.mark.parametrize(
    "headers",
    [{}, {"authorization": "one"}, {"authorization": "Basic one"}, {"x-api-key": "on"}, {"x-api-key": ""},
     {"authorization": "Bearer "}, {"authorization": "Bearer ünknown"}],
)  # fmt: skip
def test_nothing_else_opens(headers: dict[str, str]) -> None:
    with pytest.raises(NotAuthorized):
        KeyRing(["one", "two"]).check(Headers(raw=[(k.encode(), v.encode()) for k, v in headers.items()]))


def test_a_server_with_a_key() -> None:
    with (
        running(api_keys=("secret",)) as server,
        httpx.Client(base_url=server.url, timeout=60, verify=False) as http,
    ):
        for path, shape in [
            ("/v1/chat/completions", lambda e: e["error"]["code"] == "invalid_api_key"),
            ("/v1/messages", lambda e: e["error"]["type"] == "authentication_error"),
            ("/api/chat", lambda e: "API key" in e["error"]),
        ]:
            answer = http.post(path, json=CHAT)
            assert answer.status_code == 401
            assert shape(answer.json())
            assert http.post(path, json=CHAT, headers={"x-api-key": "wrong"}).status_code == 401
        good = {"authorization": "Bearer secret"}
        assert http.post("/v1/chat/completions", json=CHAT, headers=good).status_code == 200
        # What a supervisor asks, and the page, are open; numbers are not.
        assert http.get("/health").status_code == 200
        assert http.get("/").status_code == 200
        assert http.get("/metrics").status_code == 401
        assert http.get("/v1/models").status_code == 401


@pytest.mark.parametrize(
    "name", ["localhost", "127.0.0.1", "127.8.8.8", "[::1]", "::1", "LOCALHOST", "a.localhost"]
)
def test_loopback_names(name: str) -> None:
    assert is_loopback(name)


@pytest.mark.parametrize(
    "name", ["", "example.com", "0.0.0.0", "192.168.1.2", "localhost.example.com", "127.0.0.1.nip.io"]
)
def test_other_names(name: str) -> None:
    assert not is_loopback(name)


@pytest.mark.parametrize(
    ("header", "name"),
    [
        ("localhost:8080", "localhost"),
        ("[::1]:80", "::1"),
        ("Example.COM", "example.com"),
        ("", ""),
        ("[", ""),
    ],
)
def test_host_names(header: str, name: str) -> None:
    assert host_name(header) == name


def test_dns_rebinding_is_refused() -> None:
    with (
        running(allowed_hosts=("mac.local",)) as server,
        httpx.Client(base_url=server.url, timeout=60, verify=False) as http,
    ):

        def status(**headers: str) -> int:
            return http.post("/v1/chat/completions", json=CHAT, headers=headers).status_code

        assert status(Host=f"localhost:{server.port}") == 200
        assert status(Host="mac.local:8080") == 200
        assert status(Host="evil.example:8080") == 403
        assert status(Host="") == 403
        # A page elsewhere posts without asking first.
        assert status(Origin="https://evil.example") == 403
        assert status(Origin="null") == 403
        assert status(Origin=server.url) == 200


def test_cors_is_off_unless_asked_for() -> None:
    ask = {"Origin": "https://page.example", "Access-Control-Request-Method": "POST"}
    with running() as server:
        answer = httpx.options(f"{server.url}/v1/chat/completions", headers=ask, timeout=60)
        assert "access-control-allow-origin" not in answer.headers
    with running(cors_origins=("https://page.example",), api_keys=("k",)) as server:
        answer = httpx.options(f"{server.url}/v1/chat/completions", headers=ask, timeout=60)
        assert answer.headers["access-control-allow-origin"] == "https://page.example"
        sent = httpx.post(
            f"{server.url}/v1/chat/completions",
            json=CHAT,
            headers={"Origin": "https://page.example", "x-api-key": "k"},
            timeout=60,
        )
        assert sent.status_code == 200
        assert sent.headers["access-control-allow-origin"] == "https://page.example"
        other = httpx.options(
            f"{server.url}/v1/models", headers={**ask, "Origin": "https://evil.example"}, timeout=60
        )
        assert "access-control-allow-origin" not in other.headers


def test_body_limit() -> None:
    with (
        running(max_body_bytes=1000) as server,
        httpx.Client(base_url=server.url, timeout=60, verify=False) as http,
    ):
        long = {**CHAT, "messages": [{"role": "user", "content": "x" * 2000}]}
        answer = http.post("/v1/chat/completions", json=long)
        assert answer.status_code == 413
        assert "1000" in answer.json()["error"]["message"]

        def chunks() -> Any:
            yield b'{"model": "'
            for _ in range(100):
                yield b"x" * 100

        # Chunked, so that no header tells the length.
        assert http.post("/v1/chat/completions", content=chunks()).status_code == 413
        assert http.post("/v1/chat/completions", json=CHAT).status_code == 200


def test_a_body_that_never_comes() -> None:
    with running(body_timeout_s=0.2) as server, socket.create_connection(("127.0.0.1", server.port)) as line:
        line.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50\r\n\r\n{")
        started = time.monotonic()
        line.settimeout(60)
        assert line.recv(4096).startswith(b"HTTP/1.1 408")
        assert time.monotonic() - started < 60


def test_warnings() -> None:
    assert warnings_for(ServerConfig()) == []
    assert any("API key" in text for text in warnings_for(ServerConfig(host="0.0.0.0")))
    assert not any("API key" in text for text in warnings_for(ServerConfig(host="0.0.0.0", api_keys=("k",))))


def test_unknown_paths_and_methods() -> None:
    with running() as server, httpx.Client(base_url=server.url, timeout=60, verify=False) as http:
        assert http.get("/v1/nothing").status_code == 404
        assert http.get("/v1/nothing").json()["error"]["code"] == "not_found"
        assert http.get("/v1/chat/completions").status_code == 405
        assert http.get("/v1/chat/completions").headers["allow"] == "POST"
        assert http.get("/static/..%2fapp.py").status_code == 404
        assert http.get("/static/app.py").status_code == 404
        assert http.get("/static/" + "a" * 300 + ".js").status_code == 404
        assert http.get("/static/a%00.js").status_code == 404


def test_tokens_of_the_engine_never_leak_into_errors() -> None:
    engine = StubEngine()
    engine.script = [RuntimeError("secret path /home/me")]
    with running(engine) as server:
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=CHAT, timeout=60)
    assert answer.status_code == 500
    assert "secret" not in answer.text
