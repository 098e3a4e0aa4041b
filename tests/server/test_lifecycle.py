"""Start and stop as a process: signals in mid-stream, a bounded drain, a free port, a dead engine."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from mlxserve.config import ServerConfig
from mlxserve.errors import UsageError
from mlxserve.server.awake import Awake
from mlxserve.server.lifecycle import allow_many_connections, bind, check_tls
from tests.conftest import ROOT

CHAT = {"model": "stub", "messages": [{"role": "user", "content": "hi"}], "stream": True}


PEM = Path(__file__).with_name("localhost.pem")
LOCKED_KEY = """\
-----BEGIN EC PRIVATE KEY-----
Proc-Type: 4,ENCRYPTED
DEK-Info: AES-256-CBC,C4B8B65E5012F3533CF007CA476DA3EF

fltoFuMwWh95LKlbngnnKdd+1reIPkA9jYkAoNx9xEiH4vcf7B+YSVgphQ4Z7aNM
TKjDxLOyzeT9u/mjuX3LS9OFli0NsONRQ60VWqGm2dkC0yHM1/IXCQ5XsWpfon18
4kL/JmtYMeRkG5HqnF8wa68KJBs7l4xrrPhdCw3yJEE=
-----END EC PRIVATE KEY-----
"""


class Process:
    """The stub server as a child."""

    def __init__(self, drain_s: float, *more: str) -> None:
        command = [sys.executable, "-m", "tests.server.serve_stub", "0", str(drain_s), *more]
        self.child = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self.child.stdout is not None
        self.port = int(self.child.stdout.readline())
        self.url = f"http://127.0.0.1:{self.port}"
        while port_is_free(self.port):
            assert self.child.poll() is None
            time.sleep(0.02)

    def stream(self) -> socket.socket:
        """A running stream, its first words read."""
        body = json.dumps(CHAT).encode()
        line = socket.create_connection(("127.0.0.1", self.port), timeout=60)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        line.sendall(head.encode() + body)
        seen = b""
        while b"tick" not in seen:
            seen += line.recv(4096)
        return line

    def ended(self) -> int:
        return self.child.wait(60)


@contextlib.contextmanager
def process(drain_s: float = 15.0, *more: str) -> Iterator[Process]:
    made = Process(drain_s, *more)
    try:
        yield made
    finally:
        made.child.kill()
        made.child.communicate()


def rest_of(line: socket.socket) -> bytes:
    seen = b""
    while piece := line.recv(65536):
        seen += piece
    return seen


def port_is_free(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return False
    return True


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_case_24_a_signal_drains(number: signal.Signals) -> None:
    with process() as server:
        line = server.stream()
        with httpx.Client(base_url=server.url, timeout=60, verify=False) as http:
            os.kill(server.child.pid, number)
            while http.get("/ready").status_code == 200:
                time.sleep(0.01)
            refused = http.post("/v1/chat/completions", json=CHAT)
            assert refused.status_code == 503
            assert refused.headers["retry-after"]
            assert http.get("/health").status_code == 200
        assert b"data: [DONE]" in rest_of(line)  # the running answer came to its end
        assert server.ended() == 0
        assert port_is_free(server.port)


def test_case_24_the_drain_is_bounded() -> None:
    with process(drain_s=0.2) as server:
        line = server.stream()
        os.kill(server.child.pid, signal.SIGTERM)
        rest = rest_of(line)
        assert b"The engine was closed." in rest
        assert b"[DONE]" not in rest
        assert server.ended() == 0


def test_case_24_a_second_signal_does_not_wait() -> None:
    with process(drain_s=600) as server:
        server.stream()
        os.kill(server.child.pid, signal.SIGINT)
        time.sleep(0.1)
        os.kill(server.child.pid, signal.SIGINT)
        assert server.ended() == 0


def test_case_22_a_dead_engine_ends_the_process() -> None:
    with process() as server:
        dying = {**CHAT, "messages": [{"role": "user", "content": "die"}], "max_tokens": 3}
        httpx.post(f"{server.url}/v1/chat/completions", json=dying, timeout=60)
        assert server.ended() == 70
        assert port_is_free(server.port)


def test_tls() -> None:
    with process(1.0, str(PEM)) as server:
        trusting = ssl.create_default_context(cafile=str(PEM))
        url = f"https://localhost:{server.port}"
        answer = httpx.post(f"{url}/v1/chat/completions", json={**CHAT, "max_tokens": 3}, verify=trusting)
        assert answer.text.endswith("data: [DONE]\n\n")
        with pytest.raises(httpx.ConnectError, match="certificate"):
            httpx.get(f"{url}/health", timeout=60)  # whoever does not know the certificate
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"http://localhost:{server.port}/health", timeout=60)


def test_bad_tls_files_are_one_sentence(tmp_path: Path) -> None:
    check_tls(ServerConfig())
    check_tls(ServerConfig(tls_certificate=PEM, tls_key=PEM))
    nonsense = tmp_path / "x.pem"
    nonsense.write_text("x")
    locked = tmp_path / "locked.pem"
    locked.write_text(LOCKED_KEY)
    for certificate, key in ((nonsense, PEM), (PEM, nonsense), (PEM, tmp_path / "nothing"), (PEM, locked)):
        with pytest.raises(UsageError) as caught:
            check_tls(ServerConfig(tls_certificate=certificate, tls_key=key))
        assert str(key) in str(caught.value)


def test_more_files_may_be_open_than_macos_begins_with() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
        allow_many_connections()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= min(1024, before[0])
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[1] == before[1]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_taken_port_is_one_sentence() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=str(port)):
            bind(ServerConfig(port=port))


def test_a_mac_is_kept_awake_while_it_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log"
    program = tmp_path / "caffeinate"
    program.write_text(f'#!/bin/sh\necho "$@" >> {log}\nexec sleep 60\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    awake = Awake(enabled=True)
    with awake.hold():
        child = awake._process
        assert child is not None
        with awake.hold():
            assert awake._process is child  # one is enough
        assert child.poll() is None
        while not log.exists():
            time.sleep(0.01)
    assert child.poll() is not None
    assert log.read_text() == f"-i -w {os.getpid()}\n"


def test_elsewhere_nothing_is_started() -> None:
    awake = Awake(enabled=False)
    with awake.hold():
        assert awake._process is None
