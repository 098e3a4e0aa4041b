"""The trainer in turns: pieces add up to the whole batch, and their size follows time and memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxserve.cli.trainer import PROBES, InTurns, JobTrainer, Speed, _rows_in_time
from mlxserve.engine.beside import TrainingBase
from mlxserve.errors import Cancelled, DoesNotFit, UsageError
from mlxserve.lora.layers import add_adapters
from mlxserve.lora.train import Trainer
from mlxserve.models import adapters
from mlxserve.models.multilora import check_fit
from mlxserve.server.ports import PreparedTraining, TrainingOrder
from mlxserve.text.tokenizer import load_tokenizer
from tests import tiny

LARGE = 1 << 40


class Seat:
    """Counts turns and says how long each may take; stops the work after `turns`."""

    def __init__(self, limit_s: float | None = None, turns: int = 10_000) -> None:
        self.limit_s, self.left, self.rests = limit_s, turns, [0.0]

    def pause(self, rest_s: float = 0.0) -> float | None:
        self.rests.append(rest_s)
        self.left -= 1
        if self.left < 0:
            raise Cancelled("The work was stopped.")
        return self.limit_s


@pytest.fixture
def base(tmp_path: Path) -> TrainingBase:
    tiny.write_tokenizer(tmp_path / "base")
    tokenizer = load_tokenizer(tmp_path / "base")
    return TrainingBase("tiny", tmp_path, tiny.build("llama"), tiny.config("llama"), tokenizer)


def _prepared(base: TrainingBase, folder: Path, rows: int = 6, **order: Any) -> PreparedTraining:
    data = folder / "rows.jsonl"
    texts = ["word " * (3 * i + 1) for i in range(rows)]
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    values: dict[str, Any] = {"valid": None, "context": 512, "seed": 1, **order}
    return JobTrainer().prepare(TrainingOrder("tiny", data, folder=folder / "run", **values), base)


def _turns(
    base: TrainingBase, prepared: PreparedTraining, seat: Seat, free: Any = lambda: LARGE
) -> tuple[Trainer, InTurns, list[Any]]:
    from mlxserve.cli.trainer import _plan

    config, train, valid = prepared.inner
    add_adapters(base.model, config.lora, seed=1)
    vocabulary = tiny.config("llama")["vocab_size"]
    trainer = Trainer(base.model, config, train, valid, vocabulary=vocabulary, architecture=base.config)
    told: list[Any] = []
    plan = _plan(config, base, train, LARGE)
    made = InTurns(trainer, seat, plan, free, told.append)  # type: ignore[arg-type]
    return trainer, made, told


@pytest.fixture
def steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which a token takes a millisecond."""
    monkeypatch.setattr(Speed, "seconds", lambda self, tokens: 0.001 * tokens)


@pytest.mark.usefixtures("steady")
def test_pieces_add_up_to_the_batch(base: TrainingBase, tmp_path: Path) -> None:
    prepared = _prepared(base, tmp_path)
    trainer, turns, _ = _turns(base, prepared, Seat(limit_s=0.1))
    batch = trainer._batch(trainer.train_data, list(range(6)))
    whole = trainer.stepper.gradient(batch, None, 0)
    sizes: list[int] = []
    original = turns._gradient

    def counting(piece: Any, *rest: Any) -> Any:
        sizes.append(len(piece.where))
        return original(piece, *rest)

    turns._gradient = counting  # type: ignore[method-assign]
    pieces = turns.gradient(batch, None, 0)
    assert sum(sizes) == 6 and len(sizes) >= 4
    assert (pieces.count, float(pieces.loss_sum)) == (
        whole.count,
        pytest.approx(float(whole.loss_sum), rel=1e-5),
    )
    np.testing.assert_allclose(np.array(pieces.sequences), np.array(whole.sequences), rtol=1e-4)
    for name, value in whole.gradients.items():
        scale = float(mx.abs(value).max()) or 1.0
        assert float(mx.abs(pieces.gradients[name] - value).max()) <= 1e-4 * scale


@pytest.mark.usefixtures("steady")
def test_a_run_in_turns_is_the_run(base: TrainingBase, tmp_path: Path) -> None:
    """The same adapter, whether rows come a few a turn or all together."""
    found = []
    for name, limit in (("pieces", 0.1), ("all", None)):
        place = tmp_path / name
        place.mkdir()
        mine = TrainingBase(base.name, base.path, tiny.build("llama"), base.config, base.tokenizer)
        seat, told = Seat(limit), []
        prepared = _prepared(mine, place, epochs=2, rows_per_step=3)
        folder = JobTrainer(lambda: LARGE).run(prepared, mine, seat, told.append)  # type: ignore[arg-type]
        found.append(mx.load(str(folder / "adapters.safetensors")))
        steps = [event for event in told if event["kind"] == "step"]
        assert [event["step"] for event in steps] == [1, 2, 3, 4] and steps[-1]["steps"] == 4
        assert len(list((place / "run" / "checkpoints").iterdir())) == 2  # one an epoch
    for key, value in found[0].items():
        np.testing.assert_allclose(np.array(value), np.array(found[1][key]), atol=2e-4)


