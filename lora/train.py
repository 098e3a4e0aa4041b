"""The loop: batches to gradients to steps, with evaluation, saving and an exact way back in.

Knows: a Stepper, an Optimizer, the files of a run. This process's share of a run that several make, and a
function that writes samples, are handed in. Does not know how models are loaded or who watches.

A run is a pure function of model, data, settings and seed: batches follow from (seed, epoch), dropout from
the place in the data, so a resumed run is the run that was never stopped.
"""

from __future__ import annotations

import hashlib
import json
import math
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxserve.errors import Cancelled, MlxServeError, UsageError
from mlxserve.lora.adapters import Adapter
from mlxserve.lora.batches import Batch, make_batch, plan_epoch
from mlxserve.lora.checkpoint import State
from mlxserve.lora.config import RunConfig, to_dict
from mlxserve.lora.data import Dataset
from mlxserve.lora.layers import base_only
from mlxserve.lora.optim import Optimizer, schedule
from mlxserve.lora.packing import require_packing
from mlxserve.lora.saving import Saver
from mlxserve.lora.share import Share, Step, Window, Work, alone, data_parallel, finish_window
from mlxserve.lora.step import Stepper

Event = dict[str, Any]
CACHE_SHARE = 0.25  # of the bytes in use: how much MLX may keep beyond them for reuse


class TrainingDiverged(MlxServeError):
    """A loss or gradient that is no finite number; the parameters are those before the step."""

    code = "training_diverged"


@dataclass(slots=True)
class Outcome:
    """How a run ended: `why` is finished, early or stopped."""

    why: str
    steps: int
    best_loss: float | None
    last_loss: float | None
    history: list[Event] = field(default_factory=list)


def epoch_plan(config: RunConfig, data: Dataset, epoch: int) -> list[list[int]]:
    """Item numbers of each micro-batch of an epoch, in training order."""
    settings = config.train
    return plan_epoch(
        data.lengths,
        budget=settings.tokens_per_batch,
        seed=settings.seed,
        epoch=epoch,
        rows_per_batch=settings.rows_per_batch,
        packing=settings.packing,
        per_item=2 if settings.objective != "sft" else 1,
    )


def count_steps(config: RunConfig, data: Dataset, processes: int = 1) -> int:
    """Optimiser steps of a whole run."""
    settings = config.train
    if settings.steps is not None:
        return settings.steps
    window = settings.accumulate * processes
    return sum(math.ceil(len(epoch_plan(config, data, epoch)) / window) for epoch in range(settings.epochs))


