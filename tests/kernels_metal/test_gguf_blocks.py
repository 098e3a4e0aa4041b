"""The GGUF block kernels on this CPU against the package `gguf`'s dequantiser and a NumPy product."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlxserve.errors import ModelInvalid, ModelUnsupported
from mlxserve.kernels_metal import gguf_blocks
from mlxserve.kernels_metal.gguf_formats import FORMATS
from tests.kernels_metal.gguf_samples import random_blocks, truth
from tests.kernels_metal.products import CASES, assert_close, vectors
from tests.metal import harness

needs_compiler = pytest.mark.usefixtures("compiler")
ORDERS = harness.ORDERS


def product(x: mx.array, blocks: np.ndarray, kind: str) -> np.ndarray:
    return np.array(x.astype(mx.float32)) @ truth(blocks, kind).T


def read_passes(result: harness.Result) -> float:
    """Bytes of weights that the matrix kernel's simdgroups asked for, over what the weights take."""
    weights = result.launches[-1].counters.traffic["w"]
    return weights.read / weights.size


def check_matrix_vector(
    kind: str, dtype: mx.Dtype, count: int, order: harness.Order, columns: int, rows: int = 13
) -> None:
    blocks, x = random_blocks(kind, (rows,), columns), vectors(count, columns, dtype)
    result = harness.run(gguf_blocks.qmv, x, mx.array(blocks), kind, order=order)
    assert_close(result.outputs[0], product(x, blocks, kind), dtype)
    assert read_passes(result) <= 1.01 * -(-count // 8), "a byte is loaded once for 8 vectors"
    assert result.counters.threadgroup_bytes == result.counters.barriers == 0


@needs_compiler
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(("dtype", "count", "order"), CASES)
def test_matrix_vector(kind: str, dtype: mx.Dtype, count: int, order: harness.Order) -> None:
    check_matrix_vector(kind, dtype, count, order, columns=768)


@needs_compiler
@pytest.mark.parametrize("count", range(1, 10))
def test_matrix_vector_for_each_number_of_vectors(count: int) -> None:
    check_matrix_vector("Q6_K", mx.float32, count, ORDERS[count % 3], columns=1280)


@needs_compiler
@pytest.mark.parametrize("columns", [32, 96, 1056])
def test_matrix_vector_of_odd_widths(columns: int) -> None:
    check_matrix_vector("Q5_1", mx.float32, 1, "reverse", columns)


@needs_compiler
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(("dtype", "count", "order"), CASES)
def test_matrix_matrix(kind: str, dtype: mx.Dtype, count: int, order: harness.Order, rows: int = 70) -> None:
    columns = 512 if FORMATS[kind].weights == 256 else 416  # 13 units: the last step is half empty
    blocks, x = random_blocks(kind, (rows,), columns), vectors(32 + count, columns, dtype)
    result = harness.run(gguf_blocks.qmm, x, mx.array(blocks), kind, order=order)
    assert_close(result.outputs[0], product(x, blocks, kind), dtype)
    assert read_passes(result) <= 1.01 * -(-(32 + count) // 32), "a byte is loaded once for 32 vectors"
    assert result.counters.threadgroup_bytes <= 32 * 1024
    assert result.counters.barriers == 2 * -(-columns // 64) + 2


@needs_compiler
@pytest.mark.parametrize(("dtype", "tokens", "order"), CASES)
def test_gathered_matrix_vector(dtype: mx.Dtype, tokens: int, order: harness.Order, rows: int = 13) -> None:
    blocks, x = random_blocks("Q6_K", (5, rows), 512), vectors(tokens, 512, dtype)
    indices = np.random.default_rng(tokens).integers(0, 5, tokens * 3)
    result = harness.run(gguf_blocks.gather_qmv, x, mx.array(blocks), mx.array(indices), "Q6_K", order=order)
    right = np.einsum(
        "pk,pnk->pn", np.repeat(np.array(x.astype(mx.float32)), 3, 0), truth(blocks, "Q6_K")[indices]
    )
    assert_close(result.outputs[0], right, dtype)
    assert read_passes(result) <= 1.01 * len(indices) / 5, "a byte is loaded once for each pair"


@needs_compiler
@pytest.mark.parametrize("kind", ["Q4_K", "IQ4_NL"])
@pytest.mark.parametrize(("dtype", "order"), [(dtype, order) for dtype, _, order in CASES])
def test_gathered_matrix_matrix(kind: str, dtype: mx.Dtype, order: harness.Order, rows: int = 70) -> None:
    """97 pairs in any order: more than two tiles for one expert, less than one for others, none for one."""
    blocks, x = random_blocks(kind, (6, rows), 256), vectors(97, 256, dtype)
    indices = np.random.default_rng(0).choice([0, 1, 3, 4, 5], 97, p=[0.7, 0.1, 0.1, 0.05, 0.05])
    result = harness.run(gguf_blocks.gather_matmul, x, mx.array(blocks), mx.array(indices), kind, order=order)
    right = np.einsum("pk,pnk->pn", np.array(x.astype(mx.float32)), truth(blocks, kind)[indices])
    assert_close(result.outputs[0], right, dtype)
    tiles = (-(-np.bincount(indices) // gguf_blocks.TILE_VECTORS)).sum()
    assert read_passes(result) <= 1.01 * tiles / 6, "an expert's byte is loaded once for its 32 vectors"


@pytest.mark.parametrize("counts", [[0, 1, 32, 33], [31, 0, 0, 64], [1, 0, 0, 0], [0, 0, 0, 5]])
def test_expert_tiles_cover_each_row_once(counts: list[int]) -> None:
    indices = np.repeat(np.arange(4), counts)
    covered = []
    for expert, first, rows in gguf_blocks.expert_tiles(mx.array(indices), 4).tolist():
        assert 0 <= rows <= 32
        assert (indices[first : first + rows] == expert).all()
        covered += range(first, first + rows)
    assert sorted(covered) == list(range(len(indices)))


@pytest.mark.parametrize(
    ("x", "blocks", "words"),
    [
        (mx.zeros((1, 32)), mx.zeros((4, 36), mx.uint8), "64 wide"),
        (mx.zeros((1, 64)), mx.zeros((4, 36), mx.int8), "uint8"),
        (mx.zeros((1, 64), mx.int32), mx.zeros((4, 36), mx.uint8), "floating"),
        (mx.zeros((64,)), mx.zeros((4, 36), mx.uint8), "2 axes"),
        (mx.zeros((0, 64)), mx.zeros((4, 36), mx.uint8), "at least one"),
    ],
)
def test_operands_that_do_not_go_together_are_refused(x: mx.array, blocks: mx.array, words: str) -> None:
    for call in (gguf_blocks.qmv, gguf_blocks.qmm):
        with pytest.raises(ValueError, match=words):
            call(x, blocks, "Q4_0")


def test_damaged_rows_and_unknown_formats_are_refused() -> None:
    with pytest.raises(ModelInvalid, match="18 bytes; a row of 35"):
        gguf_blocks.qmv(mx.zeros((1, 64)), mx.zeros((4, 35), mx.uint8), "Q4_0")
    with pytest.raises(ModelUnsupported, match="IQ1_S"):
        gguf_blocks.qmv(mx.zeros((1, 64)), mx.zeros((4, 36), mx.uint8), "IQ1_S")
    with pytest.raises(ValueError, match="7 indices"):
        gguf_blocks.gather_qmv(
            mx.zeros((2, 32)), mx.zeros((2, 4, 18), mx.uint8), mx.zeros((7,), mx.int32), "Q4_0"
        )
