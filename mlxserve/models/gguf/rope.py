"""Rotary positions in a GGUF file, as the configuration fields that mlx-lm's `initialize_rope` reads.

Knows: base frequency, the scaling types none, linear, yarn and longrope, and factor tensors. Knows nothing
of architectures; those say which scalings their definition carries out.

A file holds Llama 3's scaling as one factor a frequency (`rope_freqs.weight`), not as the parameters they
come from. Those parameters are recognised where they are the published ones; any other factors become
explicit ones, which give the same angles.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from mlxserve.errors import ModelInvalid, ModelUnsupported
from mlxserve.models.gguf.file import TensorInfo
from mlxserve.models.gguf.keys import Keys
from mlxserve.models.gguf.quants import dequantise

FACTORS, LONG_FACTORS, SHORT_FACTORS = (
    "rope_freqs.weight",
    "rope_factors_long.weight",
    "rope_factors_short.weight",
)
FACTOR_TENSORS = frozenset((FACTORS, LONG_FACTORS, SHORT_FACTORS))
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}

Scaling = dict[str, Any]


def read_scaling(
    keys: Keys, tensors: Mapping[str, TensorInfo], *, dims: int, base: float, context: int
) -> Scaling | None:
    """The `rope_scaling` entry for a file, None where frequencies are plain.

    dims: rotated dimensions a head; base: `rope_theta`; context: tokens the model was made for. Where a file
    names no type but has a factor, the factor is linear, as the format's own runtime reads it.
    Raises ModelUnsupported for a scaling that cannot be expressed, ModelInvalid for incomplete ones.
    """
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 0.0))
    kind = keys.get("rope.scaling.type", "linear" if factor else "none")
    keys.get("rope.scaling.original_context_length")  # says nothing where nothing is scaled
    if kind == "longrope" or LONG_FACTORS in tensors:
        return _longrope(keys, tensors, dims, context)
    if FACTORS in tensors:
        if kind != "none" and factor not in (0.0, 1.0):
            raise ModelUnsupported(f"The file scales positions twice: {kind} scaling and {FACTORS}.")
        return _factors(_vector(tensors[FACTORS], dims), dims, base, context)
    if kind == "none" or factor in (0.0, 1.0):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        return _yarn(keys, factor, context)
    raise ModelUnsupported(
        f"The file scales positions by {kind!r}; known are none, linear, yarn and longrope."
    )


def _yarn(keys: Keys, factor: float, context: int) -> Scaling:
    """YaRN (Peng et al. 2023); the runtime's attention factor is the definition's own at its default."""
    if keys.number("rope.scaling.yarn_ext_factor", 1.0) != 1.0:
        raise ModelUnsupported("The file's YaRN scaling has an extrapolation factor other than 1.")
    for name in ("rope.scaling.yarn_attn_factor", "rope.scaling.attn_factor"):
        if keys.number(name, 1.0) != 1.0:
            raise ModelUnsupported("The file's YaRN scaling has an attention factor other than 1.")
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": keys.size("rope.scaling.original_context_length", context),
        "beta_fast": keys.number("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": keys.number("rope.scaling.yarn_beta_slow", 1.0),
        "mscale": 1.0,
        "mscale_all_dim": keys.number("rope.scaling.yarn_log_multiplier", 0.0),
    }


def _longrope(keys: Keys, tensors: Mapping[str, TensorInfo], dims: int, context: int) -> Scaling:
    """LongRoPE: the definition takes the long factors at every length, and computes the attention factor."""
    if LONG_FACTORS not in tensors or SHORT_FACTORS not in tensors:
        raise ModelInvalid(
            f"The file scales positions by longrope but lacks {LONG_FACTORS} or {SHORT_FACTORS}."
        )
    original = keys.size("rope.scaling.original_context_length")
    ratio = context / original
    computed = math.sqrt(1 + math.log(ratio) / math.log(original)) if ratio > 1 else 1.0
    if not math.isclose(keys.number("rope.scaling.attn_factor", computed), computed, rel_tol=1e-4):
        raise ModelUnsupported("The file's longrope scaling has an attention factor of its own.")
    return {
        "type": "longrope",
        "long_factor": _vector(tensors[LONG_FACTORS], dims).tolist(),
        "short_factor": _vector(tensors[SHORT_FACTORS], dims).tolist(),
        "original_max_position_embeddings": original,
    }


def _factors(factors: np.ndarray, dims: int, base: float, context: int) -> Scaling | None:
    """Factors (dims/2,) that divide each frequency: none, Llama 3's, or explicit ones."""
    if np.all(factors == 1.0):
        return None
    llama3 = {"rope_type": "llama3", "factor": float(factors.max()), **LLAMA3}
    if np.allclose(factors, llama3_factors(llama3, dims, base), rtol=1e-4):
        return llama3
    explicit = factors.tolist()
    # With the original length equal to the context, longrope scales by its factors and by nothing else.
    return {
        "rope_type": "longrope",
        "long_factor": explicit,
        "short_factor": explicit,
        "original_max_position_embeddings": context,
    }


def llama3_factors(scaling: Mapping[str, Any], dims: int, base: float) -> np.ndarray:
    """(dims/2,) divisors of the frequencies under Llama 3.1's `rope_scaling` parameters."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    wavelength = 2 * math.pi * base ** (np.arange(0, dims, 2) / dims)
    smooth = (scaling["original_max_position_embeddings"] / wavelength - low) / (high - low)
    smooth = np.clip(smooth, 0.0, 1.0)  # 1: high frequencies, kept; 0: low ones, divided in full
    return 1 / ((1 - smooth) / scaling["factor"] + smooth)


def _vector(tensor: TensorInfo, dims: int) -> np.ndarray:
    values = dequantise(tensor)
    if values.shape != (dims // 2,):
        raise ModelInvalid(f"{tensor.name} has shape {values.shape}, expected ({dims // 2},).")
    return values
