"""Whether a kernel may run here: this device has Metal, and nobody has turned the kernel off.

Knows: the kernels' names, and the environment variable MLXSERVE_KERNELS_OFF, a list of them such as
"sample,gguf", or "all". Knows nothing of what kernels do.
"""

from __future__ import annotations

import os
from functools import cache

import mlx.core as mx

from mlxserve.errors import UsageError

OFF_VARIABLE = "MLXSERVE_KERNELS_OFF"
KERNELS = {
    "paged_decode": "attention of up to 8 queries a sequence over paged keys; plain, 8 or 4 bits",
    "paged_prefill": "attention of prompt chunks over paged keys; plain, 8 or 4 bits",
    "gguf": "products with GGUF blocks as they lie in the file",
    "moe": "a mixture's feed-forward for few tokens: gate and up, down",
    "sample": "top-k, top-p, min-p and the draw, with the log-probability",
}


def enabled(kernel: str) -> bool:
    """True if the kernels called `kernel` run instead of their references."""
    return mx.metal.is_available() and mx.default_device() == mx.Device(mx.gpu) and not turned_off(kernel)


def turned_off(kernel: str) -> bool:
    """True if the environment turns `kernel` off. Raises UsageError if the variable names no kernel."""
    return kernel in _off(os.environ.get(OFF_VARIABLE, ""))


@cache
def _off(value: str) -> frozenset[str]:
    names = frozenset(name.strip() for name in value.split(",")) - {""}
    unknown = sorted(names - set(KERNELS) - {"all"})
    if unknown:
        known = ", ".join(KERNELS)
        raise UsageError(f"{OFF_VARIABLE} names no kernel {unknown[0]!r}; there are {known}, and all.")
    return frozenset(KERNELS) if "all" in names else names
