"""Folders looked at without loading: against the safetensors library, and with every kind of damage."""

from __future__ import annotations

import json
import math
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save_file

from mlxserve.errors import ModelInvalid, ModelUnsupported
from mlxserve.models.files import (
    INDEX,
    choose_weights,
    inspect,
    read_config,
    read_header,
    refuse_code,
    weight_files,
)


def _model(folder: Path, shards: int = 1) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 2}))
    names = [f"model-{n + 1:05d}-of-{shards:05d}.safetensors" for n in range(shards)]
    names = names if shards > 1 else ["model.safetensors"]
    weight_map = {}
    for number, name in enumerate(names):
        tensors = {f"layers.{number}.weight": np.full((4, 3), number, np.float32)}
        save_file(tensors, folder / name, {"format": "mlx"})
        weight_map |= dict.fromkeys(tensors, name)
    if shards > 1:
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def test_headers_say_what_the_safetensors_library_says(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    arrays = {
        "a": random.standard_normal((3, 5)).astype(np.float32),
        "b": random.standard_normal((7,)).astype(np.float16),
        "c": random.integers(0, 9, (2, 2, 2)).astype(np.uint32),
        "empty": np.zeros((0, 4), np.float32),
        "scalar": np.array(3, np.int8),
    }
    path = tmp_path / "model.safetensors"
    save_file(arrays, path, {"format": "mlx"})
    found = read_header(path)
    with safe_open(path, "numpy") as library:
        assert set(found) == set(library.keys())
        for name, tensor in found.items():
            view = library.get_slice(name)
            assert (list(tensor.shape), tensor.dtype) == (view.get_shape(), view.get_dtype())
    data = path.read_bytes()
    for name, tensor in found.items():
        assert data[tensor.start : tensor.start + tensor.nbytes] == arrays[name].tobytes()


def test_inspect_a_sharded_folder(tmp_path: Path) -> None:
    folder = inspect(_model(tmp_path, shards=3))
    assert [file.name for file in folder.weights] == [
        f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)
    ]
    assert sorted(folder.tensors) == ["layers.0.weight", "layers.1.weight", "layers.2.weight"]
    assert folder.config["model_type"] == "llama"


def test_case_48_index_names_an_absent_shard(tmp_path: Path) -> None:
    folder = _model(tmp_path, shards=2)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelInvalid, match=r"model-00002-of-00002\.safetensors is missing from .*index"):
        weight_files(folder)


@given(cut=st.integers(min_value=0, max_value=400))
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_every_truncation_is_noticed(cut: int, tmp_path: Path) -> None:
    folder = _model(tmp_path / "whole")
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    short = tmp_path / "short.safetensors"
    short.write_bytes(whole[: min(cut, len(whole) - 1)])
    with pytest.raises(ModelInvalid, match=r"short\.safetensors"):
        read_header(short)
    assert read_header(path)


def test_a_file_cut_in_its_data_gives_both_numbers(tmp_path: Path) -> None:
    path = _model(tmp_path) / "model.safetensors"
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(ModelInvalid, match=rf"cut short: .* {size:,} bytes and the file has {size - 5:,}"):
        inspect(tmp_path)


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b'{"a": {}}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [4, 0]}}',
        b'{"a": {"dtype": "Q9", "shape": [1], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": ["x"], "data_offsets": [0, 4]}}',
        b'{"a": 1}',
        b"\xff\xfe{}",
        b"[" * 60_000,
    ],
)
def test_damaged_headers_name_the_file(header: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 16)
    with pytest.raises(ModelInvalid, match="damaged header"):
        read_header(path)


@pytest.mark.parametrize(
    "content", [b"", b"abc", struct.pack("<Q", 2**60) + b"{}", b"<html>nothing here</html>"]
)
def test_what_is_no_safetensors_file(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(ModelInvalid, match=r"model\.safetensors is not a safetensors file"):
        read_header(path)


def test_a_git_lfs_pointer_is_named_as_one(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")
    with pytest.raises(ModelInvalid, match="Git LFS pointer.*git lfs pull"):
        read_header(path)


def test_config_with_tagged_floats(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"a": {"__float__": "Infinity"}, "b": [{"__float__": "NaN"}], "c": 1}'
    )
    config = read_config(tmp_path)
    assert config["a"] == math.inf and math.isnan(config["b"][0]) and config["c"] == 1


@pytest.mark.parametrize("text", ["{", "[1]", "", "\udcff", '{"a": {"__float__": "many"}}'])
def test_a_damaged_config_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ModelInvalid, match=r"config\.json"):
        read_config(tmp_path)


def test_a_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(ModelInvalid, match=r"no config\.json"):
        inspect(tmp_path)


def test_a_models_own_code_is_refused_where_it_would_be_needed(tmp_path: Path) -> None:
    refuse_code({"model_type": "llama", "auto_map": {"AutoModel": "x.Y"}}, "m")
    refuse_code({"model_type": "never_heard_of"}, "m")
    with pytest.raises(ModelUnsupported, match=r"own model code \(mine\.py\)"):
        refuse_code({"model_type": "llama", "model_file": "mine.py"}, "m")
    with pytest.raises(ModelUnsupported, match="'never_heard_of' of m exists only as code.*auto_map"):
        refuse_code({"model_type": "never_heard_of", "auto_map": {"AutoModel": "x.Y"}}, "m")


def test_code_beside_a_model_is_never_run(tmp_path: Path) -> None:
    folder = _model(tmp_path)
    (folder / "modeling.py").write_text("raise SystemExit('was run')")
    config = {"model_type": "llama", "auto_map": {"AutoModel": "modeling.Model"}}
    (folder / "config.json").write_text(json.dumps(config))
    assert inspect(folder).config == config


def test_pickles_alone_are_refused_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80")
    with pytest.raises(ModelUnsupported, match=r"pickles \(pytorch_model\.bin\).*safetensors"):
        inspect(tmp_path)


def test_no_weights_at_all(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelInvalid, match=r"no \.safetensors files"):
        inspect(tmp_path)


@pytest.mark.parametrize(
    "index", ['{"weight_map": {}}', '{"metadata": {}}', '{"weight_map": {"a": "../x.safetensors"}}', "{"]
)
def test_a_bad_index_is_refused(index: str, tmp_path: Path) -> None:
    folder = _model(tmp_path)
    (folder / INDEX).write_text(index)
    with pytest.raises(ModelInvalid):
        inspect(folder)


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        (["model.safetensors", "consolidated.safetensors", "adapters.safetensors"], ["model.safetensors"]),
        (["model.safetensors", "model-00001-of-00002.safetensors"], ["model.safetensors"]),
        (["weights.00.safetensors", "x.json"], ["weights.00.safetensors"]),
        (["1_Dense/model.safetensors", "model.safetensors"], ["model.safetensors"]),
        (["anything.safetensors"], ["anything.safetensors"]),
        (["adapters.safetensors"], []),
    ],
)
def test_which_files_are_the_weights(names: list[str], chosen: list[str]) -> None:
    assert choose_weights(names, None) == chosen


def test_a_tiny_model_of_mlx_lm_is_complete(tiny_llama: Path, tmp_path: Path) -> None:
    folder = inspect(shutil.copytree(tiny_llama, tmp_path / "copy"))
    assert folder.tensors["model.embed_tokens.weight"].shape == (288, 64)
