"""Several processes make one run: two over a real ring on this machine, and parts handed in by a sharder."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxserve.lora import adapters, checkpoint
from mlxserve.lora.batches import make_batch
from mlxserve.lora.optim import Optimizer, sum_of_squares
from mlxserve.lora.share import Share, Work, train_step
from mlxserve.lora.train import TrainingDiverged
from tests.conftest import ROOT
from tests.lora.test_train import _config, _data, _same, _trainer, _weights

CHILD = """
import json, sys
import mlxserve
import mlx.core as mx
import numpy as np
from pathlib import Path
from tests.lora.test_share import trainer_of
from mlxserve.errors import MlxServeError

folder, job = Path(sys.argv[1]), json.loads(sys.argv[2])
group = mx.distributed.init(strict=True, backend="ring")
rank = group.rank()
said = "finished"
run = folder if rank == 0 else None  # the other process has another disk
trainer = trainer_of(job, run=run, group=group)
if job.get("resume"):
    trainer.resume()
if job.get("stop_at"):
    def stop(event):
        if event["kind"] == "step" and event["step"] == job["stop_at"]:
            trainer.stop.set()
    trainer.watch = stop  # only the writing process watches
try:
    trainer.run()
except MlxServeError as error:
    said = error.message
masters = {name: np.array(value) for name, value in trainer.stepper.masters.items()}
np.savez(folder / f"masters-{rank}.npz", **masters)
(folder / f"said-{rank}").write_text(said)
(folder / f"losses-{rank}").write_text(json.dumps([e["loss"] for e in trainer.history]))
"""


def trainer_of(job: dict[str, Any], **settings: Any) -> Any:
    """The same run in every process: 11 rows of unlike lengths, some of whose windows leave a rank idle."""
    config = _config(
        train={"accumulate": job.get("accumulate", 1), "tokens_per_batch": 64, "epochs": 2},
        eval={"every": 3},
        save={"every": 1, "keep": 99},
    )
    data = _data()
    if "broken" in job:
        data.items[job["broken"]].tokens[1:] = 250
    trainer = _trainer(config, data, valid=_data(3, seed=5), **settings)
    if "broken" in job:
        # the head is tied to the table, so only the embedding's output is broken
        table = trainer.model.model.embed_tokens
        weight = np.array(table.weight)
        weight[250] = np.nan
        table.weight = mx.array(weight)
        trainer.stepper.split.logits = lambda h: h @ mx.ones((288, 64)).T
    return trainer


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _on_a_ring(folder: Path, job: dict[str, Any]) -> list[dict[str, np.ndarray]]:
    """Run CHILD in two processes that MLX's ring connects; each one's parameters at the end."""
    folder.mkdir(exist_ok=True)
    hosts = folder / "hosts.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{_free_port()}"] for _ in range(2)]))
    command = [sys.executable, "-c", CHILD, str(folder), json.dumps(job)]
    shared = {**os.environ, "PYTHONPATH": str(ROOT), "MLX_HOSTFILE": str(hosts), "OPENBLAS_NUM_THREADS": "1"}
    children = [
        subprocess.Popen(command, env={**shared, "MLX_RANK": str(rank)}, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        errors = [child.communicate(timeout=120)[1] for child in children]
    finally:
        for child in children:
            child.kill()
    assert [child.returncode for child in children] == [0, 0], errors
    return [dict(np.load(folder / f"masters-{rank}.npz")) for rank in range(2)]


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, np.ndarray]]]:
    folder = tmp_path_factory.mktemp("ring") / "run"
    return folder, _on_a_ring(folder, {})


def _near(a: dict[str, np.ndarray], b: dict[str, np.ndarray], atol: float) -> None:
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_allclose(a[name], b[name], atol=atol)


def test_two_processes_train_as_one_that_accumulates(
    together: tuple[Path, list[dict[str, np.ndarray]]], tmp_path: Path
) -> None:
    """Token-weighted: batches of unlike sizes; averaged means, as in mlx-lm, would be off by far more."""
    folder, ends = together
    alone = trainer_of({"accumulate": 2}, run=tmp_path)
    alone.run()
    _same(*ends)
    _near(ends[0], _weights(alone), 2e-5)
    losses = [json.loads((folder / f"losses-{rank}").read_text()) for rank in range(2)]
    assert losses[0] == losses[1]
    assert losses[0] == pytest.approx([event["loss"] for event in alone.history], rel=1e-5)
    assert (folder / "final" / "adapters.safetensors").is_file()


def test_a_run_of_two_processes_resumes_bit_identically(
    together: tuple[Path, list[dict[str, np.ndarray]]],
) -> None:
    """Process 1 has no files: weights, optimiser and place come from process 0."""
    folder, ends = together
    for path in checkpoint.checkpoints(folder)[2:]:
        for file in path.iterdir():
            file.unlink()
        path.rmdir()
    again = _on_a_ring(folder, {"resume": True})
    _same(*again)
    _same(again[0], ends[0])


def test_one_process_that_is_stopped_stops_both(tmp_path: Path) -> None:
    _on_a_ring(tmp_path / "run", {"stop_at": 1})
    said = [(tmp_path / "run" / f"said-{rank}").read_text() for rank in range(2)]
    assert [words.startswith("Stopped after step 2.") for words in said] == [True, True]


def test_a_bad_row_of_one_process_ends_both(tmp_path: Path) -> None:
    ends = _on_a_ring(tmp_path / "run", {"broken": 4})
    said = [(tmp_path / "run" / f"said-{rank}").read_text() for rank in range(2)]
    assert sorted("f:4" in words for words in said) == [False, True]
    assert all("not finite" in words for words in said)
    assert all(np.isfinite(value).all() for end in ends for value in end.values())


# What a sharder hands in, in one process.


def _works(trainer: Any, parts: list[list[int]]) -> list[Work]:
    return [Work(make_batch(trainer.train_data.items, part), None, 0) for part in parts]


def test_a_handed_in_reduction_adds_what_others_computed() -> None:
    """The other process's sums are made beforehand, as the sharder's all-reduce would bring them."""
    parts = [[0, 1, 2], [3, 4], [5]]
    whole, half, other = (trainer_of({}) for _ in range(3))
    expected = train_step(whole.stepper, whole.optimizer, _works(whole, parts), rate=0.01, clip=0.5)
    brought: dict[str, Any] = {}

    def keep(gradients: dict[str, mx.array], totals: mx.array) -> Any:
        brought.update(gradients=gradients, totals=totals)
        return gradients, totals

    def add(gradients: dict[str, mx.array], totals: mx.array) -> Any:
        sums = {name: value + brought["gradients"][name] for name, value in gradients.items()}
        return sums, totals + brought["totals"]

    train_step(other.stepper, other.optimizer, _works(other, parts[1:]), rate=0.01, share=Share(reduce=keep))
    got = train_step(
        half.stepper, half.optimizer, _works(half, parts[:1]), rate=0.01, clip=0.5, share=Share(reduce=add)
    )
    assert (got.count, got.tokens) == (expected.count, expected.tokens)
    assert (got.loss, got.norm) == pytest.approx((expected.loss, expected.norm), rel=1e-5)
    _near(_weights(half), _weights(whole), 1e-6)


def test_a_handed_in_trunk_runs_instead_of_the_models() -> None:
    """Here it is the model's own, called by name with the parameters that it is handed."""
    plain, handed = trainer_of({}), trainer_of({})
    calls: list[int] = []

    def trunk(masters: dict[str, mx.array], inputs: mx.array) -> mx.array:
        calls.append(len(masters))
        handed.stepper.place(masters or handed.stepper.masters)
        return handed.model.model(inputs)

    share = Share(trunk=trunk)
    again = _trainer(handed.config, handed.train_data, share=share)
    handed.stepper, handed.model = again.stepper, again.model
    works = _works(plain, [[0, 1], [2]])
    expected = train_step(plain.stepper, plain.optimizer, works, rate=0.01)
    got = train_step(again.stepper, again.optimizer, works, rate=0.01, share=share)
    assert calls == [len(plain.stepper.masters)] * 2
    assert got.loss == pytest.approx(expected.loss, rel=1e-6)
    _near(_weights(again), _weights(plain), 1e-6)
    assert again.evaluate(plain.train_data) == pytest.approx(plain.evaluate(plain.train_data), rel=1e-5)