class Trainer:
    """Trains `model` (adapters already in it) on `train`.

    watch: called with every event: {"kind": "step" | "eval" | "save" | "sample" | "note", …}.
    group: mx.distributed's, for data-parallel training; share: more than that (see Share). Each process
    calls with the same data. stop: an event that ends the run after the running step, as Ctrl-C does.
    """

    def __init__(
        self,
        model: nn.Module,
        config: RunConfig,
        train: Dataset,
        valid: Dataset | None = None,
        *,
        vocabulary: int,
        checkpointing: bool = False,
        base: str = "",
        architecture: dict[str, Any] | None = None,
        run: Path | None = None,
        watch: Callable[[Event], None] | None = None,
        generate: Callable[[], list[Event]] | None = None,
        group: Any = None,
        share: Share | None = None,
        stop: threading.Event | None = None,
    ) -> None:
        self.model, self.config, self.train_data, self.valid_data = model, config, train, valid
        self.watch, self.generate = watch or (lambda _: None), generate
        self.share, self.stop = share or data_parallel(group), stop or threading.Event()
        if config.train.packing:
            _require_packing(architecture or {}, self.share)
        self.stepper = Stepper(
            model, config.train, checkpointing=checkpointing, vocabulary=vocabulary, trunk=self.share.trunk
        )
        self.optimizer = Optimizer(config, self.stepper.masters)
        self.saver = Saver(run, config, self.stepper, self.optimizer, self.share, base)
        self.state = State(data=train.digest(), settings=_fingerprint(config))
        self.total_steps = count_steps(config, train, self.share.size)
        self.rate = schedule(config.train, self.total_steps)
        self.references = [self._reference(data) for data in (train, valid)]
        self.history: list[Event] = []
        self.outcome: Outcome | None = None
        self._stopping = False

    # The plan.

    def _plan(self, data: Dataset, epoch: int) -> list[list[int]]:
        return epoch_plan(self.config, data, epoch)

    def _batch(self, data: Dataset, numbers: list[int]) -> Batch:
        return make_batch(data.items, numbers, self.config.train.packing)

    def _reference(self, data: Dataset | None) -> np.ndarray | None:
        """(items, 2) log-probabilities under the model before training; for DPO only."""
        if data is None or self.config.train.objective != "dpo":
            return None
        found = np.zeros((len(data.items), 2), np.float32)
        with base_only(self.model):
            for numbers in self._plan(data, 0):
                logps = self.stepper.logps(self._batch(data, numbers))
                found[numbers] = logps.reshape(2, -1).T
        return found

    def _known(self, which: int, numbers: list[int]) -> np.ndarray | None:
        reference = self.references[which]
        return None if reference is None else reference[numbers].T.reshape(-1)

    # The loop.

    def run(self) -> Outcome:
        """Train to the end, or until stopped. Raises TrainingDiverged, naming rows, and Cancelled on Ctrl-C."""
        with _interrupts(self.stop):
            for _ in self.pieces():
                pass
        assert self.outcome is not None
        return self.outcome

    def pieces(self) -> Iterator[str]:
        """The same run in pieces, for who has other work between them: "batch" after each micro-batch's
        gradient, "step" after each step, "held-out" after each batch of an evaluation.

        `outcome` is there when it ends. Raises as `run`.
        """
        self.saver.begin()
        try:
            why = yield from self._loop()
        except TrainingDiverged:
            self._save_checkpoint()
            raise
        self._save_checkpoint()
        if why == "stopped":
            place = f" {self.saver.run} can be resumed." if self.saver.run else ""
            raise Cancelled(f"Stopped after step {self.state.step}.{place}")
        if self._evaluates and self.state.evaluated != self.state.step:
            yield from self._evaluate()
            if self._asked_to_stop:
                raise Cancelled(f"Stopped after the last step, {self.state.step}, in its evaluation.")
            self.saver.save_state(self.state)
        self._finish()
        losses = [event["loss"] for event in self.history if event["kind"] == "step"]
        last = losses[-1] if losses else None
        self.outcome = Outcome(why, self.state.step, self.state.best_loss, last, self.history)

    def _loop(self) -> Generator[str, None, str]:
        if (yield from self._settle()):  # a run that was stopped in an evaluation begins with it
            return "early"
        while self.state.step < self.total_steps:
            plan = self._plan(self.train_data, self.state.epoch)
            while self.state.cursor < len(plan) and self.state.step < self.total_steps:
                if self._stopping or self._asked_to_stop:
                    return "stopped"
                yield from self._step(plan)
                yield "step"
                if (yield from self._settle()):
                    return "early"
                self._save_if_due()
            if self.state.cursor >= len(plan):
                self.state.epoch, self.state.cursor = self.state.epoch + 1, 0
        return "finished"

    @property
    def _asked_to_stop(self) -> bool:
        """Several processes agree on it in a step's totals; one need not wait for that."""
        return self.share.reduce is alone and self.stop.is_set()

    def _step(self, plan: list[list[int]]) -> Iterator[str]:
        """One optimiser step over the next window, which is shorter at an epoch's end."""
        began = time.perf_counter()
        size = self.config.train.accumulate * self.share.size
        numbers = plan[self.state.cursor : self.state.cursor + size]
        window = Window()
        for place in range(self.share.rank, len(numbers), self.share.size):
            window.add(self.stepper, self._work(numbers[place], self.state.cursor + place))
            yield "batch"
        rate = self.rate(self.state.step)
        step = finish_window(
            self.stepper,
            self.optimizer,
            window,
            rate=rate,
            clip=self.config.train.clip,
            share=self.share,
            stop=self.stop.is_set(),
        )
        if not step.finite:
            raise TrainingDiverged(_diverged(self.state.step + 1, window))
        self._bound_cache()
        self._stopping = step.stop
        self.state.step += 1
        self.state.cursor += len(numbers)
        self.state.trained_tokens += step.tokens
        self._report(step, rate, time.perf_counter() - began)

    def _work(self, numbers: list[int], place: int) -> Work:
        """A micro-batch and the seed of its dropout, which is fixed by its place in the data."""
        entropy = np.random.SeedSequence([self.config.train.seed, self.state.epoch, place])
        seed = int(entropy.generate_state(1)[0])
        return Work(self._batch(self.train_data, numbers), self._known(0, numbers), seed)

    def _bound_cache(self) -> None:
        """MLX keeps freed buffers of every shape; its peak does not count them, the user's memory does."""
        if mx.get_cache_memory() > max(64 * 2**20, CACHE_SHARE * mx.get_active_memory()):
            mx.clear_cache()

    # What happens between steps.

    def _settle(self) -> Generator[str, None, bool]:
        """Evaluate when it is time and not done yet; True if the run should stop early."""
        step, every = self.state.step, self.config.eval.every
        if self._evaluates and every and step and step % every == 0 and self.state.evaluated != step:
            yield from self._evaluate()
        patience = self.config.eval.patience
        return patience is not None and self.state.bad_evals >= patience

    def _save_if_due(self) -> None:
        every = self.config.save.every
        if every and self.state.step % every == 0 and not self._asked_to_stop:
            self._save_checkpoint()

    @property
    def _evaluates(self) -> bool:
        return self.valid_data is not None or self.generate is not None

    def _evaluate(self) -> Iterator[str]:
        """The held-out loss and the samples, of which there may be one without the other. Asked to stop in the
        middle, it leaves no trace, and a resumed run does it again."""
        if self.valid_data is not None:
            loss = yield from self._held_out(self.valid_data, 1, stoppable=True)
            if loss is None:
                return
            self._take_loss(loss)
        self.state.evaluated = self.state.step
        for sample in self.generate() if self.generate is not None and self.share.writes else ():
            self._tell({"kind": "sample", "step": self.state.step, **sample})

    def _take_loss(self, loss: float) -> None:
        better = math.isfinite(loss) and (self.state.best_loss is None or loss < self.state.best_loss)
        self.state.bad_evals = 0 if better else self.state.bad_evals + 1
        if better:
            self.state.best_loss = loss
            self._save_adapter("best")
        self._tell({"kind": "eval", "step": self.state.step, "loss": loss, "best": better})

    def evaluate(self, data: Dataset, which: int = 1) -> float:
        """Mean loss over all targets (or pairs) of a data set, each counted once."""
        running = self._held_out(data, which)
        while True:
            try:
                next(running)
            except StopIteration as end:
                return float(end.value)

    def _held_out(
        self, data: Dataset, which: int, *, stoppable: bool = False
    ) -> Generator[str, None, float | None]:
        """The mean loss; None where it was stopped before the end."""
        total = np.zeros(6)
        for place, numbers in enumerate(self._plan(data, 0)):
            if stoppable and self._asked_to_stop:
                return None
            if place % self.share.size == self.share.rank:
                total[:2] += self.stepper.loss(self._batch(data, numbers), self._known(which, numbers))
                yield "held-out"
        _, sums = self.share.reduce({}, mx.array(total.astype(np.float32)))
        return float(total[0] / total[1]) if self.share.reduce is alone else float(sums[0] / sums[1])

    def _report(self, step: Step, rate: float, seconds: float) -> None:
        self._tell(
            {
                "kind": "step",
                "step": self.state.step,
                "steps": self.total_steps,
                "epoch": self.state.epoch,
                "loss": step.loss,
                "lr": rate,
                "grad_norm": step.norm,
                "targets": step.count,
                "tokens": step.tokens,
                "tokens_per_s": step.tokens / seconds,
                "padding": 1 - step.tokens / step.padded,
                "active_bytes": mx.get_active_memory(),
                "peak_bytes": mx.get_peak_memory(),
                "seconds": seconds,
            }
        )

    def _tell(self, event: Event) -> None:
        if event["kind"] in ("step", "eval"):
            self.history.append(event)
        if self.share.writes:
            self.watch(event)

    # Files.

    def adapter(self) -> Adapter:
        """What was trained, now; all processes of a share call it."""
        return self.saver.adapter()

    def _save_adapter(self, name: str) -> None:
        self._tell_saved(self.saver.save_adapter(name))

    def _save_checkpoint(self) -> None:
        self._tell_saved(self.saver.save_checkpoint(self.state))

    def _tell_saved(self, path: Path | None) -> None:
        if path is not None:
            self._tell({"kind": "save", "step": self.state.step, "path": str(path)})

    def _finish(self) -> None:
        """Write final/: the best adapter where eval.keep says so and there was an evaluation, else the last."""
        if self.config.eval.keep == "best" and self.state.best_loss is not None:
            self.saver.take_best()
        self._save_adapter("final")

    def resume(self, path: Path | None = None) -> None:
        """Take up the run folder's newest checkpoint, or `path`; with several processes, the writing one's.

        Raises UsageError where there is none, or where it belongs to other data or settings.
        """
        self.state, read = self.saver.resume(self.state, path)
        places = {"step": self.state.step, "evaluated": self.state.evaluated}
        self._tell({"kind": "resume", **places, "path": str(read)})


