"""What a host says of itself to `mlxserve doctor --hosts`.

Knows: where a system tells its memory and its RDMA devices. Does not know other hosts, nor MLX.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from typing import Any

_TOOL_S = 5.0
# https://developer.apple.com/documentation/technotes/tn3205-low-latency-communication-with-rdma-over-thunderbolt
FIRST_MACOS_WITH_RDMA = (26, 2)


def look() -> dict[str, Any]:
    """system, memory_bytes, free_disk_bytes, rdma (devices), rdma_hint ('' where there is nothing to say)."""
    devices = rdma_devices()
    return {
        "system": f"{platform.system()} {system_version()} {platform.machine()}",
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "free_disk_bytes": shutil.disk_usage(os.path.expanduser("~")).free,
        "rdma": devices,
        "rdma_hint": rdma_hint(sys.platform, platform.mac_ver()[0], devices),
    }


def system_version() -> str:
    """macOS's own number, elsewhere the kernel's."""
    return platform.mac_ver()[0] or platform.release()


def rdma_devices() -> list[str]:
    """Names from the system's own list (`ibv_devices`); none where that tool is absent."""
    if shutil.which("ibv_devices") is None:
        return []
    try:
        found = subprocess.run(["ibv_devices"], capture_output=True, text=True, timeout=_TOOL_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return parse_devices(found.stdout)


def parse_devices(text: str) -> list[str]:
    """First column of `ibv_devices`, below its two lines of heading."""
    rows = [line.split() for line in text.splitlines()[2:]]
    return [row[0] for row in rows if row]


def rdma_hint(system: str, macos: str, devices: list[str]) -> str:
    """What would let ranks talk by RDMA over Thunderbolt 5; '' where they can, or where it is no Mac."""
    if system != "darwin" or devices:
        return ""
    version = tuple(int(part) for part in macos.split(".")[:2] if part.isdigit())
    if version < FIRST_MACOS_WITH_RDMA:
        return f"macOS {macos} has no RDMA over Thunderbolt; 26.2 or later has it on Macs with Thunderbolt 5."
    return "No RDMA device: on a Mac with Thunderbolt 5, run 'rdma_ctl enable' in macOS Recovery and restart."
