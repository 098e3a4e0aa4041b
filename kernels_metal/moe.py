"""A mixture's feed-forward for few tokens: gate and up in one launch, down with the weighted sum in another.

Knows: tokens, the experts that were chosen for them, and weights. Does not know: how experts are chosen,
or whether Metal is there (dispatch).

`gate_up` and `down` launch kernels; each has a reference of the same signature in plain MLX. A (token,
expert) pair reads its expert's weights once: right for decoding, while prompts of many tokens
are better served by products that sort tokens by expert.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn

from mlxserve.kernels_metal.experts import Experts, header, input_names
from mlxserve.kernels_metal.gguf_blocks import DTYPES
from mlxserve.kernels_metal.source import read

Activation = Literal["silu", "gelu"]
ACTIVATIONS: dict[Activation, tuple[int, Callable[[mx.array], mx.array]]] = {
    "silu": (0, nn.silu),
    "gelu": (1, nn.gelu_approx),
}


def gate_up(
    x: mx.array, indices: mx.array, gate: Experts, up: Experts, activation: Activation = "silu"
) -> mx.array:
    """activation(x gate^T) * (x up^T) for each token's experts.

    x [X, K]; indices [X, k] of experts; gate and up [E, F, K], stored alike. Returns [X, k, F] in x's dtype.
    """
    _check_gate_up(x, indices, gate, up)
    tokens, slots = indices.shape
    return _kernel("moe_gate_up", gate.kind)(
        inputs=[x, indices.astype(mx.int32), *gate.inputs(), *up.inputs()],
        template=[("T", x.dtype), ("ACTIVATION", ACTIVATIONS[activation][0]), *gate.template()],
        grid=(32, -(-gate.rows // 8) * 2, tokens * slots),
        threadgroup=(32, 2, 1),
        output_shapes=[(tokens, slots, gate.rows)],
        output_dtypes=[x.dtype],
    )[0]


def down(h: mx.array, indices: mx.array, scores: mx.array, experts: Experts) -> mx.array:
    """The sum of each token's k products h[:, j] experts[indices[:, j]]^T, weighted by its scores.

    h [X, k, F]; indices [X, k]; scores [X, k]; experts [E, N, F]. Returns [X, N] in h's dtype.
    """
    _check_down(h, indices, scores, experts)
    tokens = h.shape[0]
    return _kernel("moe_down", experts.kind)(
        inputs=[h, indices.astype(mx.int32), scores.astype(mx.float32), *experts.inputs()],
        template=[("T", h.dtype), *experts.template()],
        grid=(32, -(-experts.rows // 8) * 2, tokens),
        threadgroup=(32, 2, 1),
        output_shapes=[(tokens, experts.rows)],
        output_dtypes=[h.dtype],
    )[0]


def gate_up_reference(
    x: mx.array, indices: mx.array, gate: Experts, up: Experts, activation: Activation = "silu"
) -> mx.array:
    """`gate_up` in plain MLX."""
    _check_gate_up(x, indices, gate, up)
    flat = indices.flatten()
    gated = ACTIVATIONS[activation][1](gate.product(x, flat))
    return (gated * up.product(x, flat)).reshape(*indices.shape, gate.rows)


def down_reference(h: mx.array, indices: mx.array, scores: mx.array, experts: Experts) -> mx.array:
    """`down` in plain MLX."""
    _check_down(h, indices, scores, experts)
    products = experts.product(h.flatten(0, 1), indices.flatten()).reshape(*indices.shape, experts.rows)
    return (products * scores[..., None]).sum(axis=1).astype(h.dtype)


@cache
def _kernel(body: str, kind: str) -> Any:
    """The kernel `body` for weights stored as `kind`, made once."""
    operands = {"moe_gate_up": ["x", "indices"], "moe_down": ["h", "indices", "scores"]}[body]
    for weights in {"moe_gate_up": ["gate", "up"], "moe_down": ["down"]}[body]:
        operands = [*operands, *input_names(kind, weights)]
    return mx.fast.metal_kernel(
        name=f"{body}_{kind.lower()}_v1",
        input_names=operands,
        output_names=["h" if body == "moe_gate_up" else "y"],
        header=header(kind) + read("activations"),
        source=read(body),
    )


def _check_gate_up(x: mx.array, indices: mx.array, gate: Experts, up: Experts) -> None:
    if (gate.kind, gate.rows, gate.columns, gate.template()) != (up.kind, up.rows, up.columns, up.template()):
        raise ValueError(f"gate and up must be stored alike, not as {gate.kind} and {up.kind}")
    if x.ndim != 2 or x.shape[1] != gate.columns or x.dtype not in DTYPES:
        raise ValueError(f"x must be floating [X, {gate.columns}], not {x.dtype} {x.shape}")
    if indices.ndim != 2 or indices.shape[0] != x.shape[0]:
        raise ValueError(f"indices {indices.shape} must have a row for each of the {x.shape[0]} rows of x")


def _check_down(h: mx.array, indices: mx.array, scores: mx.array, experts: Experts) -> None:
    if h.ndim != 3 or h.shape[2] != experts.columns or h.dtype not in DTYPES:
        raise ValueError(f"h must be floating [X, k, {experts.columns}], not {h.dtype} {h.shape}")
    if indices.shape != h.shape[:2] or scores.shape != h.shape[:2]:
        raise ValueError(f"indices {indices.shape} and scores {scores.shape} must be {h.shape[:2]}")
