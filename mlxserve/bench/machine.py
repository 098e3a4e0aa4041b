"""What a measurement was made on: processor, system, versions, date.

Knows where each fact stands on Linux and macOS. Measures nothing.
"""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version

PACKAGES = ("mlx", "mlx-lm", "mlxserve")


def machine() -> dict[str, str | int]:
    """Facts by name, as plain values for JSON."""
    from mlxserve import blas

    return {
        "processor": processor(),
        "cores": os.cpu_count() or 1,
        "system": platform.system(),
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
        "blas": blas.in_use(),
        "date": datetime.date.today().isoformat(),
    }


def describe(facts: dict[str, str | int]) -> str:
    """The facts in one line, for people."""
    versions = ", ".join(f"{name} {facts[name]}" for name in PACKAGES)
    return (
        f"{facts['processor']}, {facts['cores']} cores, {facts['system']}, Python {facts['python']}, "
        f"{versions}, BLAS {facts['blas']}; {facts['date']}"
    )


def processor() -> str:
    """The processor's own name for itself."""
    if sys.platform == "darwin":
        asked = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip() or "a Mac"
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":")[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
