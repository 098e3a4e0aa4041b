"""Running a command in this process: its exit code, and what it said where."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from mlxserve.cli.main import main


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
