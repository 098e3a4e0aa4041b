"""The container: metadata as the reader package gives it, split files, and files that are not whole."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader, GGUFWriter

from mlxserve.errors import ModelError, ModelInvalid, ModelNotFound, ModelUnsupported
from mlxserve.models.gguf import is_gguf, open_gguf
from mlxserve.models.gguf.file import read_container
from tests.models.gguf import writing
from tests.models.gguf.examples import EXAMPLES, written

RNG = np.random.default_rng(0)


def _write(path: Path, **tensors: np.ndarray) -> Path:
    writer = GGUFWriter(path, "llama")
    writer.add_array("some.strings", ["a", "", "ü漢🙂", "x" * 300])
    writer.add_array("some.integers", [1, -2, 3])
    writer.add_array("some.floats", [0.5, -1.25])
    writer.add_array("some.flags", [True, False])
    writer.add_string("some.text", "größer")
    writer.add_uint64("some.large", 2**40)
    writer.add_float32("some.number", 0.1)
    for name, value in tensors.items():
        writer.add_tensor(name, value)
    writing.finish(writer)
    return path


def _split(folder: Path, parts: int = 3, tensors: int = 5) -> tuple[list[Path], dict[str, np.ndarray]]:
    values = {f"t{i}": RNG.normal(size=(4, 8)).astype(np.float32) for i in range(tensors)}
    writer = GGUFWriter(folder / "model.gguf", "llama", split_max_tensors=-(-tensors // parts))
    writer.add_string("some.text", "first part only")
    for name, value in values.items():
        writer.add_tensor(name, value)
    writing.finish(writer)
    return sorted(folder.glob("*.gguf")), values


def _numbers(path: Path) -> dict[str, np.ndarray]:
    container = read_container(path)
    return {t.name: t.data.view(np.float32).reshape(t.shape) for t in container.tensors.values()}


def test_metadata_equals_the_readers_own(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.gguf", t=np.zeros((2, 4), np.float32))
    reader = GGUFReader(path)
    expected = {k: f.contents() for k, f in reader.fields.items() if not k.startswith("GGUF.")}
    assert dict(read_container(path).metadata) == expected
    assert expected["some.strings"][2] == "ü漢🙂"


def test_tensors_by_name_with_outermost_dimension_first(tmp_path: Path) -> None:
    values = {"a": RNG.normal(size=(3, 5, 4)).astype(np.float32), "b": np.ones(7, np.float16)}
    container = read_container(_write(tmp_path / "a.gguf", **values))
    assert {name: t.shape for name, t in container.tensors.items()} == {"a": (3, 5, 4), "b": (7,)}
    a = container.tensors["a"]
    assert a.type.name == "F32" and a.data.shape == (3, 5, 16) and a.data.dtype == np.uint8
    np.testing.assert_array_equal(a.data.view(np.float32).reshape(3, 5, 4), values["a"])


def test_split_files_are_read_as_one(tmp_path: Path) -> None:
    parts, values = _split(tmp_path)
    assert len(parts) == 3
    file = open_gguf(parts[0])
    assert file.paths == tuple(parts) and file.metadata["some.text"] == "first part only"
    found = _numbers(parts[0])
    assert found.keys() == values.keys()
    for name, value in values.items():
        np.testing.assert_array_equal(found[name], value)


def test_case_48_part_two_of_a_split_file(tmp_path: Path) -> None:
    parts, _ = _split(tmp_path)
    with pytest.raises(ModelInvalid, match=rf"{parts[1].name} is part 2 .* {parts[0].name}"):
        open_gguf(parts[1])


def test_case_48_a_missing_part_is_named(tmp_path: Path) -> None:
    parts, _ = _split(tmp_path)
    parts[2].unlink()
    with pytest.raises(ModelInvalid, match=rf"{parts[2].name} is missing"):
        open_gguf(parts[0])


def test_a_renamed_part_is_recognised(tmp_path: Path) -> None:
    parts, _ = _split(tmp_path)
    later = parts[1].rename(tmp_path / "later.gguf")
    first = parts[0].rename(tmp_path / "first.gguf")
    with pytest.raises(ModelInvalid, match="later.gguf says that it is part 2 of 3"):
        open_gguf(later)
    with pytest.raises(ModelInvalid, match="first.gguf says that it is part 1 of 3"):
        open_gguf(first)


def test_parts_of_different_models_are_refused(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    parts, _ = _split(tmp_path / "one", tensors=6)
    others, _ = _split(tmp_path / "two", tensors=5)
    parts[2].write_bytes(others[2].read_bytes())
    with pytest.raises(ModelInvalid, match="promises 6 tensors"):
        open_gguf(parts[0])


def test_every_cut_of_a_file_is_noticed(tmp_path: Path) -> None:
    whole = _write(tmp_path / "whole.gguf", t=np.ones((4, 32), np.float32)).read_bytes()
    cut = tmp_path / "cut.gguf"
    lengths = range(1, len(whole) - 1, 7)
    for length in lengths:
        cut.write_bytes(whole[:length])
        with pytest.raises(ModelInvalid, match="cut.gguf") as caught:
            open_gguf(cut)
        assert "\n" not in caught.value.message
    assert len(lengths) > 50


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_flipped_bytes_never_raise_anything_but_a_model_error(tmp_path: Path) -> None:
    """Header bytes of a sound file changed at random: it is refused in words, or still makes sense."""
    _, path = written(EXAMPLES["llama"], tmp_path)
    sound, header = path.read_bytes(), GGUFReader(path).data_offset
    rng, refused = random.Random(5), 0
    for _ in range(300):
        damaged = bytearray(sound)
        for _ in range(rng.choice((1, 1, 2, 4))):
            damaged[rng.randrange(8, header)] = rng.choice((0, 1, 255, rng.randrange(256)))
        path.write_bytes(damaged)
        try:
            open_gguf(path).weights()
        except ModelError as error:
            refused += 1
            assert "\n" not in error.message
    assert refused > 100


def test_no_file_and_no_gguf(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="nowhere.gguf"):
        open_gguf(tmp_path / "nowhere.gguf")
    other = tmp_path / "other.gguf"
    for content in (b"", b"GG", b"PK\x03\x04" * 10):
        other.write_bytes(content)
        assert not is_gguf(other)
        with pytest.raises(ModelInvalid, match="other.gguf is not a GGUF file"):
            open_gguf(other)


@pytest.mark.parametrize(
    ("version", "order", "words"), [(9, "little", "version 9"), (3, "big", "other byte order")]
)
def test_versions_that_cannot_be_read(version: int, order: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "new.gguf"
    path.write_bytes(b"GGUF" + version.to_bytes(4, order) + bytes(64))  # type: ignore[arg-type]
    with pytest.raises(ModelUnsupported, match=words):
        open_gguf(path)


def test_rows_that_are_no_whole_blocks_are_refused(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.gguf", t=np.zeros((2, 33), np.float32))
    damaged = bytearray(path.read_bytes())
    name = damaged.index(b"\x01\x00\x00\x00\x00\x00\x00\x00t")
    kind = name + 9 + 4 + 16  # behind name, number of dimensions and both dimensions
    damaged[kind] = 8  # Q8_0, blocks of 32
    path.write_bytes(damaged)
    with pytest.raises(ModelInvalid, match=r"a\.gguf"):
        open_gguf(path)
