"""The loop: exact sums, exact resume, clear ends. Tiny models, a byte tokenizer, a few steps."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlxserve.errors import Cancelled, MlxServeError, Unsupported, UsageError
from mlxserve.lora import adapters, checkpoint
from mlxserve.lora.batches import make_batch
from mlxserve.lora.config import RunConfig, from_dict
from mlxserve.lora.data import Dataset, Pair, Sample
from mlxserve.lora.layers import add_adapters
from mlxserve.lora.step import Stepper
from mlxserve.lora.train import Trainer, TrainingDiverged
from tests import tiny
from tests.conftest import ROOT


def _sample(draw: np.random.Generator, length: int, prompt: int, where: str = "f:1") -> Sample:
    tokens = draw.integers(0, 256, length).astype(np.int32)
    return Sample(where, tokens, np.arange(length) >= max(1, prompt))


def _data(count: int = 11, seed: int = 0, low: int = 6, high: int = 40) -> Dataset:
    draw = np.random.default_rng(seed)
    lengths = draw.integers(low, high, count)
    return Dataset([_sample(draw, int(n), int(n) // 3, f"f:{i}") for i, n in enumerate(lengths)], count)


def _config(**sections: dict[str, Any]) -> RunConfig:
    train = {"tokens_per_batch": 128, "accumulate": 2, "lr": 0.01, "warmup": 0, **sections.pop("train", {})}
    return from_dict(
        {"model": "tiny", "lora": {"rank": 2, **sections.pop("lora", {})}, "train": train, **sections}
    )


def _trainer(config: RunConfig, data: Dataset | None = None, kind: str = "llama", **settings: Any) -> Trainer:
    model = tiny.build(kind)
    add_adapters(model, config.lora, seed=config.train.seed)
    settings.setdefault("architecture", tiny.config(kind))
    return Trainer(model, config, data or _data(), vocabulary=tiny.VOCAB, **settings)


def _weights(trainer: Trainer) -> dict[str, np.ndarray]:
    return {name: np.array(value) for name, value in trainer.stepper.masters.items()}


def _same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name])


def _plain_gradient(model: nn.Module, samples: list[Sample]) -> tuple[float, dict[str, np.ndarray]]:
    """Mean cross-entropy over all targets by full logits, row by row, unpadded."""
    names = [name for name, _ in tree_flatten(model.trainable_parameters())]

    def loss(model: nn.Module) -> mx.array:
        total, count = mx.array(0.0), 0
        for sample in samples:
            logits = model(mx.array(sample.tokens[None, :-1]))[0]
            each = nn.losses.cross_entropy(logits, mx.array(sample.tokens[1:]))
            total = total + (each * mx.array(sample.targets[1:])).sum()
            count += sample.target_count
        return total / count

    value, gradients = nn.value_and_grad(model, loss)(model)
    flat = dict(tree_flatten(gradients))
    return value.item(), {name: np.array(flat[name]) for name in names}


def _summed(
    stepper: Stepper, items: list[Any], parts: list[list[int]]
) -> tuple[float, dict[str, np.ndarray]]:
    micros = [stepper.gradient(make_batch(items, part, stepper.config.packing), None, 0) for part in parts]
    count = sum(micro.count for micro in micros)
    loss = sum(micro.loss_sum.item() for micro in micros) / count
    gradients = {}
    for name in micros[0].gradients:
        gradients[name] = sum(np.array(micro.gradients[name]) for micro in micros) / count
    return loss, gradients


@pytest.mark.parametrize(
    ("kind", "lora"),
    [
        ("llama", {}),
        ("llama", {"type": "dora"}),
        ("llama", {"type": "full"}),
        ("llama", {"targets": ["q_proj", "down_proj"]}),
        ("qwen3_moe", {}),
        ("gemma2", {"type": "full"}),
    ],
)
def test_case_54_micro_batches_add_up(kind: str, lora: dict[str, Any]) -> None:
    """Fault 5 of mlx-lm: it averages the means. Here 10 and 100 targets give the gradient of 110."""
    model = tiny.build(kind)
    config = _config(lora=lora, train={"loss_chunk": 16})
    add_adapters(model, config.lora)
    for _, layer in model.named_modules():
        if "lora_b" in layer:
            layer.lora_b = 0.1 * mx.random.normal(layer.lora_b.shape)
    draw = np.random.default_rng(1)
    items = [_sample(draw, 12, 2), _sample(draw, 104, 4)]
    expected, expected_gradients = _plain_gradient(model, items)
    for checkpointing in (False, True):
        stepper = Stepper(model, config.train, checkpointing=checkpointing, vocabulary=tiny.VOCAB)
        for parts in ([[0], [1]], [[0, 1]]):
            loss, gradients = _summed(stepper, items, parts)
            assert loss == pytest.approx(expected, rel=1e-5)
            for name, value in expected_gradients.items():
                scale = np.abs(value).max() + 1e-6
                np.testing.assert_allclose(gradients[name] / scale, value / scale, atol=2e-3)


def test_the_last_partial_window_is_applied() -> None:
    """Faults 4 and 5 of mlx-lm: 11 rows in batches of 4, windows of 2, are 3 batches and 2 steps."""
    config = _config(train={"rows_per_batch": 4, "tokens_per_batch": 4096})
    trainer = _trainer(config)
    outcome = trainer.run()
    assert (outcome.steps, trainer.total_steps) == (2, 2)
    counted = sum(event["targets"] for event in outcome.history)
    assert counted == sum(item.target_count for item in trainer.train_data.items)


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "gpt_oss"])
def test_packed_rows_have_the_padded_gradient(kind: str) -> None:
    """gemma3 and gpt_oss slide over 8 tokens; segments are longer than that."""
    model = tiny.build(kind)
    config = _config(lora={"targets": "attention"})
    add_adapters(model, config.lora)
    for _, layer in model.named_modules():
        if "lora_b" in layer:
            layer.lora_b = 0.1 * mx.random.normal(layer.lora_b.shape)
    items = _data(4, low=12, high=30).items
    trainers = [
        _trainer(_config(train={"packing": packing}), architecture=tiny.config(kind), kind=kind)
        for packing in (False, True)
    ]
    losses = []
    for trainer in trainers:
        stepper = Stepper(model, trainer.config.train, checkpointing=False, vocabulary=tiny.VOCAB)
        losses.append(_summed(stepper, items, [[0, 1, 2, 3]]))
    assert losses[0][0] == pytest.approx(losses[1][0], rel=1e-5)
    for name in losses[0][1]:
        scale = np.abs(losses[0][1][name]).max() + 1e-6
        np.testing.assert_allclose(losses[0][1][name] / scale, losses[1][1][name] / scale, atol=2e-3)


def test_packing_is_refused_where_rows_cannot_stand_alone() -> None:
    with pytest.raises(Unsupported, match="train.packing"):
        _trainer(_config(train={"packing": True}), kind="mamba2", architecture=tiny.config("mamba2"))


@pytest.mark.parametrize(
    "settings",
    [
        {"train": {"optimizer": "adamw", "epochs": 2}, "lora": {"dropout": 0.3, "plus_ratio": 4.0}},
        {"train": {"optimizer": "muon"}, "lora": {"type": "dora"}},
        {"train": {"optimizer": "lion", "packing": True}},
        {"train": {"optimizer": "adafactor"}, "lora": {"type": "full", "layers": 1}},
        {"train": {"optimizer": "adamw8bit"}, "lora": {"rank": 64, "targets": ["q_proj"]}},
    ],
)
def test_case_56_resume_is_bit_identical(tmp_path: Path, settings: dict[str, Any]) -> None:
    """Fault 7 of mlx-lm: only weights came back. Stopped at every step, the end is the same to the bit."""
    config = _config(**settings, save={"every": 1, "keep": 99}, eval={"every": 2})
    valid = _data(3, seed=5)
    whole = _trainer(config, valid=valid, run=tmp_path / "whole")
    history = whole.run().history
    for step in range(1, whole.total_steps):
        again = _trainer(config, valid=valid, run=tmp_path / "whole")
        again.resume(tmp_path / "whole" / "checkpoints" / str(step))
        assert again.state.step == step
        again.saver.run = None
        again.config = config
        rest = again.run().history
        expected = [event for event in history if event["step"] > step]
        assert [event["loss"] for event in rest] == [event["loss"] for event in expected]
        if config.eval.keep == "last" or step + 1 == whole.total_steps:
            assert again.optimizer.state().keys() == whole.optimizer.state().keys()
            for name, value in again.optimizer.state().items():
                np.testing.assert_array_equal(np.array(value), np.array(whole.optimizer.state()[name]))


def test_resume_refuses_other_data_and_settings(tmp_path: Path) -> None:
    config = _config(save={"every": 1})
    _trainer(config, run=tmp_path).run()
    with pytest.raises(UsageError, match="other rows"):
        _trainer(config, _data(seed=9), run=tmp_path).resume()
    with pytest.raises(UsageError, match="other settings"):
        _trainer(_config(train={"lr": 0.5}), run=tmp_path).resume()
    with pytest.raises(UsageError, match="no checkpoint"):
        _trainer(config, run=tmp_path / "none").resume()


def test_same_seed_same_run_other_seed_other_run() -> None:
    def end(seed: int) -> dict[str, np.ndarray]:
        trainer = _trainer(_config(train={"seed": seed}))
        trainer.run()
        return _weights(trainer)

    first = end(1)
    _same(first, end(1))
    assert any((first[name] != value).any() for name, value in end(2).items())


def test_case_51_a_loss_that_is_not_finite_stops_and_names_the_row(tmp_path: Path) -> None:
    """Fault 3 of mlx-lm: training went on with NaN."""
    data = _data()
    data.items[4].tokens[2] = 200
    trainer = _trainer(_config(train={"lr": 0.0001}), data, run=tmp_path)
    table = trainer.model.model.embed_tokens
    table.weight[200] = float("nan")
    for item in data.items:
        if item is not data.items[4]:
            item.tokens[item.tokens == 200] = 1
    # the tied head's row 200 is NaN too, so every row is at fault unless the head is another
    trainer.stepper.split.logits = lambda h: h @ mx.ones((tiny.VOCAB, 64)).T  # type: ignore[method-assign]
    with pytest.raises(TrainingDiverged) as caught:
        trainer.run()
    assert "f:4" in caught.value.message and "f:5" not in caught.value.message
    assert all(np.isfinite(value).all() for value in _weights(trainer).values())


def test_early_stopping_and_the_best(tmp_path: Path) -> None:
    """With a rate that destroys the model the first evaluation is the best and patience ends the run."""
    config = _config(
        train={"lr": 5.0, "epochs": 20, "schedule": "constant"}, eval={"every": 1, "patience": 2}
    )
    trainer = _trainer(config, valid=_data(3, seed=5), run=tmp_path)
    outcome = trainer.run()
    assert outcome.why == "early" and outcome.steps < trainer.total_steps
    evals = [event for event in outcome.history if event["kind"] == "eval"]
    assert outcome.best_loss == min(event["loss"] for event in evals)
    best, final = adapters.read(tmp_path / "best"), adapters.read(tmp_path / "final")
    _same({n: np.array(v) for n, v in best.arrays.items()}, {n: np.array(v) for n, v in final.arrays.items()})
    assert trainer.evaluate(_data(3, seed=5)) == pytest.approx(outcome.best_loss)


def test_training_learns() -> None:
    """One repeated text is learnt by each optimiser."""
    tokens = np.array([7, 8, 9, 10] * 5, np.int32)
    data = Dataset([Sample("f:1", tokens, np.arange(20) >= 1)] * 4, 4)
    for name, rate in (
        ("adamw", 0.01),
        ("adafactor", 0.01),
        ("muon", 0.02),
        ("lion", 0.003),
    ):
        config = _config(
            train={"optimizer": name, "lr": rate, "epochs": 12, "schedule": "constant", "accumulate": 1}
        )
        history = _trainer(config, data).run().history
        assert history[-1]["loss"] < 0.6 * history[0]["loss"], name


@pytest.mark.parametrize("objective", ["dpo", "orpo"])
def test_preferences_are_learnt(objective: str) -> None:
    draw = np.random.default_rng(3)
    pairs = [Pair(_sample(draw, 12, 6), _sample(draw, 14, 6)) for _ in range(3)]
    config = _config(train={"objective": objective, "beta": 0.5, "epochs": 15, "schedule": "constant"})
    trainer = _trainer(config, Dataset(pairs, 3))
    batch = make_batch(pairs, [0, 1, 2])

    def lead() -> float:
        logps = trainer.stepper.logps(batch)
        return float((logps[:3] - logps[3:]).sum())

    before = lead()
    history = trainer.run().history
    assert lead() > before + 1
    assert history[-1]["loss"] < history[0]["loss"]
    if objective == "dpo":
        assert history[0]["loss"] == pytest.approx(math.log(2), abs=1e-3)


@pytest.mark.parametrize("name", [signal.SIGINT, signal.SIGTERM])
def test_stopping_saves_and_says_so(tmp_path: Path, name: signal.Signals) -> None:
    seen: list[int] = []
    before = signal.signal(name, lambda number, _: seen.append(number))  # a second one would come here
    try:
        own = signal.getsignal(name)
        trainer = _trainer(_config(train={"epochs": 50}), run=tmp_path)
        trainer.watch = lambda event: (
            os.kill(os.getpid(), name) if event["kind"] == "step" and event["step"] == 2 else None
        )
        with pytest.raises(Cancelled, match="after step"):
            trainer.run()
        assert signal.getsignal(name) is own
    finally:
        signal.signal(name, before)
    saved = checkpoint.checkpoints(tmp_path)[-1]
    assert int(saved.name) == trainer.state.step >= 2 and not seen


CHILD = """
import sys, time
import mlxserve
from pathlib import Path
from mlxserve.lora import checkpoint
import mlx.core as mx
run = Path(sys.argv[1])
arrays = {str(i): mx.random.normal((256, 256)) for i in range(16)}
def weights(folder):
    mx.save_safetensors(str(folder / "adapters.safetensors"), arrays)
