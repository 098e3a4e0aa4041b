"""The troubleshooting page against the program: every sentence it quotes is said, every flag exists."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

import click
import httpx
import pytest

from mlxserve.cli.main import COMMANDS
from mlxserve.config import LoadConfig, ServerConfig
from mlxserve.errors import MlxServeError
from mlxserve.models.load import load_folder
from mlxserve.models.memory import Estimate
from mlxserve.models.resolve import resolve
from mlxserve.server.lifecycle import bind
from tests import tiny
from tests.conftest import ROOT
from tests.server.stub import RunningServer, StubEngine, make_tokenizer, running

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
QUOTES = re.findall(r"^> (.+)$", PAGE, flags=re.M)
REFUSING = "{{ raise_exception('roles must alternate') }}"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running(StubEngine(context=64)) as found:
        yield found


def _asked(server: RunningServer, host: str | None = None, **fields: object) -> str:
    """The message of the error that a chat with these fields meets."""
    body = {"model": "stub", "messages": [{"role": "user", "content": "hi"}], **fields}
    headers = {"host": host} if host else {}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, headers=headers, timeout=60)
    assert answer.status_code >= 400
    return str(answer.json()["error"]["message"])


def _folder(path: Path) -> Path:
    """A model folder with a configuration and no weights."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(tiny.config("llama")))
    return path


def _said(work: Callable[[], object]) -> str:
    with pytest.raises(MlxServeError) as caught:
        work()
    return caught.value.message


def _load(path: Path) -> object:
    return load_folder(resolve(str(path)).path, LoadConfig())


def _unknown_architecture(path: Path, server: RunningServer) -> str:
    folder = tiny.write(path / "m", tokenizer=False)
    (folder / "config.json").write_text(json.dumps({**tiny.config("llama"), "model_type": "tomorrow"}))
    return _said(lambda: _load(folder))


def _incomplete(path: Path, server: RunningServer) -> str:
    folder = _folder(path / "m")
    (folder / "model-1.safetensors").write_bytes(b"")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return _said(lambda: _load(folder))


def _pickles(path: Path, server: RunningServer) -> str:
    folder = _folder(path / "m")
    (folder / "pytorch_model.bin").write_bytes(b"")
    return _said(lambda: _load(folder))


def _too_large(path: Path, server: RunningServer) -> str:
    return _said(lambda: Estimate(1 << 40, 1 << 30, 4096, 1 << 33).require("a model"))


def _refusing_template(path: Path, server: RunningServer) -> str:
    tokenizer = make_tokenizer(REFUSING)
    return _said(lambda: tokenizer.encode_chat([{"role": "user", "content": "hi"}]))


def _taken_port(path: Path, server: RunningServer) -> str:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        return _said(lambda: bind(ServerConfig(port=taken.getsockname()[1])))


IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]
PROVOKED: tuple[Callable[[Path, RunningServer], str], ...] = (
    _unknown_architecture,
    _incomplete,
    _pickles,
    _too_large,
    _refusing_template,
    _taken_port,
    lambda path, server: _asked(server, frobnicate=1),
    lambda path, server: _asked(server, messages=IMAGE),
    lambda path, server: _asked(server, host="example.org"),
    lambda path, server: _asked(server, messages=[{"role": "user", "content": "a" * 100}]),
)


def test_every_quoted_sentence_is_said(server: RunningServer, tmp_path: Path) -> None:
    said = []
    for number, provoke in enumerate(PROVOKED):
        place = tmp_path / str(number)
        place.mkdir()
        said.append(provoke(place, server))
    for quote in QUOTES:
        pattern = ".+?".join(re.escape(part) for part in quote.split("…"))
        assert any(re.fullmatch(pattern, sentence) for sentence in said), f"{quote}\nwas not among\n{said}"
    assert len(QUOTES) >= len(PROVOKED)


def _flags() -> set[str]:
    found = {"--debug", "--help"}
    for entry in COMMANDS.values():
        command = getattr(import_module(entry.module), entry.attribute)
        for one in (command, *getattr(command, "commands", {}).values()):
            assert isinstance(one, click.Command)
            found |= {flag for parameter in one.params for flag in parameter.opts}
    return found


@pytest.mark.parametrize(
    "name", ["docs/troubleshooting.md", "docs/concepts.md", "README.md", "CONTRIBUTING.md"]
)
def test_flags_and_commands_that_are_named_exist(name: str) -> None:
    text = (ROOT / name).read_text()
    ours = [line for line in text.split("\n") if "aider" not in line and "pip" not in line]
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", "\n".join(ours)))
    assert named <= _flags()
    for command in re.findall(r"`mlxserve ([a-z]+)\b", text):
        assert command in COMMANDS
