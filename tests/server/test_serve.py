"""`mlxserve serve` and `mlxserve service`: flags, the file, a real start, launchd's property list."""

from __future__ import annotations

import os
import plistlib
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from click.testing import CliRunner

from mlxserve.cli import service as service_module
from mlxserve.cli.main import cli, main
from mlxserve.cli.serve import Plan, make_plan
from mlxserve.config import EngineConfig, LoadConfig, ServerConfig
from mlxserve.errors import UsageError
from tests.conftest import ROOT


def plan_of(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Plan:
    """The plan that the command makes of its arguments."""
    plans: list[Plan] = []
    monkeypatch.setattr("mlxserve.cli.serve._start", plans.append)
    result = CliRunner().invoke(cli, ["serve", *arguments], catch_exceptions=False, standalone_mode=False)
    assert result.exit_code == 0, result.output
    return plans[0]


def test_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(monkeypatch)
    assert [choice.name for choice in plan.models] == ["smollm2"]
    assert plan.server.data_dir is not None and plan.server.data_dir.name == "mlxserve"
    server = replace(plan.server, data_dir=None)
    assert (server, plan.load, plan.engine) == (ServerConfig(), LoadConfig(), EngineConfig())


def test_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(
        monkeypatch,
        *("--model", "a", "--model", "b", "--pin", "--host", "0.0.0.0", "--port", "9"),
        *("--api-key", "k", "--memory", "24GiB", "--keep-alive", "10m", "--drain", "0"),
        *(
            "--max-sequences",
            "7",
            "--kv-bits",
            "8",
            "--context",
            "100",
            "--log-prompts",
            "--cache-bytes",
            "1.5M",
        ),
    )
    assert [(choice.name, choice.pin) for choice in plan.models] == [("a", True), ("b", True)]
    server = plan.server
    assert (server.host, server.port, server.api_keys, server.drain_s) == ("0.0.0.0", 9, ("k",), 0)
    assert (server.memory_bytes, server.keep_alive_s, server.log_prompts) == (24 << 30, 600, True)
    assert (plan.engine.max_sequences, plan.engine.kv_bits, plan.engine.cache_bytes) == (7, 8, 3 << 19)
    assert plan.load.context == 100


FILE = """
models: [a, {name: ./b, pin: true}]
server: {port: 1234, api_keys: [x, y], keep_alive_s: null, log_format: json, tls_certificate: c.pem, tls_key: k.pem}
load: {context: 50, dtype: float32}
engine: {kv_bits: 4, max_queue: 3, cache_dir: /tmp/x}
"""


def test_a_file_and_flags_over_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(FILE)
    plan = plan_of(monkeypatch, "--config", str(path))
    assert [(choice.name, choice.pin) for choice in plan.models] == [("a", False), ("./b", True)]
    assert (plan.server.port, plan.server.api_keys, plan.server.keep_alive_s) == (1234, ("x", "y"), None)
    assert plan.server.tls_key == Path("k.pem")
    assert (plan.load.context, plan.load.dtype) == (50, "float32")
    assert (plan.engine.kv_bits, plan.engine.max_queue, plan.engine.cache_dir) == (4, 3, Path("/tmp/x"))
    plan = plan_of(
        monkeypatch,
        "--config",
        str(path),
        "--port",
        "5",
        "--model",
        "c",
        "--kv-bits",
        "16",
        "--max-queue",
        "9",
    )
    assert (plan.server.port, plan.server.api_keys) == (5, ("x", "y"))
    assert [choice.name for choice in plan.models] == ["c"]
    assert (plan.engine.kv_bits, plan.engine.max_queue, plan.load.context) == (16, 9, 50)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("servr: {}", "servr"),
        ("server: {prot: 1}", "server.prot"),
        ("server: {port: high}", "server.port"),
        ("engine: {kv_bits: eight}", "engine.kv_bits"),
        ("load: [1]", "load"),
        ("models: {a: b}", "models"),
        ("models: [{pin: true}]", "name"),
        ("server: {port: 1", "YAML"),
        ("- a", "list"),
        ("server: {port: 70000}", "server.port"),
        ("server: {heartbeat_s: 0}", "server.heartbeat_s"),
        ("server: {drain_s: .nan}", "server.drain_s"),
        ("server: {keep_alive_s: -1}", "server.keep_alive_s"),
        ("server: {memory_bytes: 0}", "server.memory_bytes"),
        ("server: {log_format: xml}", "server.log_format"),
        ("engine: {kv_bits: 5}", "engine.kv_bits"),
        ("engine: {page_size: 0}", "engine.page_size"),
        ("engine: {max_queue: -1}", "engine.max_queue"),
        ("load: {dtype: int3}", "load.dtype"),
        ("load: {quantize_bits: 7}", "load.quantize_bits"),
        ("load: {context: 0}", "load.context"),
    ],
)
def test_a_wrong_file_is_one_sentence(tmp_path: Path, text: str, word: str) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        make_plan([], False, path, {}, LoadConfig(), EngineConfig(), set())
    assert str(path) in str(caught.value)
    assert word in str(caught.value)