def _divided(name: str) -> int:
    return 0 if name.endswith("lora_a") else 1


def _halves() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """A sharder of one process that keeps half of every layer, inputs of `lora_a` and outputs of `lora_b`, and
    knows the others: zeros."""

    def part(arrays: dict[str, mx.array]) -> dict[str, mx.array]:
        return {name: mx.split(value, 2, axis=_divided(name))[0] for name, value in arrays.items()}

    def whole(arrays: dict[str, mx.array]) -> dict[str, mx.array]:
        return {
            name: mx.concatenate([value, 0 * value], axis=_divided(name)) for name, value in arrays.items()
        }

    return part, whole


@pytest.mark.parametrize("optimizer", ["adamw", "lion"])
def test_files_of_a_model_in_parts_are_whole(tmp_path: Path, optimizer: str) -> None:
    part, whole = _halves()
    share = Share(part=part, whole=whole)
    config = _config(train={"optimizer": optimizer, "epochs": 1}, save={"every": 1})
    trainer = _trainer(config, run=tmp_path, share=share)
    trainer.run()
    saved = adapters.read(tmp_path / "final").arrays
    for name, value in trainer.stepper.masters.items():
        assert saved[name].size == 2 * value.size
        kept = mx.split(saved[name], 2, axis=_divided(name))[0]
        np.testing.assert_array_equal(np.array(kept), np.array(value))
    again = _trainer(config, run=tmp_path, share=share)
    again.resume()
    _same(_weights(again), _weights(trainer))
    for name, value in trainer.optimizer.state().items():
        np.testing.assert_array_equal(np.array(again.optimizer.state()[name]), np.array(value))


def test_clipping_uses_the_whole_models_norm() -> None:
    trainer, other = trainer_of({}), trainer_of({})
    works = _works(trainer, [[0, 1]])
    share = Share(squares=lambda gradients: 4 * sum_of_squares(gradients))
    plain = train_step(other.stepper, other.optimizer, works, rate=0.01)
    seen: dict[str, mx.array] = {}

    class Spy(Optimizer):
        def apply(self, parameters: Any, gradients: Any, rate: float) -> Any:
            seen.update(gradients)
            return super().apply(parameters, gradients, rate)

    spy = Spy(trainer.config, trainer.stepper.masters)
    step = train_step(trainer.stepper, spy, works, rate=0.01, clip=plain.norm, share=share)
    assert step.norm == pytest.approx(2 * plain.norm, rel=1e-5)
    assert float(mx.sqrt(sum_of_squares(seen))) == pytest.approx(plain.norm / 2, rel=1e-4)


def test_nothing_is_applied_where_another_process_is_broken() -> None:
    trainer = trainer_of({})
    before = _weights(trainer)

    def reduce(gradients: Any, totals: mx.array) -> Any:
        return gradients, totals + mx.array([0.0, 5, 5, 5, 0, 1])

    trainer.share = Share(reduce=reduce)
    with pytest.raises(TrainingDiverged, match="not finite"):
        trainer.run()
    _same(_weights(trainer), before)
