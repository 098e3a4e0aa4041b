"""Whether MLX can run here at all.

Knows: the packages that carry MLX's backends, that two of them on Linux overwrite each other's library,
and what to say when the import fails. Does not know: devices' abilities or memory.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

from mlxserve.errors import DependencyMissing

BACKENDS = ("mlx-metal", "mlx-cpu", "mlx-cuda", "mlx-cuda-12", "mlx-cuda-13")
INSTALL = "pip install 'mlxserve[cpu]', or 'mlxserve[cuda]' for an NVIDIA GPU"


def installed_backends() -> list[str]:
    """The packages with a backend for MLX that are installed here."""
    return [name for name in BACKENDS if package_version(name)]


def package_version(name: str) -> str | None:
    """The version of an installed package, without importing it; None if it is absent."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def backend_problem(backends: list[str], platform: str | None = None) -> str | None:
    """What is wrong with a set of backend packages, as a sentence with the way out; None if nothing."""
    on_linux = (platform or sys.platform).startswith("linux")
    if on_linux and not backends:
        return f"MLX has no backend here: install exactly one, {INSTALL}."
    if on_linux and len(backends) > 1:
        names = " and ".join(backends)
        return (
            f"{names} are both installed and overwrite each other's library: "
            f"pip uninstall {' '.join(backends)}, then install exactly one, {INSTALL}."
        )
    return None


def check_backend() -> None:
    """Import MLX, or raise DependencyMissing with one sentence that says why it cannot be."""
    try:
        import_module("mlx.core")
    except ImportError as error:
        problem = backend_problem(installed_backends())
        if problem is None and package_version("mlx") is None:
            problem = "The package mlx is not installed: pip install mlx."
        raise DependencyMissing(problem or f"MLX cannot be loaded ({error}): reinstall mlx.") from error
