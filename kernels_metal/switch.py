"""Whether a kernel may run here: this device has Metal, and nobody has turned the kernel off.

Knows: the environment variable MLXSERVE_KERNELS_OFF, a list such as "sample,gguf", or "all".
Knows nothing of what kernels do.
"""

from __future__ import annotations

import os

import mlx.core as mx

OFF_VARIABLE = "MLXSERVE_KERNELS_OFF"


def enabled(kernel: str) -> bool:
    """True if the kernels called `kernel` run instead of their references."""
    return mx.metal.is_available() and mx.default_device() == mx.Device(mx.gpu) and not turned_off(kernel)


def turned_off(kernel: str) -> bool:
    """True if the environment turns `kernel` off."""
    names = {name.strip() for name in os.environ.get(OFF_VARIABLE, "").split(",")}
    return bool(names & {kernel, "all"})
