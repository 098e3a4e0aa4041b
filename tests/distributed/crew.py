"""Starts ranks as processes of this machine, has rank 0 serve requests, and brings back what it answered.

A case is plain data: the model's folder, the split, the engine's settings, and rounds of requests, each
round run to its end before the next begins. Every rank reads the whole file here; how a rank reads only its
part is tested elsewhere.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mlxserve.distributed.channel import free_ports
from tests.conftest import ROOT

DEADLINE_S = 60.0


def serve(
    folder: Path,
    split: str,
    rounds: Sequence[Sequence[dict[str, Any]]],
    *,
    addresses: Sequence[Sequence[tuple[str, int]]] | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Rank 0's report of a case: {"rounds": [[answer, …], …], "stats": …, …}; each answer as `worker.py` gives it.

    addresses: for each rank, where it sees every rank; loopback unless told otherwise.
    """
    size = int(split.partition(":")[2])
    hosts = [("127.0.0.1", port) for port in free_ports(size)]
    case = {"folder": str(folder), "split": split, "rounds": rounds, "settings": settings}
    processes = []
    ring = folder.parent / f"ring-{hosts[0][1]}.json"
    ring.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in free_ports(size)]))
    try:
        for rank in range(size):
            mine = {**case, "rank": rank, "addresses": hosts if addresses is None else addresses[rank]}
            processes.append(_start(mine, rank, ring))
        return _report(processes)
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def _start(case: dict[str, Any], rank: int, ring: Path) -> subprocess.Popen[str]:
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OPENBLAS_NUM_THREADS": "1",
        "MLX_RANK": str(rank),
        "MLX_HOSTFILE": str(ring),
        "MLXSERVE_TOKEN": "a secret of these tests",
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.distributed.worker"],
        cwd=ROOT,
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps(case))
    process.stdin.close()
    process.stdin = None
    return process


def _report(processes: list[subprocess.Popen[str]]) -> dict[str, Any]:
    """Wait for every rank; the first that ends badly is shown with what it wrote."""
    end = time.monotonic() + DEADLINE_S
    while any(process.poll() is None for process in processes) and time.monotonic() < end:
        if any(process.poll() for process in processes):
            break
        time.sleep(0.02)
    for rank, process in enumerate(processes):
        if process.poll() not in (None, 0):
            raise AssertionError(f"rank {rank} ended with {process.returncode}: {process.communicate()[1]}")
    if any(process.poll() is None for process in processes):
        late = [rank for rank, process in enumerate(processes) if process.poll() is None]
        raise AssertionError(f"ranks {late} had not ended after {DEADLINE_S:g} s")
    return json.loads(processes[0].communicate()[0])
