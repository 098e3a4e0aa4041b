"""Fetching from a Hub, with huggingface_hub's own client against a server on this machine."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from safetensors.numpy import save

from mlxserve.errors import (
    DoesNotFit,
    ModelError,
    ModelGated,
    ModelInvalid,
    ModelNotFound,
    ModelUnsupported,
    UsageError,
)
from mlxserve.models import cached, hub, transfer
from mlxserve.models.cached import HubName, find, list_cached, parse_hub_name, remove
from mlxserve.models.describe import describe
from mlxserve.models.files import INDEX, TensorInfo, inspect
from mlxserve.models.hub import pull, pull_part
from mlxserve.models.resolve import look_for, resolve
from mlxserve.models.transfer import Progress
from tests.models.fake_hub import FakeHub, serve, use

WEIGHTS = save({"a": np.arange(2000, dtype=np.float32)})
MORE = save({"b": np.arange(3000, dtype=np.float32)})
GGUF = b"GGUF" + bytes(range(256)) * 16
MODEL = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "tokenizer_config.json": b'{"a": 1}',
    "chat_template.jinja": b"{{ messages }}",
    "model.safetensors": WEIGHTS,
    "pytorch_model.bin": b"\x80" * 5000,
    "modeling_own.py": b"raise SystemExit",
    "README.md": b"# words",
    "onnx/model.onnx": b"x" * 2000,
}
NEEDED = {
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "model.safetensors",
}
ORG = HubName("org/model")


class Place(NamedTuple):
    hub: FakeHub
    cache: Path

    def files(self) -> set[str]:
        """What stands in the model's snapshots."""
        folder = self.cache / "models--org--model" / "snapshots"
        return {path.relative_to(folder).as_posix().split("/", 1)[1] for path in folder.rglob("*.*")}


@pytest.fixture(scope="module")
def server() -> Iterator[FakeHub]:
    with serve() as running:
        yield running


