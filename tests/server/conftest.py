"""One server for the tests of a file: with one stub engine, which begins anew for each test, or with the real one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.server import real as real_engine
from tests.server.stub import RunningServer, StubEngine, bag_of_bytes, running


@pytest.fixture(scope="module")
def _server() -> Iterator[RunningServer]:
    with running(StubEngine(vectors=bag_of_bytes)) as server:
        yield server


@pytest.fixture
def server(_server: RunningServer) -> RunningServer:
    return _server


@pytest.fixture
def stub(server: RunningServer) -> StubEngine:
    """The engine behind `server`, as new."""
    engine = server.loader.engines["stub"]
    engine.script = ["Hello", " there", "."]
    engine.seen.clear()
    engine.cancelled.clear()
    engine.cached_tokens = 0
    engine.generation_defaults = {}
    return engine


@pytest.fixture(scope="module")
def http(_server: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=_server.url, timeout=60, verify=False) as client:
        yield client


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return real_engine.write_model(tmp_path_factory.mktemp("real"))


@pytest.fixture(scope="module")
def real(folder: Path) -> Iterator[RunningServer]:
    server = real_engine.start(folder)
    yield server
    server.stop()
