"""Regions traced back through operations, against doing the operations on whole arrays in NumPy."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxserve.distributed.assemble import Assembler, Unknown
from mlxserve.distributed.slices import Region, elements, through_reshape, whole
from mlxserve.distributed.trace import NotTraceable, trace


class Store:
    """Arrays as a source; counts the elements that are asked for."""

    def __init__(self, arrays: list[np.ndarray]) -> None:
        self.arrays = arrays
        self.elements = 0

    def read(self, source: int, region: Region, out: np.ndarray | None) -> None:
        self.elements += elements(region)
        if out is not None:
            out[...] = self.arrays[source][np.ix_(*region)].view(out.dtype)


def assembled(function: Any, *arrays: np.ndarray) -> tuple[list[np.ndarray], Store]:
    """What the assembler makes of each result, without the function ever seeing a number."""
    placeholders = [mx.zeros(array.shape, mx.array(array).dtype) for array in arrays]
    nodes = trace(function, placeholders)
    store = Store(list(arrays))
    dry = Store(list(arrays))
    assembler, planner = Assembler(store), Assembler(dry, dry=True)
    results = []
    for node in nodes:
        made = assembler.array(node)
        assert made is not None and planner.array(node) is None
        results.append(np.array(made))
    assert dry.elements == store.elements
    return results, store


MOVES = st.sampled_from(
    ["split", "slice", "transpose", "stack", "join", "flat", "fold", "new", "add", "half"]
)


def _move(move: str, x: mx.array, draw: Any) -> mx.array:
    axis = draw(st.integers(0, x.ndim - 1))
    length = x.shape[axis]
    if move == "split" and length % 2 == 0:
        return mx.split(x, 2, axis=axis)[draw(st.integers(0, 1))]
    if move == "slice":
        start, step = draw(st.integers(0, length - 1)), draw(st.integers(1, 2))
        return x[(slice(None),) * axis + (slice(start, None, step),)]
    if move == "transpose":
        return x.transpose(draw(st.permutations(range(x.ndim))))
    if move == "stack":
        return mx.stack([x, x + x], axis=axis)
    if move == "join":
        return mx.concatenate([x, x], axis=axis)
    if move == "flat" and axis < x.ndim - 1:
        return x.flatten(axis, axis + 1)
    if move == "fold" and length % 2 == 0:
        return mx.unflatten(x, axis, (2, length // 2))
    if move == "new":
        return mx.expand_dims(x, axis)
    if move == "add":
        return x + x
    return x / 2 if move == "half" else x


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_chain_of_moves(data: Any) -> None:
    shape = data.draw(st.lists(st.sampled_from([2, 3, 4, 8]), min_size=2, max_size=3))
    array = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    moves = data.draw(st.lists(MOVES, max_size=5))
    choices: list[Any] = []

    def function(x: mx.array) -> list[mx.array]:
        """The moves drawn, the same ones again when it runs on numbers."""
        replay = iter(list(choices))

        def draw(strategy: Any) -> Any:
            if (known := next(replay, None)) is not None:
                return known
            choices.append(data.draw(strategy))
            return choices[-1]

        for move in moves:
            if x.ndim < 5 and x.size:
                x = _move(move, x, draw)
        return [x]

    (made,), _ = assembled(function, array)
    np.testing.assert_array_equal(made, np.array(function(mx.array(array))[0]))


def test_only_what_is_needed_is_read() -> None:
    array = np.arange(64, dtype=np.float32).reshape(8, 8)
    (rows, columns), store = assembled(lambda x: [mx.split(x, 4)[1], mx.split(x[:, :4].T, 2)[1].T], array)
    np.testing.assert_array_equal(rows, array[2:4])
    np.testing.assert_array_equal(columns, array[:, 2:4])
    assert store.elements == 16 + 16


def test_stacked_experts_are_read_expert_by_expert() -> None:
    experts = [np.random.default_rng(n).normal(size=(4, 6)).astype(np.float16) for n in range(3)]
    (made,), store = assembled(lambda *e: [mx.contiguous(mx.split(mx.stack(e), 2, axis=1)[1])], *experts)
    np.testing.assert_array_equal(made, np.stack(experts)[:, 2:])
    assert store.elements == 3 * 12


def test_quantising_reads_only_its_rows_once() -> None:
    array = np.random.default_rng(0).normal(size=(8, 64)).astype(np.float32)

    def function(x: mx.array) -> list[mx.array]:
        return [mx.split(part, 2)[1] for part in mx.quantize(x, 32, 4)]

    (packed, scales, biases), store = assembled(function, array)
    expected = mx.quantize(mx.array(array[4:]), 32, 4)
    for mine, theirs in zip((packed, scales, biases), expected):
        np.testing.assert_array_equal(mine, np.array(theirs))
    assert store.elements == 4 * 64


def test_a_reshape_that_a_cut_goes_across_reads_the_whole() -> None:
    array = np.arange(24, dtype=np.int32).reshape(4, 6)
    (made,), store = assembled(lambda x: [x.reshape(3, 8)[:, 1:3]], array)
    np.testing.assert_array_equal(made, array.reshape(3, 8)[:, 1:3])
    assert store.elements == 24


@pytest.mark.parametrize(
    ("shape", "region", "before", "expected"),
    [
        ((8, 4), (range(2, 4), range(4)), (2, 4, 4), None),
        ((8, 4), (range(4, 8), range(4)), (2, 4, 4), (range(1, 2), range(4), range(4))),
        ((2, 4, 4), (range(1, 2), range(4), range(4)), (8, 4), (range(4, 8), range(4))),
        ((1, 6), (range(1), range(3)), (6,), (range(3),)),
        ((6,), (range(2, 6, 2),), (6, 1), (range(2, 6, 2), range(1))),
        ((3, 8), (range(3), range(1, 3)), (4, 6), None),
    ],
)
def test_regions_through_reshapes(shape: Any, region: Any, before: Any, expected: Any) -> None:
    assert through_reshape(region, shape, before) == expected


def test_nothing_is_allocated_for_a_model_larger_than_memory() -> None:
    mx.reset_peak_memory()
    before = mx.get_active_memory()  # what other tests left
    (node,) = trace(lambda x: [mx.split(x, 2, axis=1)[1]], [mx.zeros((1 << 22, 1 << 22))])
    assert node.shape == (1 << 22, 1 << 21) and mx.get_peak_memory() - before < 1 << 20


def test_what_cannot_be_done_on_a_region_says_so() -> None:
    (node,) = trace(lambda x: [mx.sort(x, axis=0)], [mx.zeros((4, 4))])
    with pytest.raises(Unknown, match="Sort"):
        Assembler(Store([np.zeros((4, 4), np.float32)])).array(node, whole((4, 4)))


def test_a_function_that_evaluates_cannot_be_traced() -> None:
    with pytest.raises(NotTraceable):
        trace(lambda x: [x * x.sum().item()], [mx.zeros((4,))])
