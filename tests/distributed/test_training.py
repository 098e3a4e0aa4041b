"""Training over two real processes, against one process with the same rows: loss curves, weights, files.

Every process runs `main` of this file, which loads its part, and puts trainer and sharder together as
`mlxserve lora train` does.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlxserve  # noqa: F401  (first: it puts OpenBLAS in before MLX loads)

import mlx.core as mx  # isort: skip
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlxserve.config import LoadConfig
from mlxserve.distributed.load import load_shard
from mlxserve.distributed.split import Split
from mlxserve.distributed.training import TensorPart
from mlxserve.distributed.training_stage import StagePart
from mlxserve.errors import MlxServeError
from mlxserve.lora import adapters
from mlxserve.lora.config import RunConfig, from_dict
from mlxserve.lora.data import Dataset, Sample
from mlxserve.lora.layers import add_adapters
from mlxserve.lora.share import Share, data_parallel
from mlxserve.lora.train import Trainer
from mlxserve.models.load import build
from mlxserve.models.resolve import ModelFiles
from tests.conftest import ROOT
from tests.distributed import shards

STEPS = 4


def rows() -> Dataset:
    """Eleven rows of unlike lengths; the first tokens are a prompt and no targets."""
    draw = np.random.default_rng(0)
    found = []
    for number in range(11):
        length = int(draw.integers(6, 30))
        targets = np.arange(length) >= length // 3
        targets[0] = False
        found.append(Sample(f"f:{number}", draw.integers(0, 256, length).astype(np.int32), targets))
    return Dataset(found, len(found))


def settings_of(job: dict[str, Any]) -> RunConfig:
    values = {
        "model": "tiny",
        "lora": {"rank": 2, "targets": "all-linear", **job.get("lora", {})},
        "train": {
            "tokens_per_batch": 96,
            "steps": STEPS,
            "lr": 0.01,
            "warmup": 0,
            "accumulate": job.get("accumulate", 1),
            **job.get("train", {}),
        },
        "eval": {"every": 2},
        "save": {"every": 2, "keep": 9},
    }
    return from_dict(values)


def trainer_of(job: dict[str, Any], group: Any = None) -> Trainer:
    """This process's trainer: the whole model, or a part of it where `job` names a split."""
    files = ModelFiles("folder", Path(job["model"]), "tiny", "path")
    config = settings_of(job)
    split = Split.parse(job.get("split") or "pipeline:1", job["layers"])  # one stage is the model as it is
    rank = group.rank() if job.get("split") else 0
    loaded = load_shard(files, LoadConfig(), split, rank, group if job.get("split") else None, packed=True)
    model, share = loaded.loaded.model, data_parallel(group)
    if job.get("split"):
        part = (TensorPart if split.mode == "tensor" else StagePart)(loaded, group)
        add_adapters(model, config.lora, seed=3)
        part.connect(start_of(loaded.loaded.config, config))
        share = Share(**part.share())
    else:
        add_adapters(model, config.lora, seed=3)
    _stir(model, share)
    return Trainer(
        model,
        config,
        rows(),
        rows(),
        vocabulary=288,
        run=Path(job["run"]),
        share=share,
        architecture=loaded.loaded.config,
    )


def start_of(architecture: dict[str, Any], config: RunConfig) -> dict[str, mx.array]:
    """The adapters that one process starts with, drawn on a model that is never evaluated."""
    model = build({key: value for key, value in architecture.items() if key != "quantization"})
    add_adapters(model, config.lora, seed=3)
    return dict(tree_flatten(model.trainable_parameters()))


def _stir(model: Any, share: Share) -> None:
    """Start from a b that is not zero, so that every factor has a gradient from the first step on."""
    own = dict(tree_flatten(model.trainable_parameters()))
    whole = share.whole(own)
    for number, name in enumerate(sorted(whole)):
        if name.endswith("lora_b"):
            whole[name] = 0.1 * mx.random.normal(whole[name].shape, key=mx.random.key(number))
    model.update(_tree(share.part(whole)))


def _tree(arrays: dict[str, mx.array]) -> Any:
    from mlx.utils import tree_unflatten

    return tree_unflatten(list(arrays.items()))


