"""Puts OpenBLAS into the process before MLX loads, on Linux.

Knows: MLX's CPU wheel links a reference BLAS (about 1.6 GFLOP/s in float32); a `libopenblas.so.0` that
is already loaded with global symbols takes its place (about 120 GFLOP/s on two cores).
Knows nothing of MLX itself and never imports it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys

LIBRARY = "libopenblas.so.0"
_loaded: str | None = None


def preload() -> str | None:
    """Load OpenBLAS if this is Linux, it is there, and MLX is not yet in; the library's name or None.

    `MLXSERVE_NO_OPENBLAS=1` turns it off.
    """
    global _loaded
    if _loaded or not sys.platform.startswith("linux") or "mlx.core" in sys.modules:
        return _loaded
    if os.environ.get("MLXSERVE_NO_OPENBLAS"):
        return None
    with contextlib.suppress(OSError):
        ctypes.CDLL(LIBRARY, mode=ctypes.RTLD_GLOBAL)
        _loaded = LIBRARY
    return _loaded


def in_use() -> str:
    """The BLAS that MLX's CPU backend calls: 'Accelerate', 'OpenBLAS' or 'reference'."""
    if sys.platform == "darwin":
        return "Accelerate"
    return "OpenBLAS" if _loaded else "reference"
