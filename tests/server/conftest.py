"""One server with one stub engine for the tests of a file; each test begins with a fresh engine state."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

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