def _fingerprint(config: RunConfig) -> str:
    """A name for the settings that decide what is computed; not where it is saved or how it is shown."""
    values = to_dict(config)
    chosen = {key: values[key] for key in ("model", "quantize", "lora", "train")}
    return hashlib.sha256(json.dumps(chosen, sort_keys=True).encode()).hexdigest()


def _require_packing(architecture: dict[str, Any], share: Share) -> None:
    if share.trunk is not None:
        raise UsageError("train.packing does not work with a sharded model.", param="train.packing")
    require_packing(architecture)


def _diverged(step: int, window: Window) -> str:
    if window.bad:
        return (
            f"The loss of step {step} is not finite at {_listed(window.bad)}; lower train.lr, or look at these "
            "rows."
        )
    rows = _listed(window.where) if window.where else "another process's"
    return f"The loss or the gradient of step {step} is not finite; its rows are {rows}."


def _listed(rows: list[str]) -> str:
    shown = ", ".join(rows[:8])
    return shown + (f" and {len(rows) - 8} more" if len(rows) > 8 else "")


@contextmanager
def _interrupts(stop: threading.Event) -> Iterator[None]:
    """The first Ctrl-C (or SIGTERM) sets `stop`, so that a step is never cut in two; a second one is the
    usual one. A signal that the process ignores, as under nohup, stays ignored."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    names = (signal.SIGINT, signal.SIGTERM)
    before = {name: signal.getsignal(name) for name in names if signal.getsignal(name) != signal.SIG_IGN}

    def on_signal(number: int, _: Any) -> None:
        stop.set()
        signal.signal(number, before[signal.Signals(number)])

    for name in before:
        signal.signal(name, on_signal)
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)
