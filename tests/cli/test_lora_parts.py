"""`mlxserve lora train --split`: two real processes make the run that one makes alone."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mlxserve.errors import UsageError
from mlxserve.lora import adapters
from mlxserve.lora.config import from_dict
from tests import tiny
from tests.conftest import ROOT

ROWS = ["The sea is wide.", "A small boat", "Gulls", "Wind from the north-west, and rain by evening.", "Tide"]


def _command(folder: Path, run: str, *more: str) -> list[str]:
    settings = {
        "model": folder / "model",
        "data.train": folder / "rows.jsonl",
        "data.valid": folder / "rows.jsonl",
        "save.dir": folder / run,
        "lora.type": "dora",
        "lora.rank": 2,
        "train.steps": 2,
        "train.tokens_per_batch": 64,
        "train.warmup": 0,
    }
    assigned = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    return [sys.executable, "-m", "mlxserve", "lora", "train", *assigned, *more]


def _losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_pipeline_of_two_processes(tmp_path: Path) -> None:
    tiny.write(tmp_path / "model", "llama")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in ROWS))
    shared = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OPENBLAS_NUM_THREADS": "1",
        "XDG_CACHE_HOME": str(tmp_path),
    }
    with socket.socket() as first, socket.socket() as second:
        for one in (first, second):
            one.bind(("127.0.0.1", 0))
        addresses = [[f"127.0.0.1:{one.getsockname()[1]}"] for one in (first, second)]
    (tmp_path / "hosts.json").write_text(json.dumps(addresses))
    shared["MLX_HOSTFILE"] = str(tmp_path / "hosts.json")
    processes = [
        subprocess.Popen(
            _command(tmp_path, "run", "--split", "pipeline:2"),
            env={**shared, "MLX_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        errors = [process.communicate(timeout=300)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], errors
    alone = {key: value for key, value in shared.items() if key != "MLX_HOSTFILE"}
    subprocess.run(_command(tmp_path, "alone"), env=alone, check=True, timeout=300, capture_output=True)
    np.testing.assert_allclose(_losses(tmp_path / "run"), _losses(tmp_path / "alone"), rtol=1e-5)
    mine, theirs = (adapters.read(tmp_path / run / "final") for run in ("run", "alone"))
    assert (mine.kind, mine.scales) == (theirs.kind, theirs.scales)
    for name, value in theirs.arrays.items():
        np.testing.assert_allclose(np.array(mine.arrays[name]), np.array(value), atol=1e-5)


def test_a_split_without_processes_is_refused() -> None:
    from mlxserve.cli.lora_parts import open_part

    with pytest.raises(UsageError, match="needs several processes"):
        open_part(from_dict({"model": "smollm2"}), "tensor:2", None)
