"""Training over two real processes, against one process with the same rows: loss curves, weights, files.

Every process runs `main` of this file, which loads its part, and puts trainer and sharder together as
`mlxserve lora train` does.
"""

from __future__ import annotations

import json
import os
import shutil
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
from mlxserve.errors import Unsupported
from mlxserve.lora import adapters, checkpoint
from mlxserve.lora.config import RunConfig, from_dict
from mlxserve.lora.data import Dataset, Sample
from mlxserve.lora.layers import add_adapters
from mlxserve.lora.share import Share
from mlxserve.lora.train import Trainer
from mlxserve.models.load import build
from mlxserve.models.resolve import ModelFiles
from tests.conftest import ROOT
from tests.distributed import shards

STEPS = 3


def rows(count: int = 9) -> Dataset:
    """Rows of unlike lengths; the first tokens are a prompt and no targets."""
    draw = np.random.default_rng(count)
    found = []
    for number in range(count):
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
            "lr": 0.002,
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
    split = Split.parse(job["split"] or "pipeline:1", job["layers"])  # one stage is the model as it is
    loaded = load_shard(files, LoadConfig(), split, group.rank() if group else 0, group, packed=True)
    model, share = loaded.loaded.model, Share()
    if group:
        part: Any = (TensorPart if split.mode == "tensor" else StagePart)(loaded, group)
        add_adapters(model, config.lora, seed=3)
        part.connect(start_of(loaded.loaded.config, config), optimizer=config.train.optimizer)
        share = Share(**part.share())
    else:
        add_adapters(model, config.lora, seed=3)
    _stir(model, share)
    return Trainer(
        model,
        config,
        rows(),
        rows(3),
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


def main(jobs: dict[str, dict[str, Any]]) -> None:
    """What each process does: one job after the other, over the same ring."""
    group = mx.distributed.init(strict=True, backend="ring")
    for name, job in jobs.items():
        mine = job if group.rank() == 0 else job | {"run": job["run"] + "-of-a-process-without-files"}
        if job.get("resume") and group.rank() == 0:
            _forget_the_end(Path(job["run"]))
        trainer = trainer_of(mine, group)
        if job.get("resume"):
            trainer.resume()
        trainer.run()
        curve = [(event["kind"], event["loss"]) for event in trainer.history]
        norms = [event["grad_norm"] for event in trainer.history if event["kind"] == "step"]
        said = json.dumps({"curve": curve, "norms": norms})
        (Path(job["out"]) / f"{name}-{group.rank()}.json").write_text(said)


def _forget_the_end(run: Path) -> None:
    """As if the run had been killed after its last checkpoint but one."""
    (run / "final").rename(run / "final-before")
    shutil.rmtree(checkpoint.checkpoints(run)[-1])


def on_two(folder: Path, jobs: dict[str, dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """What each of two processes said of each job."""
    with socket.socket() as first, socket.socket() as second:
        for one in (first, second):
            one.bind(("127.0.0.1", 0))
        ports = [one.getsockname()[1] for one in (first, second)]
    hosts = folder / "hosts.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in ports]))
    code = "import json, sys; from tests.distributed.test_training import main; main(json.loads(sys.argv[1]))"
    shared = {**os.environ, "PYTHONPATH": str(ROOT), "MLX_HOSTFILE": str(hosts), "OPENBLAS_NUM_THREADS": "1"}
    children = [
        subprocess.Popen(
            [sys.executable, "-c", code, json.dumps(jobs)],
            env={**shared, "MLX_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        errors = [child.communicate(timeout=400)[1] for child in children]
    finally:
        for child in children:
            child.kill()
    assert [child.returncode for child in children] == [0, 0], errors
    return {
        name: [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in range(2)] for name in jobs
    }


SPLITS = {"llama": "tensor:2", "deepseek_v3": "tensor:2", "gpt_oss": "tensor:2", "qwen3_moe": "pipeline:2"}


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    """(jobs, what was said of each), all run by the same two processes."""
    folder = tmp_path_factory.mktemp("training")
    jobs = {kind: job_of(folder / kind, kind, split) for kind, split in SPLITS.items()}
    jobs["resumed"] = jobs["qwen3_moe"] | {"resume": True}
    return jobs, on_two(folder, {name: job | {"out": str(folder)} for name, job in jobs.items()})


def job_of(folder: Path, kind: str, split: str) -> dict[str, Any]:
    # With the tiny models' own large weights, rounding one input already changes gradients by 5e-5.
    files = shards.write(folder / "model", kind, packed=True, scale=0.4)
    layers = json.loads((files.path / "config.json").read_text())["num_hidden_layers"]
    run = {"model": str(files.path), "split": split, "layers": layers, "run": str(folder / "run")}
    return run | {"accumulate": 2 if split.startswith("pipeline") else 1}


@pytest.mark.parametrize("kind", SPLITS)
def test_sharded_qlora_equals_one_process(
    together: tuple[dict[str, Any], dict[str, Any]], tmp_path: Path, kind: str
) -> None:
    """Dense; latent attention, whose latents are on all ranks; experts with biases and sinks; and in stages,
    with several micro-batches a step. Loss curves agree within 1e-5, and so does what rank 0 wrote."""
    job = together[0][kind]
    one = trainer_of(job | {"split": None, "run": str(tmp_path / "alone")})
    one.run()
    expected = [(event["kind"], event["loss"]) for event in one.history]
    norms = [event["grad_norm"] for event in one.history if event["kind"] == "step"]
    assert [name for name, _ in expected].count("eval") >= 2
    assert len({round(loss, 3) for _, loss in expected}) > 2
    for process in together[1][kind]:
        assert [name for name, _ in process["curve"]] == [name for name, _ in expected]
        losses = [[loss for _, loss in curve] for curve in (process["curve"], expected)]
        np.testing.assert_allclose(*losses, rtol=1e-5)
        np.testing.assert_allclose(process["norms"], norms, rtol=1e-3)
    run = Path(job["run"])
    ending = run / "final-before" if (run / "final-before").exists() else run / "final"
    mine, theirs = adapters.read(ending).arrays, adapters.read(tmp_path / "alone" / "final").arrays
    assert mine.keys() == theirs.keys()
    for name in mine:
        np.testing.assert_allclose(np.array(mine[name]), np.array(theirs[name]), atol=2e-4, err_msg=name)


def test_a_run_in_stages_is_taken_up_again(together: tuple[dict[str, Any], dict[str, Any]]) -> None:
    """By processes of which one has no files: adapters and moments are put together and divided again."""
    jobs, said = together
    assert said["resumed"][0]["curve"] == said["resumed"][1]["curve"] != []
    assert said["qwen3_moe"][0]["curve"][-len(said["resumed"][0]["curve"]) :] == said["resumed"][0]["curve"]
    before, after = (
        adapters.read(Path(jobs["resumed"]["run"]) / name).arrays for name in ("final-before", "final")
    )
    for name in before:
        np.testing.assert_array_equal(np.array(after[name]), np.array(before[name]))


@pytest.mark.parametrize(
    ("split", "rank", "settings", "said"),
    [
        (Split.tensor(2), 0, {"lora": {"type": "dora"}}, "trains LoRA factors only, not"),
        (Split.tensor(2), 0, {"train": {"optimizer": "muon"}}, "muon looks at whole matrices"),
        (Split.pipeline([1, 2]), 0, {"lora": {"layers": 1}}, "Every stage of a pipeline must hold a layer"),
    ],
)
def test_refused(tmp_path: Path, split: Split, rank: int, settings: dict[str, Any], said: str) -> None:
    files = shards.write(tmp_path, "llama")
    config = settings_of(settings)
    loaded = load_shard(files, LoadConfig(), split, rank)
    part: Any = (TensorPart if split.mode == "tensor" else StagePart)(loaded, mx.distributed.init())
    add_adapters(loaded.loaded.model, config.lora, seed=3)
    with pytest.raises(Unsupported, match=said):
        part.connect(start_of(loaded.loaded.config, config), optimizer=config.train.optimizer)