def test_a_file_may_say_every_setting(tmp_path: Path) -> None:
    """What `config` says itself is legal, so no default is out of the ranges that a file is held to."""
    sections = {"server": ServerConfig(), "load": LoadConfig(), "engine": EngineConfig()}
    said = {
        name: {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(kind).items()}
        for name, kind in sections.items()
    }
    path = tmp_path / "serve.yaml"
    path.write_text(yaml.safe_dump(said))
    plan = make_plan([], False, path, {}, LoadConfig(), EngineConfig(), set())
    assert {field: getattr(plan.engine, field) for field in said["engine"]} == said["engine"]
    assert plan.load == LoadConfig()
    assert plan.server.heartbeat_s == ServerConfig().heartbeat_s


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--memory", "lots"], "24GiB"),
        (["--keep-alive", "soon"], "10m"),
        (["--tls-key", __file__], "--tls-certificate"),
        (["--config", "/nowhere/x.yaml"], "/nowhere/x.yaml"),
        (["--port", "99999"], "port"),
        (["--api-key", ""], "API key"),
        (["--api-key", "clé"], "API key"),
        (["--api-key", "two words"], "API key"),
        (["--cors-origin", "https://page.example/"], "https://page.example/"),
        (["--cors-origin", "page.example"], "page.example"),
    ],
)
def test_wrong_flags_are_one_sentence(
    arguments: list[str], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", *arguments]) == 2
    shown = capsys.readouterr().err
    assert word in shown
    assert "Traceback" not in shown


def test_a_real_start_and_stop(tiny_llama: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "mlxserve", "serve", "--model", str(tiny_llama), "--port", str(port)]
    settings = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    child = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=settings)
    try:
        url = f"http://127.0.0.1:{port}"
        while True:
            assert child.poll() is None, child.stderr.read() if child.stderr else ""
            try:
                assert httpx.get(f"{url}/ready", timeout=60).json()["models"] == ["llama"]
                break
            except httpx.ConnectError:
                time.sleep(0.1)
        body = {"model": "llama", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()
        assert answer["usage"]["completion_tokens"] == 3
        taken = subprocess.run(command, capture_output=True, text=True, env=settings, check=False)
        assert taken.returncode == 2
        assert f"port {port}" in taken.stderr
        assert "Traceback" not in taken.stderr
        child.send_signal(signal.SIGTERM)
        assert child.wait(30) == 0
    finally:
        child.kill()
        _, shown = child.communicate()
    assert f"Listening on {url}" in shown
    assert "POST /v1/chat/completions 200" in shown
    assert "Traceback" not in shown


# -- launchd ----------------------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(service_module.shutil, "which", lambda name: None)
    return tmp_path


def test_install_status_uninstall(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["service", "status"]) == 2
    assert main(["service", "install", "--model", "smollm2", "--port", "8080"]) == 0
    path = home / "Library" / "LaunchAgents" / "io.mlxserve.serve.plist"
    agent = plistlib.loads(path.read_bytes())
    assert agent["ProgramArguments"] == [
        sys.executable, "-m", "mlxserve", "serve", "--model", "smollm2", "--port", "8080"
    ]  # fmt: skip
    assert agent["KeepAlive"] == {"SuccessfulExit": False}
    assert agent["RunAtLoad"] is True
    assert agent["WorkingDirectory"] == os.getcwd()  # launchd's own is /, where no relative path is right
    assert Path(agent["StandardErrorPath"]).parent.is_dir()
    assert path.stat().st_mode & 0o077 == 0
    capsys.readouterr()
    assert main(["service", "status"]) == 0
    assert "serve --model smollm2 --port 8080" in capsys.readouterr().out
    assert main(["service", "uninstall"]) == 0
    assert not path.exists()
    assert main(["service", "uninstall"]) == 2


def test_a_key_in_the_environment_is_not_lost_silently(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLXSERVE_API_KEY", "s3cret")
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    assert main(["service", "install"]) == 0
    assert "MLXSERVE_API_KEY is not written" in capsys.readouterr().err
    written = (home / "Library" / "LaunchAgents" / "io.mlxserve.serve.plist").read_bytes()
    assert b"s3cret" not in written
    assert plistlib.loads(written)["EnvironmentVariables"]["XDG_DATA_HOME"] == "/data"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--prot", "1"],
        ["--port", "high"],
        ["--api-key", "secret"],
        ["--api-key=secret"],
        ["--config", "/nowhere/serve.yaml"],
    ],
)
def test_what_serve_would_refuse_is_refused_at_once(home: Path, arguments: list[str]) -> None:
    assert main(["service", "install", *arguments]) == 2
    assert not (home / "Library" / "LaunchAgents").exists()


def test_launchctl_is_told(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        told.append(command)
        return subprocess.CompletedProcess(command, 0, "\tstate = running\n", "")

    monkeypatch.setattr(service_module.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(service_module.subprocess, "run", run)
    target, path = f"gui/{os.getuid()}", home / "Library" / "LaunchAgents" / "io.mlxserve.serve.plist"
    assert main(["service", "install"]) == 0
    assert main(["service", "install"]) == 0
    assert main(["service", "status"]) == 0
    assert main(["service", "uninstall"]) == 0
    assert [command[1:] for command in told] == [
        ["bootstrap", target, str(path)],
        ["bootout", f"{target}/io.mlxserve.serve"],
        ["bootstrap", target, str(path)],
        ["print", f"{target}/io.mlxserve.serve"],
        ["bootout", f"{target}/io.mlxserve.serve"],
    ]
