"""Regions out of safetensors files, against NumPy's slices of the same arrays."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxserve.distributed.reader import TensorReader, empty_like, region_key
from mlxserve.distributed.slices import elements
from mlxserve.errors import ModelInvalid
from mlxserve.models.files import read_header

ARRAYS = {
    "matrix": np.arange(48, dtype=np.float32).reshape(6, 8),
    "experts": np.random.default_rng(0).integers(0, 2**32, (3, 4, 6), np.uint32),
    "vector": np.arange(5, dtype=np.float16),
    "number": np.float32(7).reshape(()),
}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reader") / "model.safetensors"
    mx.save_safetensors(str(path), {name: mx.array(value) for name, value in ARRAYS.items()})
    return path


def _axis(length: int) -> st.SearchStrategy[range]:
    bounds = st.tuples(st.integers(0, length), st.integers(0, length), st.integers(1, 3))
    return bounds.map(lambda b: range(min(b[:2]), max(b[:2]), b[2]))


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_any_region(file: Path, data: Any) -> None:
    name = data.draw(st.sampled_from(sorted(ARRAYS)))
    array = ARRAYS[name]
    region = tuple(data.draw(_axis(length)) for length in array.shape)
    tensors = read_header(file)
    with TensorReader(tensors) as reader:
        out = empty_like(tensors[name], region)
        turned = np.empty(out.shape[::-1], out.dtype).T  # a place that is not contiguous
        reader.read(name, region, out)
        assert reader.bytes_read == elements(region) * array.itemsize
        reader.read(name, region, turned)
    expected = array[np.ix_(*region)] if array.ndim else array
    np.testing.assert_array_equal(out.view(array.dtype), expected)
    np.testing.assert_array_equal(turned, out)
    key = region_key(name, region, array.shape)
    assert reader.digests[key] == hashlib.sha256(expected.tobytes()).hexdigest()[:32]
    assert (key == name) == (elements(region) == array.size)


def test_a_digest_alone_is_the_same(file: Path) -> None:
    tensors, region = read_header(file), (range(1, 3), range(4), range(0, 6, 2))
    with TensorReader(tensors) as reading, TensorReader(tensors) as hashing:
        reading.read("experts", region, empty_like(tensors["experts"], region))
        hashing.digest("experts", region)
    assert reading.digests == hashing.digests and list(reading.digests) == ["experts[1:3,0:4,0:6:2]"]


def test_a_file_cut_short_while_open_is_named(file: Path, tmp_path: Path) -> None:
    copy = tmp_path / "short.safetensors"
    copy.write_bytes(file.read_bytes())
    tensors = read_header(copy)
    with copy.open("r+b") as handle:
        handle.truncate(tensors["matrix"].start + 4)
    region = (range(6), range(8))
    with TensorReader(tensors) as reader, pytest.raises(ModelInvalid, match="short.safetensors ends before"):
        reader.read("matrix", region, empty_like(tensors["matrix"], region))
