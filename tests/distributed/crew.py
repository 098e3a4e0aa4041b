"""Starts ranks as processes of this machine, has rank 0 serve requests, and brings back what it answered.

A case is plain data: a model's folder, the engine's settings, and rounds of requests, each round run to its
end before the next begins. Several cases share one start of the processes; the ranks join anew for each.
Every rank reads the whole file here; how a rank reads only its part is tested elsewhere.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mlxserve.distributed.channel import free_ports
from tests.conftest import ROOT

DEADLINE_S = 60.0
HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Case:
    """One model served once: settings of the engine, rounds of requests (see rounds.py), adapters' folders."""

    folder: str
    rounds: Sequence[Sequence[dict[str, Any]]]
    settings: dict[str, Any] = field(default_factory=dict)
    micro_batches: int | None = None
    gathered_bytes: int | None = None
    adapters: dict[str, str] = field(default_factory=dict)


def serve(split: str, cases: Sequence[Case], deadline_s: float = DEADLINE_S) -> list[dict[str, Any]]:
    """Rank 0's report of each case, as `rounds.report` makes it."""
    size = int(split.partition(":")[2])
    processes: list[subprocess.Popen[str]] = []
    addresses = [[(HOST, port) for port in free_ports(size)] for _ in cases]
    ring = Path(cases[0].folder).parent / f"ring-{addresses[0][0][1]}.json"
    ring.write_text(json.dumps([[f"{HOST}:{port}"] for port in free_ports(size)]))
    try:
        for rank in range(size):
            plain = [{**asdict(case), "addresses": there} for case, there in zip(cases, addresses)]
            processes.append(start_rank({"split": split, "rank": rank, "cases": plain}, ring))
        return reports(processes, deadline_s)
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def start_rank(job: dict[str, Any], ring: Path) -> subprocess.Popen[str]:
    """One rank's process, with its job on standard input."""
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OPENBLAS_NUM_THREADS": "1",
        "MLX_RANK": str(job["rank"]),
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
    process.stdin.write(json.dumps(job))
    process.stdin.close()
    process.stdin = None
    return process


def reports(processes: list[subprocess.Popen[str]], deadline_s: float) -> list[dict[str, Any]]:
    """Wait for every rank; one that ends badly is shown with what it wrote, as is one that never ends."""
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        codes = [process.poll() for process in processes]
        if any(codes) or None not in codes:
            break
        time.sleep(0.02)
    for rank, process in enumerate(processes):
        if process.poll():
            raise AssertionError(f"rank {rank} ended with {process.returncode}: {process.communicate()[1]}")
    late = [rank for rank, process in enumerate(processes) if process.poll() is None]
    assert not late, f"ranks {late} had not ended after {deadline_s:g} s"
    return json.loads(processes[0].communicate()[0])