step, end = 0, time.monotonic() + 120
while time.monotonic() < end:
    step += 1
    checkpoint.save_checkpoint(run, checkpoint.State(step=step), arrays, weights, 2)
    checkpoint.write_folder(run / "best", weights)
    print(step, flush=True)
"""


@pytest.mark.parametrize("wait_s", [0.0, 0.013, 0.031])
def test_a_killed_save_leaves_a_usable_checkpoint(tmp_path: Path, wait_s: float) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(tmp_path)], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert child.stdout is not None
    try:
        saved = [child.stdout.readline().strip() for _ in range(3)]
        time.sleep(wait_s)
    finally:
        child.kill()
        child.wait(timeout=60)
    assert saved == ["1", "2", "3"]
    checkpoint.recover(tmp_path)
    found = checkpoint.checkpoints(tmp_path)
    assert len(found) >= 2
    for path in found:
        state, arrays = checkpoint.read_checkpoint(path)
        assert state.step == int(path.name) and len(arrays) == 16
        mx.eval(arrays, mx.load(str(path / "adapters.safetensors")))
    assert len(dict(mx.load(str(tmp_path / "best" / "adapters.safetensors")))) == 16
    assert not [p for p in tmp_path.rglob("*") if p.name.startswith((".writing-", ".old-"))]


@pytest.mark.parametrize("moment", ["before", "between"])
def test_every_moment_of_a_replacement_is_safe(tmp_path: Path, moment: str) -> None:
    (tmp_path / "best").mkdir()
    (tmp_path / "best" / "a").write_text("old")
    (tmp_path / ".writing-best").mkdir()
    if moment == "between":
        (tmp_path / "best").rename(tmp_path / ".old-best")
    checkpoint.recover(tmp_path)
    assert (tmp_path / "best" / "a").read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["best"]


def test_a_full_disk_leaves_what_was_there(tmp_path: Path) -> None:
    checkpoint.write_folder(tmp_path / "best", lambda folder: (folder / "a").touch())

    def fill(folder: Path) -> None:
        (folder / "b").touch()
        raise RuntimeError("[write] Unable to write 99 bytes to file.")

    with pytest.raises(MlxServeError, match="best cannot be written: .*99 bytes to file.$"):
        checkpoint.write_folder(tmp_path / "best", fill)
    assert [path.name for path in tmp_path.rglob("*")] == ["best", "a"]


def test_case_58_one_long_row_is_its_own_batch_and_memory_stays_bounded() -> None:
    draw = np.random.default_rng(0)
    items = [_sample(draw, 20, 5, f"f:{i}") for i in range(20)] + [_sample(draw, 1000, 900, "f:long")]
    trainer = _trainer(_config(train={"tokens_per_batch": 256, "accumulate": 1}), Dataset(items, 21))
    plan = trainer._plan(trainer.train_data, 0)
    assert [20] in plan
    assert max(len(numbers) * 24 for numbers in plan if numbers != [20]) <= 256
    trainer.run()
    assert mx.get_cache_memory() <= max(64 * 2**20, mx.get_active_memory())


def test_files_of_a_run(tmp_path: Path) -> None:
    config = _config(save={"every": 1, "keep": 2})
    _trainer(config, run=tmp_path).run()
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"config.yaml", "checkpoints", "final"}
    assert len(checkpoint.checkpoints(tmp_path)) == 2
    settings = json.loads((tmp_path / "final" / "adapter_config.json").read_text())
    assert settings["lora_parameters"]["scale"] == 16.0


def test_a_run_that_stopped_early_is_not_taken_further(tmp_path: Path) -> None:
    """Killed behind its last checkpoint, it must end as the run that was not."""
    config = _config(train={"lr": 5.0, "epochs": 20}, eval={"every": 1, "patience": 2}, lora={"layers": 1})
    valid = _data(3, seed=5)
    whole = _trainer(config, valid=valid, run=tmp_path).run()
    again = _trainer(config, valid=valid, run=tmp_path)
    again.resume()
    outcome = again.run()
    assert (outcome.why, outcome.steps, outcome.history) == ("early", whole.steps, [])


def test_stopped_in_an_evaluation_it_is_done_again(tmp_path: Path) -> None:
    config = _config(eval={"every": 2}, train={"steps": 3, "rows_per_batch": 1}, lora={"layers": 1})
    valid = _data(3, seed=5)
    whole = _trainer(config, valid=valid, run=tmp_path / "whole").run()
    stopped = _trainer(config, valid=valid, run=tmp_path / "cut")
    loss, seen = stopped.stepper.loss, []

    def stopping(*arguments: Any) -> tuple[float, int]:
        seen.append(1)
        stopped.stop.set()
        return loss(*arguments)

    stopped.stepper.loss = stopping  # type: ignore[method-assign]
    with pytest.raises(Cancelled, match="after step 2"):
        stopped.run()
    assert len(seen) == 1  # of three batches
    again = _trainer(config, valid=valid, run=tmp_path / "cut")
    again.resume()
    rest = again.run()
    expected = [(e["kind"], e["step"], e["loss"]) for e in whole.history]
    assert [(e["kind"], e["step"], e["loss"]) for e in [*stopped.history, *rest.history]] == expected
    done = _trainer(config, valid=valid, run=tmp_path / "cut")
    done.resume()
    assert done.run().history == []  # nothing is trained or evaluated twice
