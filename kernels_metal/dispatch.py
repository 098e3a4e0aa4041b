"""The one place that decides what runs an operation: our Metal kernel, or the reference in plain MLX.

Knows: which kernels exist for what, and whether they may run here. Knows nothing of how either works.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from mlxserve.kernels_metal import gguf_blocks, gguf_reference, moe, reference, switch
from mlxserve.kernels_metal import paged_attention as paged
from mlxserve.kernels_metal import sample as sampling
from mlxserve.kernels_metal.experts import Experts
from mlxserve.kernels_metal.plan import AttentionPlan, Pages
from mlxserve.kernels_metal.sample_host import sample_on_host


def paged_attention(
    q: mx.array,
    k_pages: Pages,
    v_pages: Pages,
    plan: AttentionPlan,
    *,
    scale: float,
    sinks: mx.array | None = None,
    softcap: float | None = None,
) -> mx.array:
    """Attention of `plan`'s query rows over paged keys and values.

    q: [Tq, HQ, D]; k_pages: [NB, BS, HKV, D]; v_pages: [NB, BS, HKV, DV], plain or QuantisedPages; HQ is a
    multiple of HKV. sinks: [HQ], a logit a head that takes weight and adds nothing (gpt-oss). softcap:
    scores become softcap * tanh(score / softcap) (gemma 2). Returns [Tq, HQ, DV] in q's dtype.
    """
    names = ("paged_decode", "paged_prefill")
    kernels = frozenset(name for name in names if switch.enabled(name))
    options: dict[str, Any] = {"scale": scale, "sinks": sinks, "softcap": softcap}
    if kernels and paged.serves(q, k_pages, v_pages):
        return paged.paged_attention(q, k_pages, v_pages, plan, kernels=kernels, **options)
    return reference.paged_attention(q, k_pages, v_pages, plan, **options)


def gguf_matmul(x: mx.array, blocks: mx.array, kind: str) -> mx.array:
    """x [..., K] times the transpose of GGUF blocks uint8 [N, row bytes] -> [..., N] in x's dtype."""
    product = gguf_blocks.matmul if switch.enabled("gguf") else gguf_reference.matmul
    return product(x, blocks, kind)


def gguf_gather_matmul(
    x: mx.array, blocks: mx.array, indices: mx.array, kind: str, sorted_indices: bool = False
) -> mx.array:
    """Row p // (P / X) of x [X, K] times expert indices[p] of blocks uint8 [E, N, row bytes] -> [P, N]."""
    product = gguf_blocks.gather_matmul if switch.enabled("gguf") else gguf_reference.gather_matmul
    return product(x, blocks, indices, kind, sorted_indices)


def gguf_dequantize(blocks: mx.array, kind: str) -> mx.array:
    """blocks uint8 [..., row bytes] -> float32 [..., K]; for few rows, such as an embedding's."""
    return gguf_reference.dequantize(blocks, kind)


def moe_gate_up(
    x: mx.array, indices: mx.array, gate: Experts, up: Experts, activation: moe.Activation = "silu"
) -> mx.array:
    """activation(x gate^T) * (x up^T) for the experts indices [X, k] of each row of x [X, K] -> [X, k, F]."""
    run = moe.gate_up if switch.enabled("moe") else moe.gate_up_reference
    return run(x, indices, gate, up, activation)


def moe_down(h: mx.array, indices: mx.array, scores: mx.array, experts: Experts) -> mx.array:
    """The sum over k of scores [X, k] times h [X, k, F] through experts indices [X, k] -> [X, N]."""
    run = moe.down if switch.enabled("moe") else moe.down_reference
    return run(h, indices, scores, experts)


def sample(logits: mx.array, params: mx.array, u: mx.array) -> tuple[mx.array, mx.array]:
    """Draw one token a row: (token int32 [B], logprob float32 [B]); the definition is in sample.py.

    logits [B, V] of any floating type; params float32 [B, 4] = (temperature, top_k, top_p, min_p);
    u float32 [B] in [0, 1). On a CPU `logits` are awaited.
    """
    if switch.enabled("sample"):
        return sampling.sample_kernel(logits, params, u)
    if mx.default_device() == mx.Device(mx.cpu):
        return sample_on_host(logits, params, u)
    return sampling.sample_reference(logits, params, u)