def test_how_many_rows_a_turn_has_room_for() -> None:
    speed = Speed.unknown()
    for tokens in PROBES:
        speed.record(tokens, 0.01 + 0.001 * tokens)
    assert speed.seconds(200) == pytest.approx(0.21, rel=1e-3)
    widths = [64] * 8
    assert _rows_in_time(widths, speed, 0.25) == 2  # 0.138 s; three rows would take 0.202
    assert _rows_in_time(widths, speed, None) == 7  # 0.458 s of half a second
    assert _rows_in_time([256], speed, 0.25) == 1  # 0.266 s: a little over the limit
    assert _rows_in_time([320], speed, 0.25) == 0  # 0.33 s: waits until nobody does
    assert _rows_in_time([4096], speed, None) == 1
    assert _rows_in_time([64, 128], speed, 0.25) == 1  # padded to the longer one, both would take 0.266


def test_a_row_too_long_for_a_turn_waits_until_nobody_does(base: TrainingBase, tmp_path: Path) -> None:
    prepared = _prepared(base, tmp_path, rows=1)
    seat = Seat(limit_s=0.01)
    trainer, turns, told = _turns(base, prepared, seat)
    turns._forward_and_back.record(32, 5.0)
    resting = iter([0.01] * 4)
    seat.pause = lambda rest_s=0.0: next(resting, None)  # type: ignore[method-assign]
    turns.gradient(trainer._batch(trainer.train_data, [0]), None, 0)
    assert len(told) == 1 and "trained when none is running" in told[0]["message"]


def test_it_pauses_while_memory_is_short(base: TrainingBase, tmp_path: Path) -> None:
    prepared = _prepared(base, tmp_path)
    free = iter([0] * 9)
    seat = Seat()
    trainer, turns, told = _turns(base, prepared, seat, lambda: next(free, LARGE))
    turns.gradient(trainer._batch(trainer.train_data, [0, 1]), None, 0)
    assert [event["message"].partition(":")[0] for event in told] == ["Paused"]
    assert seat.rests.count(0.25) >= 2
    _, turns, _ = _turns(base, prepared, Seat(), lambda: 0)
    with pytest.raises(DoesNotFit, match="have been free for 600 s"):
        turns.gradient(trainer._batch(trainer.train_data, [0]), None, 0)


def test_stopping_leaves_in_the_middle_of_a_step(base: TrainingBase, tmp_path: Path) -> None:
    prepared = _prepared(base, tmp_path)
    with pytest.raises(Cancelled):
        JobTrainer(lambda: LARGE).run(prepared, base, Seat(turns=12), lambda _: None)  # type: ignore[arg-type]


def test_a_bad_row_is_named(base: TrainingBase, tmp_path: Path) -> None:
    data = tmp_path / "file-1.jsonl"
    data.write_text('{"text": "good"}\n{"messages": "bad"}\n')
    order = TrainingOrder("tiny", data, None, tmp_path / "run", 512, 1)
    with pytest.raises(UsageError, match=r"file-1.jsonl:2"):
        JobTrainer().prepare(order, base)
    with pytest.raises(UsageError, match="lora.rank"):
        _prepared(base, tmp_path, lora={"rank": 0})


def test_experts_are_left_out_since_nobody_could_serve_them(tmp_path: Path) -> None:
    """Otherwise a job would train to its end and fail there."""
    tokenizer = load_tokenizer(tiny.write_tokenizer(tmp_path / "base"))
    config = tiny.config("qwen3_moe", num_hidden_layers=1)
    model = tiny.build("qwen3_moe", num_hidden_layers=1)
    base = TrainingBase("tiny", tmp_path, model, config, tokenizer)
    with pytest.raises(UsageError, match="switch_mlp.*a layer of experts"):
        _prepared(base, tmp_path, lora={"targets": ["switch_mlp.up_proj"]})
    with pytest.raises(UsageError, match="no layer here"):
        _prepared(base, tmp_path, lora={"targets": ["nothing"]})
    prepared = _prepared(base, tmp_path, rows=2, epochs=1)
    told: list[Any] = []
    folder = JobTrainer(lambda: LARGE).run(prepared, base, Seat(), told.append)  # type: ignore[arg-type]
    found = adapters.read(folder)
    check_fit(tiny.build("qwen3_moe", num_hidden_layers=1), found)
    assert any("q_proj" in path for path in found.paths)
    assert any("experts" in event.get("message", "") for event in told)
