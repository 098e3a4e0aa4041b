"""OpenAI's SDK for Node against the server; the package is installed once into the user's cache folder."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from tests.conftest import require
from tests.server.stub import RunningServer, StubEngine, bag_of_bytes

VERSION = "openai@6"


@pytest.fixture(scope="module")
def sdk() -> Path:
    """A folder whose node_modules holds the SDK."""
    require(
        shutil.which("node") is not None and shutil.which("npm") is not None, "node and npm are not installed"
    )
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "mlxserve-tests" / VERSION.replace("@", "-")
    if not (folder / "node_modules" / "openai").is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "package.json").write_text('{"private": true}')
        command = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", VERSION]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=300)
        require(done.returncode == 0, f"npm could not install {VERSION}: {done.stderr[-300:]}")
    return folder


def test_the_node_sdk(server: RunningServer, stub: StubEngine, sdk: Path) -> None:
    def script(request):  # type: ignore[no-untyped-def]
        long = "long" in stub.tokenizer.decode(request.prompt)
        return ["tick ", 0.01] * 2000 if long else ["Hello", " there", "."]

    stub.script = script
    client = Path(__file__).with_name("node_client.mjs")
    command = ["node", str(client), server.url, str(sdk)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for name in ("whole", "streamed", "final", "response", "completion"):
        assert found[name] == "Hello there.", name
    assert found["tokens"] == len("Hello there.")
    assert found["events"][0] == "response.created"
    assert found["events"][-1] == "response.completed"
    assert found["models"] == ["stub"]
    assert found["embedding"] == pytest.approx(bag_of_bytes(stub.tokenizer.encode("abc")), abs=1e-6)
    assert found["error"] == {"kind": "BadRequestError", "status": 400, "param": "temperature"}
    end = time.monotonic() + 60
    while stub.running:
        assert time.monotonic() < end, "the aborted stream went on"
        time.sleep(0.01)
    assert len(stub.cancelled) == 1
