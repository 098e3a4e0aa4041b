"""Running a command in this process: its exit code, what it said where, and on which model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from mlxserve.cli import common
from mlxserve.cli.main import main
from mlxserve.config import EngineConfig, LoadConfig
from tests.cli.fake_llm import FakeLLM


class Said(NamedTuple):
    code: int
    out: str
    err: str

    def json(self) -> Any:
        return json.loads(self.out)


Run = Callable[..., Said]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*arguments: str) -> Said:
        capsys.readouterr()
        code = main(list(arguments))
        return Said(code, *capsys.readouterr())

    return call


class Opened:
    """The fake, and how it was opened."""

    def __init__(self) -> None:
        self.llm = FakeLLM()
        self.model = ""
        self.load = LoadConfig()
        self.engine = EngineConfig()
        self.adapter: Path | None = None

    @contextmanager
    def __call__(
        self, model: str, load: LoadConfig, engine: EngineConfig, adapter: Path | None = None
    ) -> Iterator[FakeLLM]:
        self.model, self.load, self.engine, self.adapter = model, load, engine, adapter
        yield self.llm


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Opened:
    opened = Opened()
    monkeypatch.setattr(common, "open_llm", opened)
    return opened
