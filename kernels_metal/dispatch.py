"""The one place that decides what runs an operation: our Metal kernel, or the reference in plain MLX.

Knows: which kernels exist for what, and whether they may run here. Knows nothing of how either works.
"""

from __future__ import annotations

import mlx.core as mx

from mlxserve.kernels_metal import reference
from mlxserve.kernels_metal.plan import AttentionPlan, Pages


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
    return reference.paged_attention(q, k_pages, v_pages, plan, scale=scale, sinks=sinks, softcap=softcap)