def main(job: dict[str, Any]) -> None:
    group = mx.distributed.init(strict=True, backend="ring")
    out = Path(job["out"]) / f"said-{group.rank()}.json"
    try:
        trainer = trainer_of(
            job | {"run": job["run"] if group.rank() == 0 else job["run"] + "-nowhere"}, group
        )
        if job.get("resume"):
            trainer.resume()
        trainer.run()
    except MlxServeError as error:
        out.write_text(json.dumps({"error": error.message}))
        return
    curve = [(event["kind"], event["loss"]) for event in trainer.history]
    norms = [event["grad_norm"] for event in trainer.history if event["kind"] == "step"]
    out.write_text(json.dumps({"curve": curve, "norms": norms}))


def on_two(tmp_path: Path, job: dict[str, Any]) -> list[dict[str, Any]]:
    """What each of two processes said at its end."""
    with socket.socket() as first, socket.socket() as second:
        for one in (first, second):
            one.bind(("127.0.0.1", 0))
        ports = [one.getsockname()[1] for one in (first, second)]
    hosts = tmp_path / "hosts.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in ports]))
    job = job | {"out": str(tmp_path), "run": str(tmp_path / "run")}
    code = "import json, sys; from tests.distributed.test_training import main; main(json.loads(sys.argv[1]))"
    shared = {**os.environ, "PYTHONPATH": str(ROOT), "MLX_HOSTFILE": str(hosts), "OPENBLAS_NUM_THREADS": "1"}
    children = [
        subprocess.Popen(
            [sys.executable, "-c", code, json.dumps(job)],
            env={**shared, "MLX_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        errors = [child.communicate(timeout=100)[1] for child in children]
    finally:
        for child in children:
            child.kill()
    assert [child.returncode for child in children] == [0, 0], errors
    return [json.loads((tmp_path / f"said-{rank}.json").read_text()) for rank in range(2)]


def compare(tmp_path: Path, job: dict[str, Any], said: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    """Both processes' curves are one process's within 1e-5, and so is the adapter that rank 0 wrote."""
    one = trainer_of(job | alone | {"split": None, "run": str(tmp_path / "alone")})
    one.run()
    expected = [(event["kind"], event["loss"]) for event in one.history]
    norms = [event["grad_norm"] for event in one.history if event["kind"] == "step"]
    assert [kind for kind, _ in expected].count("eval") >= 2
    assert len({round(loss, 3) for _, loss in expected}) > 2
    for process in said:
        assert [kind for kind, _ in process["curve"]] == [kind for kind, _ in expected]
        np.testing.assert_allclose(
            [loss for _, loss in process["curve"]], [loss for _, loss in expected], rtol=0, atol=1e-5
        )
        np.testing.assert_allclose(process["norms"], norms, rtol=1e-4)
    mine, theirs = (adapters.read(tmp_path / run / "final").arrays for run in ("run", "alone"))
    assert mine.keys() == theirs.keys()
    for name in mine:
        np.testing.assert_allclose(np.array(mine[name]), np.array(theirs[name]), atol=2e-4, err_msg=name)


def job_of(
    tmp_path: Path, kind: str, split: str | None, *, packed: bool = True, **more: Any
) -> dict[str, Any]:
    files = shards.write(tmp_path / "model", kind, packed=packed)
    layers = json.loads((files.path / "config.json").read_text()).get("num_hidden_layers", 3)
    return {"model": str(files.path), "split": split, "layers": layers, **more}


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_tensor_parallel_qlora(tmp_path: Path, kind: str) -> None:
    job = job_of(tmp_path, kind, "tensor:2")
    compare(tmp_path, job, on_two(tmp_path, job), {})


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_pipeline_qlora(tmp_path: Path, kind: str) -> None:
    job = job_of(tmp_path, kind, "pipeline:2", accumulate=2)
    compare(tmp_path, job, on_two(tmp_path, job), {})


def test_data_parallel(tmp_path: Path) -> None:
    job = job_of(tmp_path, "llama", None)
    compare(tmp_path, job, on_two(tmp_path, job), {"accumulate": 2})
