"""Puts the trainer and the server's jobs together: rows to a run, a run in turns beside live traffic.

Knows: lora's Trainer, and a seat beside an engine. Does not know HTTP.

A batch of the trainer is cut into pieces of whole rows, one a turn: gradients are sums over targets, so the
pieces add up to the batch's own gradient. How many rows a piece has follows from how long earlier ones took,
so that a stream beside it waits no longer than its gap target for a turn, and than twice that in all. A row
that alone would take longer waits until nothing is being answered.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlxserve.engine.beside import Beside, TrainingBase
from mlxserve.engine.memory import machine_budget
from mlxserve.errors import DoesNotFit, UsageError
from mlxserve.lora.batches import Batch, make_batch, width_of
from mlxserve.lora.config import LoraConfig, RunConfig, from_dict
from mlxserve.lora.data import Dataset, Sample, load_all
from mlxserve.lora.layers import add_adapters, find_targets
from mlxserve.lora.logs import Files
from mlxserve.lora.plan import Plan, plan_run
from mlxserve.lora.step import Micro
from mlxserve.lora.train import Trainer
from mlxserve.models.linear import is_switch
from mlxserve.models.memory import show_bytes
from mlxserve.server.ports import PreparedTraining, TrainingOrder

Tell = Callable[[Mapping[str, Any]], None]
EPOCHS, ROWS, MOST_TOKENS_A_ROW = 3, 8, 4096
MOST_TOKENS = 8192  # of a piece
IDLE_S = 0.5  # of a piece while nobody waits: whoever comes then waits no longer
# Share of its limit that a turn aims at; a piece of one row may take a little more than the limit.
AIM, SINGLE = 0.8, 1.1
REST_S, PATIENCE_S = 0.25, 600.0
PROBES = (32, 128)
NO_EXPERTS = "Layers of experts stay as they are: adapters on them are not served."


class JobTrainer:
    """Implements `server.ports.Trainer`. free_bytes: what the machine has left, for tests to say otherwise."""

    def __init__(self, free_bytes: Callable[[], int] | None = None) -> None:
        self._free_bytes = free_bytes or (lambda: machine_budget() - mx.get_active_memory())

    def prepare(self, order: TrainingOrder, base: TrainingBase) -> PreparedTraining:
        """Read, encode and mask the rows. Raises UsageError naming the row, or what of `lora` cannot be."""
        rows_per_step, epochs = order.rows_per_step or ROWS, order.epochs or EPOCHS
        factor = order.rate_factor or 1.0
        config = _config(order, epochs, rows_per_step, factor)
        config = replace(config, lora=_servable(base.model, config.lora))
        train, valid = load_all(config, base.tokenizer)
        every = math.ceil(len(train.items) / rows_per_step)  # an epoch
        config = replace(
            config, save=replace(config.save, every=every), eval=replace(config.eval, every=every)
        )
        return PreparedTraining(
            rows=len(train.items),
            tokens=int(train.lengths.sum()),
            epochs=epochs,
            rows_per_step=rows_per_step,
            rate_factor=factor,
            dropped=train.dropped,
            inner=(config, train, valid),
        )

    def run(self, prepared: PreparedTraining, base: TrainingBase, seat: Beside[Path], tell: Tell) -> Path:
        """Train on this thread, in turns; the folder of the adapter."""
        config, train, valid = prepared.inner
        plan = _plan(config, base, train, self._free_bytes())
        folder = Path(config.save.dir)
        add_adapters(base.model, config.lora, seed=config.train.seed)
        log = Files(folder, jsonl=True)

        def watch(event: dict[str, Any]) -> None:
            log(event)
            tell(event)

        if any(is_switch(module) for _, module in base.model.named_modules()):
            tell({"kind": "note", "message": NO_EXPERTS})
        trainer = Trainer(
            base.model,
            config,
            train,
            valid,
            vocabulary=_vocabulary(base),
            checkpointing=plan.checkpointing,
            base=base.name,
            architecture=base.config,
            run=folder,
            watch=watch,
        )
        InTurns(trainer, seat, plan, self._free_bytes, tell).install()
        trainer.run()
        return folder / "final"


def _servable(model: Any, config: LoraConfig) -> LoraConfig:
    """The settings without layers of experts, on which adapters are not served; who names one is refused."""
    modules = dict(model.named_modules())
    paths = find_targets(model, config)
    kept = [path for path in paths if not is_switch(modules[path])]
    if len(kept) == len(paths):
        return config
    if not kept or config.targets not in ("all-linear", "mlp"):
        chosen = next(path for path in paths if path not in kept)
        raise UsageError(
            f"lora.targets chooses {chosen}, a layer of experts, and adapters on those are not served.",
            param="lora.targets",
        )
    return replace(config, targets=kept)


def _config(order: TrainingOrder, epochs: int, rows_per_step: int, factor: float) -> RunConfig:
    longest = min(order.context, MOST_TOKENS_A_ROW)
    return from_dict(
        {
            "model": order.base,
            "data": {"train": str(order.train), "valid": str(order.valid) if order.valid else None},
            "lora": dict(order.lora),
            "train": {
                "epochs": epochs,
                "lr": 1e-4 * factor,
                "rows_per_batch": rows_per_step,
                "tokens_per_batch": rows_per_step * width_of(longest),
                "max_seq": longest,
                "compile": False,  # pieces have many shapes, each of which would be compiled
                "seed": order.seed,
            },
            "save": {"dir": str(order.folder)},
            "log": {"every": 1},
        }
    )


def _plan(config: RunConfig, base: TrainingBase, train: Dataset, free_bytes: int) -> Plan:
    """What one row at its longest needs; blocks are computed twice where that would take much of what is free."""
    longest = int(train.lengths.max())
    one = replace(config, train=replace(config.train, rows_per_batch=1, tokens_per_batch=1))

    def planned(checkpointing: bool) -> Plan:
        return plan_run(
            one, base.config, weight_bytes=0, float_bytes=4, longest=longest, checkpointing=checkpointing
        )

    plain = planned(False)
    return plain if plain.needed_bytes <= free_bytes // 4 else planned(True)


def _vocabulary(base: TrainingBase) -> int:
    text = base.config.get("text_config") or {}
    return int(base.config.get("vocab_size") or text.get("vocab_size") or base.tokenizer.vocab_size)


@dataclass(slots=True)
class Speed:
    """How long pieces take: seconds as a line over tokens, through the latest ones."""

    seen: deque[tuple[int, float]]

    @classmethod
    def unknown(cls) -> Speed:
        return cls(deque(maxlen=16))

    def record(self, tokens: int, seconds: float) -> None:
        self.seen.append((tokens, seconds))

    def seconds(self, tokens: int) -> float:
        """What a piece of so many tokens will take; 0 where nothing is known."""
        if not self.seen:
            return 0.0
        x, y = np.array(self.seen, np.float64).T
        slope = float(y.sum() / x.sum())
        if x.max() > x.min():
            slope = max(float(np.polyfit(x, y, 1)[0]), 0.1 * slope)
        return max(float((y - slope * x).mean()), 0.0) + slope * tokens


class InTurns:
    """Lets a trainer's stepper and optimiser work in turns of a seat."""

    def __init__(
        self, trainer: Trainer, seat: Beside[Path], plan: Plan, free_bytes: Callable[[], int], tell: Tell
    ) -> None:
        self._trainer, self._seat, self._plan, self._tell = trainer, seat, plan, tell
        self._free_bytes = free_bytes
        self._gradient = trainer.stepper.gradient
        self._loss = trainer.stepper.loss
        self._apply = trainer.optimizer.apply
        self._forward_and_back, self._forward = Speed.unknown(), Speed.unknown()
        self._said = ""

    def install(self) -> None:
        stepper: Any = self._trainer.stepper
        optimizer: Any = self._trainer.optimizer
        stepper.gradient, stepper.loss, optimizer.apply = self.gradient, self.loss, self.apply
        self._probe()

    def gradient(self, batch: Batch, reference: np.ndarray | None, seed: int) -> Micro:
        """As the stepper's, over pieces: sums of the loss, the targets and the gradients."""
        whole: Micro | None = None
        for number, piece in enumerate(
            self._pieces(batch, self._trainer.train_data.items, self._forward_and_back)
        ):
            micro = self._gradient(piece, None, seed + number)
            whole = micro if whole is None else _together(whole, micro)
            mx.eval(whole.loss_sum, whole.sequences, whole.gradients)
        assert whole is not None
        return whole

    def loss(self, batch: Batch, reference: np.ndarray | None = None) -> tuple[float, int]:
        valid = self._trainer.valid_data
        assert valid is not None
        parts = [self._loss(piece, None) for piece in self._pieces(batch, valid.items, self._forward)]
        return sum(total for total, _ in parts), sum(count for _, count in parts)

    def apply(self, *arguments: Any) -> Any:
        self._seat.pause()
        return self._apply(*arguments)

    def _pieces(self, batch: Batch, items: Sequence[Sample], speed: Speed) -> Iterator[Batch]:
        """The batch's rows, as many at a time as a turn has room for; each piece is one turn."""
        left = list(batch.items)
        while left:
            widths = [width_of(items[row].length - 1) for row in left]
            count = self._wait_for_turn(widths, speed)
            piece = make_batch(items, left[:count])
            began = time.perf_counter()
            yield piece
            speed.record(piece.padded_tokens, time.perf_counter() - began)
            left = left[count:]

    def _wait_for_turn(self, widths: Sequence[int], speed: Speed) -> int:
        """Stand still until a turn has time and memory for the first row; how many rows it has room for.

        Raises DoesNotFit where memory has been short for very long, Cancelled where the job was stopped.
        """
        rest_s, waited_s = 0.0, 0.0
        while True:
            limit_s = self._seat.pause(rest_s)
            rest_s = REST_S
            count = _rows_in_time(widths, speed, limit_s)
            if count == 0:
                self._say(
                    f"A row of {widths[0]} tokens takes about {speed.seconds(widths[0]):.2f} s, longer than "
                    "answers may wait; it is trained when none is running."
                )
                continue
            count = min(count, self._rows_in_memory(widths))
            if count > 0:
                return count
            waited_s += REST_S
            needed, free = self._needed_bytes(widths[0]), self._free_bytes()
            self._say(f"Paused: memory is short ({show_bytes(needed)} needed, {show_bytes(free)} free).")
            if waited_s > PATIENCE_S:
                raise DoesNotFit(
                    f"A row of {widths[0]} tokens needs {show_bytes(needed)} to train, and {show_bytes(free)} "
                    f"have been free for {PATIENCE_S:.0f} s.",
                    needed_bytes=needed,
                    available_bytes=free,
                )

    def _rows_in_memory(self, widths: Sequence[int]) -> int:
        free = self._free_bytes()
        count = 0
        while count < len(widths) and self._needed_bytes(sum(widths[: count + 1])) <= free:
            count += 1
        return count

    def _needed_bytes(self, tokens: int) -> int:
        plan = self._plan
        return plan.activation_bytes * tokens // plan.tokens + plan.loss_bytes + plan.gradient_bytes

    def _say(self, message: str) -> None:
        """Once, until something else is said."""
        kind = message.split()[0]
        if kind != self._said:
            self._said = kind
            self._tell({"kind": "note", "message": message, "level": "warn"})

    def _probe(self) -> None:
        """Two short rows whose results nobody keeps: how long a piece takes, before the first whole row."""
        longest: Sample = max(self._trainer.train_data.items, key=lambda item: item.length)
        for speed, work in (
            (self._forward_and_back, lambda piece: self._gradient(piece, None, 0)),
            (self._forward, lambda piece: self._loss(piece, None)),
        ):
            for tokens in PROBES:
                limit_s = self._seat.pause()
                if limit_s is not None and speed.seconds(tokens) > limit_s:
                    break
                piece = make_batch([_short(longest, tokens + 1)], [0])
                work(piece)  # the first run of a shape is slower than those that follow
                self._seat.pause()
                began = time.perf_counter()
                work(piece)
                speed.record(piece.padded_tokens, time.perf_counter() - began)


def _rows_in_time(widths: Sequence[int], speed: Speed, limit_s: float | None) -> int:
    """Rows that fit a turn, by their common width; one row may take a little longer than the limit."""
    aim_s = IDLE_S if limit_s is None else AIM * limit_s
    count = 0
    while count < len(widths):
        tokens = max(widths[: count + 1]) * (count + 1)
        if tokens > MOST_TOKENS or speed.seconds(tokens) > aim_s:
            break
        count += 1
    if count == 0 and (limit_s is None or speed.seconds(widths[0]) <= SINGLE * limit_s):
        return 1
    return count


def _short(sample: Sample, tokens: int) -> Sample:
    """The beginning of a row, all of it trained."""
    ids = sample.tokens[:tokens]
    targets = np.ones(len(ids), bool)
    targets[0] = False
    return Sample(sample.where, ids, targets)


def _together(one: Micro, other: Micro) -> Micro:
    return Micro(
        one.loss_sum + other.loss_sum,
        one.count + other.count,
        mx.concatenate([one.sequences, other.sequences]),
        {name: value + other.gradients[name] for name, value in one.gradients.items()},
    )
