"""Splits: what is written is what is read, and no layer is lost or held twice."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxserve.distributed.split import Split
from mlxserve.errors import UsageError


@given(st.lists(st.integers(1, 40), min_size=2, max_size=8))
def test_every_layer_has_one_rank(layers: list[int]) -> None:
    split = Split.parse("pipeline:" + ",".join(map(str, layers)), sum(layers))
    held = [layer for rank in range(split.size) for layer in split.layers_of(rank)]
    assert held == list(range(sum(layers)))
    assert [len(split.layers_of(rank)) for rank in range(split.size)] == layers
    assert Split.parse(str(split), sum(layers)) == split


@given(st.integers(1, 200), st.integers(1, 16))
def test_even_pipelines_differ_by_one_layer(layers: int, ranks: int) -> None:
    if ranks > layers:
        with pytest.raises(UsageError, match="cannot be divided"):
            Split.parse(f"pipeline:{ranks}", layers)
        return
    split = Split.parse(f"pipeline:{ranks}", layers)
    held = [len(split.layers_of(rank)) for rank in range(ranks)]
    assert sum(held) == layers and max(held) - min(held) <= 1


def test_tensor_splits() -> None:
    split = Split.parse("tensor:4", 80)
    assert (split.mode, split.size, str(split)) == ("tensor", 4, "tensor:4")
    with pytest.raises(UsageError, match="every rank holds all"):
        split.layers_of(0)


@pytest.mark.parametrize("text", ["", "tensor", "tensor:x", "tensor:2,2", "rows:2", "pipeline:", "tensor:0"])
def test_what_is_no_split_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        Split.parse(text, 8)


@pytest.mark.parametrize("text", ["pipeline:3,4", "pipeline:8,0", "pipeline:9"])
def test_a_split_that_does_not_fit_the_model(text: str) -> None:
    with pytest.raises(UsageError):
        Split.parse(text, 8)