@pytest.fixture
def place(server: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    server.repos.clear()
    server.break_off.clear()
    server.requests.clear()
    server.status, server.ignore_ranges = 0, False
    use(monkeypatch, server.url, tmp_path / "cache")
    return Place(server, tmp_path / "cache")


def _silent(done: int, total: int) -> None:
    pass


def obtain(name: HubName, progress: Progress) -> Path:
    return resolve(str(name), progress).path


def _sharded(absent: bool = False) -> dict[str, bytes]:
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    index = json.dumps({"metadata": {}, "weight_map": names}).encode()
    files = {name: content for name, content in MODEL.items() if name != "model.safetensors"}
    files |= {INDEX: index, names["a"]: WEIGHTS, "consolidated.safetensors": MORE}
    return files if absent else {**files, names["b"]: MORE}


def test_only_the_files_needed_arrive(place: Place) -> None:
    place.hub.add("org/model", MODEL)
    folder = pull(ORG, _silent)
    assert place.files() == place.hub.fetched() == NEEDED
    assert inspect(folder).tensors["a"].shape == (2000,)
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS


def test_huggingface_hub_finds_what_was_fetched(place: Place) -> None:
    """The cache is the standard one: the library's own offline look-up returns the same folder."""
    from huggingface_hub import snapshot_download, try_to_load_from_cache

    place.hub.add("org/model", MODEL)
    folder = pull(ORG, _silent)
    assert snapshot_download("org/model", local_files_only=True, allow_patterns=sorted(NEEDED)) == str(folder)
    assert try_to_load_from_cache("org/model", "model.safetensors") == str(folder / "model.safetensors")


def test_sharded_weights_are_those_of_the_index(place: Place) -> None:
    place.hub.add("org/model", _sharded())
    folder = pull(ORG, _silent)
    assert set(inspect(folder).tensors) == {"a", "b"}
    assert "consolidated.safetensors" not in place.hub.fetched()


def test_case_48_an_index_on_the_hub_names_an_absent_shard(place: Place) -> None:
    place.hub.add("org/model", _sharded(absent=True))
    with pytest.raises(ModelInvalid, match=r"model-00002-of-00002\.safetensors.*absent"):
        pull(ORG, _silent)
    assert find(ORG) is None


def test_what_is_complete_is_not_asked_for_again(place: Place) -> None:
    place.hub.add("org/model", MODEL)
    folder = obtain(ORG, _silent)
    place.hub.requests.clear()
    assert obtain(ORG, _silent) == folder
    assert place.hub.requests == []


def test_pull_brings_a_new_revision(place: Place) -> None:
    place.hub.add("org/model", MODEL)
    old = pull(ORG, _silent)
    place.hub.add("org/model", {**MODEL, "config.json": b'{"model_type": "qwen3"}'}, commit="d" * 40)
    place.hub.requests.clear()
    new = pull(ORG, _silent)
    assert new != old and inspect(new).config["model_type"] == "qwen3"
    assert place.hub.transfers("model.safetensors") == []  # the same bytes as before
    assert find(ORG) == new and find(HubName("org/model", "c0ffee" + "0" * 34)) == old


def test_progress_ends_at_the_total(place: Place) -> None:
    place.hub.add("org/model", _sharded())
    seen: list[tuple[int, int]] = []
    pull(ORG, lambda done, total: seen.append((done, total)))
    size = len(WEIGHTS) + len(MORE)
    assert seen[-1] == (size, size) and all(total == size for _, total in seen)


def test_a_transfer_that_breaks_off_goes_on(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "CHUNK", 512)
    place.hub.add("org/model", MODEL)
    place.hub.break_off["model.safetensors"] = [3000, 2000]
    seen: list[int] = []
    folder = pull(ORG, lambda done, total: seen.append(done))
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    ranges = place.hub.transfers("model.safetensors")
    assert ranges[0] == "" and len(ranges) == 3 and all(span.startswith("bytes=") for span in ranges[1:])
    assert seen == sorted(seen) and seen[-1] == len(WEIGHTS)


def test_a_broken_off_download_is_not_a_model_and_resumes_in_a_later_run(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "CHUNK", 512)
    monkeypatch.setattr(transfer, "ATTEMPTS", 1)
    place.hub.add("org/model", MODEL)
    place.hub.break_off["model.safetensors"] = [3000, 0]
    with pytest.raises(ModelError, match="broke off .* goes on where it stopped"):
        pull(ORG, _silent)
    assert find(ORG) is None and "model.safetensors" not in place.files()
    [partial] = (place.cache / "models--org--model" / "blobs").glob("*.incomplete")
    arrived = partial.stat().st_size
    assert 0 < arrived <= 3000

    place.hub.requests.clear()
    folder = pull(ORG, _silent)
    assert place.hub.transfers("model.safetensors") == [f"bytes={arrived}-"]
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert not list((place.cache / "models--org--model" / "blobs").glob("*.incomplete"))


def test_a_server_without_ranges_starts_over(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "CHUNK", 512)
    place.hub.add("org/model", MODEL)
    place.hub.break_off["model.safetensors"] = [3000]
    place.hub.ignore_ranges = True
    seen: list[int] = []
    folder = pull(ORG, lambda done, total: seen.append(done))
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS and seen[-1] == len(WEIGHTS)


def test_damaged_bytes_are_thrown_away(place: Place) -> None:
    repo = place.hub.add("org/model", MODEL)
    blobs = place.cache / "models--org--model" / "blobs"
    blobs.mkdir(parents=True)
    remote = hub.look_up(ORG)
    sha256 = remote.files["model.safetensors"][1]
    (blobs / f"{sha256}.incomplete").write_bytes(b"wrong" * 100)
    with pytest.raises(ModelInvalid, match="damaged: its checksum differs"):
        pull(ORG, _silent)
    assert find(ORG) is None and not list(blobs.glob("*.incomplete"))
    assert (pull(ORG, _silent) / "model.safetensors").read_bytes() == repo.files["model.safetensors"]


def test_one_failure_stops_the_other_transfers(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "ATTEMPTS", 1)
    place.hub.add("org/model", _sharded())
    place.hub.break_off["model-00001-of-00002.safetensors"] = [0]
    with pytest.raises(ModelError, match="broke off"):
        pull(ORG, _silent)
    assert find(ORG) is None


def test_a_missing_repository(place: Place) -> None:
    with pytest.raises(ModelNotFound, match="no model 'org/absent' on the Hub, or it is private.*hf auth"):
        pull(HubName("org/absent"), _silent)
    assert not place.cache.exists() or not list_cached()


def test_a_missing_revision(place: Place) -> None:
    place.hub.add("org/model", MODEL)
    with pytest.raises(ModelNotFound, match="no revision 'v9'"):
        pull(HubName("org/model", "v9"), _silent)


def test_a_gated_repository(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.hub.add("org/model", MODEL, gated=True)
    with pytest.raises(ModelGated, match="accept its terms on .*org/model.*HF_TOKEN"):
        pull(ORG, _silent)
    assert find(ORG) is None
    monkeypatch.setenv("HF_TOKEN", "hf_good")
    assert (pull(ORG, _silent) / "model.safetensors").read_bytes() == WEIGHTS


def test_the_hub_is_down(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.hub.status = 503
    with pytest.raises(ModelError, match="answered 503"):
        pull(ORG, _silent)


def test_no_network(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, "http://127.0.0.1:9", place.cache)
    with pytest.raises(ModelError, match="not in the cache, and the Hub cannot be reached"):
        obtain(ORG, _silent)


def test_offline_uses_the_cache_and_asks_nobody(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    place.hub.add("org/model", MODEL)
    folder = pull(ORG, _silent)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    place.hub.requests.clear()
    assert obtain(ORG, _silent) == folder
    with pytest.raises(ModelNotFound, match="org/other is not in the cache .* HF_HUB_OFFLINE"):
        obtain(HubName("org/other"), _silent)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelNotFound, match="not completely in the cache"):
        obtain(ORG, _silent)
    assert place.hub.requests == []


def test_a_full_disk_is_refused_before_anything_is_fetched(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.hub.add("org/model", MODEL)
    monkeypatch.setattr(hub, "free_disk", lambda: 100)
    with pytest.raises(DoesNotFit, match=r"needs 8,\d+ bytes more .* has 100 bytes free") as caught:
        pull(ORG, _silent)
    assert caught.value.needed_bytes == len(WEIGHTS) and caught.value.available_bytes == 100
    assert place.hub.transfers("model.safetensors") == []


def test_a_disk_that_fills_up_on_the_way(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.hub.add("org/model", MODEL)

    def full(self: Any, piece: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(transfer._Partial, "append", full)
    with pytest.raises(DoesNotFit, match="more on the disk"):
        pull(ORG, _silent)
    assert find(ORG) is None


def test_pickles_alone_are_refused(place: Place) -> None:
    place.hub.add("org/model", {name: MODEL[name] for name in ("config.json", "pytorch_model.bin")})
    with pytest.raises(ModelUnsupported, match=r"org/model holds its weights only as pickles"):
        pull(ORG, _silent)
    assert place.hub.fetched() == set()


def test_no_weights_at_all(place: Place) -> None:
    place.hub.add("org/model", {"README.md": b"words"})
    with pytest.raises(ModelInvalid, match="no weights"):
        pull(ORG, _silent)


@pytest.mark.parametrize("files", [MODEL, _sharded()], ids=["single", "sharded"])
def test_a_model_is_described_before_it_is_fetched(files: dict[str, bytes], place: Place) -> None:
    place.hub.add("org/model", files)
    found = describe("org/model")
    assert find(ORG) is None and not list_cached()
    assert found.path is None and found.architecture == "llama" and found.is_defined
    pull(ORG, _silent)
    here = describe("org/model")
    assert here.path is not None and (here.weights, here.types) == (found.weights, found.types)
    assert here.weights.parameters == (2000 if files is MODEL else 5000)


def test_a_gguf_is_described_only_here(place: Place) -> None:
    place.hub.add("org/model", QUANTS)
    with pytest.raises(ModelUnsupported, match="mlxserve models pull org/model:Q8_0"):
        describe("org/model:Q8_0")


QUANTS = {"m-Q4_K_M.gguf": GGUF, "m-Q8_0.gguf": GGUF + b"8", "mmproj-m.gguf": GGUF + b"v", "README.md": b"x"}
SPLIT = {f"Q2/m-Q2_K-0000{n}-of-00002.gguf": GGUF + bytes([n]) for n in (1, 2)}


@pytest.mark.parametrize("wanted", ["m-Q4_K_M.gguf", "Q4_K_M", "q4_k_m"])
def test_a_gguf_by_file_or_quantisation(wanted: str, place: Place) -> None:
    place.hub.add("org/model", QUANTS)
    path = pull(HubName("org/model", file=wanted), _silent)
    assert path.name == "m-Q4_K_M.gguf" and path.read_bytes() == GGUF
    assert place.hub.fetched() == {"m-Q4_K_M.gguf"}
    assert find(HubName("org/model", file=wanted)) == path


def test_several_ggufs_ask_for_one(place: Place) -> None:
    place.hub.add("org/model", QUANTS)
    with pytest.raises(UsageError, match=r"several GGUF files.*'org/model:m-Q4_K_M\.gguf'.*m-Q8_0\.gguf"):
        pull(ORG, _silent)
    with pytest.raises(
        ModelInvalid, match=r"no 'Q5_0' in org/model:Q5_0; it has m-Q4_K_M\.gguf, m-Q8_0\.gguf"
    ):
        pull(HubName("org/model", file="Q5_0"), _silent)


def test_a_split_gguf_comes_whole(place: Place) -> None:
    place.hub.add("org/model", {**QUANTS, **SPLIT})
    path = pull(HubName("org/model", file="Q2_K"), _silent)
    assert path.name == "m-Q2_K-00001-of-00002.gguf"
    assert sorted(file.name for file in path.parent.iterdir()) == [name.split("/")[1] for name in SPLIT]
    with pytest.raises(UsageError, match="00001"):
        pull(HubName("org/model", file="m-Q2_K-00002-of-00002.gguf"), _silent)


def test_a_split_gguf_with_a_part_gone_is_not_complete(place: Place) -> None:
    place.hub.add("org/model", SPLIT)
    path = pull(ORG, _silent)
    assert find(ORG) == path
    (path.parent / "m-Q2_K-00002-of-00002.gguf").unlink()
    assert find(ORG) is None
    assert [model.kind for model in list_cached()] == ["incomplete"]


def test_list_and_remove(place: Place) -> None:
    place.hub.add("org/model", MODEL)
    place.hub.add("org/ggufs", QUANTS)
    pull(ORG, _silent)
    for quant in ("Q4_K_M", "Q8_0"):
        pull(HubName("org/ggufs", file=quant), _silent)
    rows = {model.name: (model.kind, model.nbytes) for model in list_cached()}
    small = sum(len(MODEL[name]) for name in NEEDED)
    assert rows == {
        "org/ggufs:m-Q4_K_M.gguf": ("gguf", len(GGUF)),
        "org/ggufs:m-Q8_0.gguf": ("gguf", len(GGUF) + 1),
        "org/model": ("safetensors", small),
    }
    assert remove(HubName("org/ggufs", file="Q8_0")) == len(GGUF) + 1
    assert [model.name for model in list_cached()] == ["org/ggufs:m-Q4_K_M.gguf", "org/model"]
    assert remove(ORG) == small
    assert [model.name for model in list_cached()] == ["org/ggufs:m-Q4_K_M.gguf"]
    with pytest.raises(ModelNotFound, match="nothing of org/model"):
        remove(ORG)


def test_removing_takes_half_arrived_files_along(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "ATTEMPTS", 1)
    monkeypatch.setattr(transfer, "CHUNK", 512)
    place.hub.add("org/model", MODEL)
    place.hub.break_off["model.safetensors"] = [3000, 0]
    with pytest.raises(ModelError):
        pull(ORG, _silent)
    assert [(model.name, model.kind) for model in list_cached()] == [("org/model", "incomplete")]
    assert remove(ORG) > 2000
    assert list_cached() == [] and not (place.cache / "models--org--model").exists()


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("org/name", HubName("org/name")),
        ("org/name@v1.0", HubName("org/name", "v1.0")),
        ("org/name@refs/pr/3", HubName("org/name", "refs/pr/3")),
        ("org/name:Q4_K_M", HubName("org/name", None, "Q4_K_M")),
        ("org/name@main:sub/x.gguf", HubName("org/name", "main", "sub/x.gguf")),
        ("https://huggingface.co/org/name/", HubName("org/name")),
        ("hf.co/org/name:Q8_0", HubName("org/name", None, "Q8_0")),
        ("name", None),
        ("a/b/c", None),
        ("../name", None),
        ("org/name@../../etc", None),
        ("org/", None),
        ("", None),
    ],
)
def test_hub_names(text: str, name: HubName | None) -> None:
    assert parse_hub_name(text) == name


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import subprocess
    import sys

    code = "from mlxserve.models.cached import cache_folder; print(cache_folder())"
    environment = {"HF_HUB_CACHE": str(tmp_path), "PYTHONPATH": str(Path(cached.__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str(tmp_path)


def test_a_part_is_fetched_by_what_the_headers_say_and_is_no_model(place: Place) -> None:
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    weights = {file: save({tensor: np.ones((40, 40), np.float32)}) for tensor, file in names.items()}
    place.hub.add("org/model", {**_sharded(absent=True), **weights})

    def choose(folder: Path, tensors: dict[str, TensorInfo]) -> list[str]:
        assert (folder / "config.json").is_file() and tensors["b"].shape == (40, 40)
        return [str(tensors["b"].file)]

    folder = pull_part(ORG, choose, _silent)
    assert (folder / names["b"]).read_bytes() == weights[names["b"]]
    assert not (folder / names["a"]).exists() and (folder / "tokenizer.json").is_file()
    assert isinstance(look_for("org/model"), HubName), "what is incomplete is not taken for the model"
    assert resolve("org/model", _silent).path == folder and (folder / names["a"]).exists()
