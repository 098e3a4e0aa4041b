"""The fused mixture kernels on this CPU against NumPy products of dequantised experts."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlxserve.kernels_metal import moe
from mlxserve.kernels_metal.experts import AFFINE_BITS, AffineExperts, BlockExperts, Experts
from tests.kernels_metal.gguf_samples import random_blocks, truth
from tests.kernels_metal.products import CASES, assert_close, vectors
from tests.metal import harness

EXPERTS = 5


def affine(rows: int, columns: int, bits: int, group_size: int, dtype: mx.Dtype, seed: int) -> Experts:
    weights = np.random.default_rng(seed).standard_normal((EXPERTS, rows, columns)).astype(np.float32)
    parts = mx.quantize(mx.array(weights).astype(dtype), group_size=group_size, bits=bits)
    return AffineExperts(*parts, group_size=group_size, bits=bits)


def blocks(rows: int, columns: int, kind: str, seed: int) -> Experts:
    return BlockExperts(mx.array(random_blocks(kind, (EXPERTS, rows), columns, seed)), kind)


def matrices(experts: Experts) -> np.ndarray:
    """float32 [E, N, K]."""
    if isinstance(experts, BlockExperts):
        return truth(np.array(experts.blocks), experts.kind)
    operands = [experts.words, experts.scales.astype(mx.float32), experts.biases.astype(mx.float32)]
    return np.array(mx.dequantize(*operands, group_size=experts.group_size, bits=experts.bits))


def choices(tokens: int, slots: int) -> np.ndarray:
    """Distinct experts for each token, int32 [tokens, slots]."""
    generator = np.random.default_rng(tokens)
    return np.stack([generator.permutation(EXPERTS)[:slots] for _ in range(tokens)]).astype(np.int32)


def gate_up_oracle(
    x: np.ndarray, indices: np.ndarray, gate: np.ndarray, up: np.ndarray, activation: str
) -> np.ndarray:
    gated = np.einsum("xk,xjfk->xjf", x, gate[indices]).astype(np.float64)
    inner = np.sqrt(2 / np.pi) * (gated + 0.044715 * gated**3)
    joined = gated / (1 + np.exp(-gated)) if activation == "silu" else 0.5 * gated * (1 + np.tanh(inner))
    return joined * np.einsum("xk,xjfk->xjf", x, up[indices])


def check_gate_up(gate: Experts, up: Experts, dtype: mx.Dtype, tokens: int, order: str, act: str) -> None:
    x, indices = vectors(tokens, gate.columns, dtype) / 8, choices(tokens, 2)
    result = harness.run(moe.gate_up, x, mx.array(indices), gate, up, act, order=order)
    right = gate_up_oracle(np.array(x.astype(mx.float32)), indices, matrices(gate), matrices(up), act)
    assert_close(result.outputs[0], right, dtype)
    reference = moe.gate_up_reference(x.astype(mx.float32), mx.array(indices), gate, up, act)
    assert_close(np.array(reference), right, dtype)
    check_traffic(result, ("gate", "up"), indices)


def check_traffic(result: harness.Result, names: tuple[str, ...], indices: np.ndarray) -> None:
    """Each pair reads its expert once; no memory is shared, nobody waits."""
    for name in names:
        weights = result.counters.traffic[name]
        assert weights.read <= 1.05 * weights.size / EXPERTS * indices.size
    assert result.counters.threadgroup_bytes == result.counters.barriers == 0


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(("dtype", "tokens", "order"), CASES)
@pytest.mark.parametrize("bits", AFFINE_BITS)
def test_gate_up_affine(bits: int, dtype: mx.Dtype, tokens: int, order: str, rows: int = 13) -> None:
    group_size = 32 if bits == 3 else 64
    parts = [affine(rows, 192, bits, group_size, dtype, seed) for seed in (1, 2)]
    check_gate_up(parts[0], parts[1], dtype, tokens, order, "silu")


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "Q8_0"])
def test_gate_up_blocks(kind: str) -> None:
    check_gate_up(blocks(13, 768, kind, 1), blocks(13, 768, kind, 2), mx.float16, 9, "forward", "gelu")


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(("dtype", "tokens", "order"), CASES)
@pytest.mark.parametrize("kind", [4, 6, "Q4_K", "Q3_K"])
def test_down(kind: int | str, dtype: mx.Dtype, tokens: int, order: str, rows: int = 13) -> None:
    experts = blocks(rows, 768, kind, 3) if isinstance(kind, str) else affine(rows, 192, kind, 64, dtype, 3)
    indices = choices(tokens, 3)
    h = vectors(tokens * 3, experts.columns, dtype).reshape(tokens, 3, -1)
    scores = mx.softmax(vectors(tokens, 3, mx.float32), axis=-1)
    result = harness.run(moe.down, h, mx.array(indices), scores, experts, order=order)
    weights = matrices(experts)[indices]
    right = np.einsum("xjf,xjnf,xj->xn", np.array(h.astype(mx.float32)), weights, np.array(scores))
    assert_close(result.outputs[0], right, dtype)
    reference = moe.down_reference(h.astype(mx.float32), mx.array(indices), scores, experts)
    assert_close(np.array(reference), right, dtype)
    check_traffic(result, ("down",), indices)


def test_operands_that_do_not_go_together_are_refused() -> None:
    x, indices = mx.zeros((2, 192)), mx.zeros((2, 2), mx.int32)
    four, eight = affine(8, 192, 4, 64, mx.float32, 1), affine(8, 192, 8, 64, mx.float32, 1)
    for call in (
        lambda: moe.gate_up(x, indices, four, eight),
        lambda: moe.gate_up(x[:, :64], indices, four, four),
        lambda: moe.gate_up(x, indices[:1], four, four),
        lambda: moe.down(x[None], indices, mx.zeros((2, 2)), four),
        lambda: AffineExperts(four.words, four.scales[:, :4], four.biases, 64, 4),
        lambda: AffineExperts(four.words, four.scales, four.biases, 64, 7),
    ):
        with pytest.raises(ValueError, match=r"must|do not go|no kernel"):
            call()
