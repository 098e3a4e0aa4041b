"""The loop: batches to gradients to steps, with evaluation, saving and an exact way back in.

Knows: a Stepper, an Optimizer, the files of a run. A process group for data-parallel training and a
function that writes samples are handed in. Does not know how models are loaded or who watches.

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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxserve.errors import Cancelled, MlxServeError, UsageError
from mlxserve.lora import adapters, checkpoint
from mlxserve.lora.batches import Batch, make_batch, plan_epoch
from mlxserve.lora.config import RunConfig, to_dict, write_yaml
from mlxserve.lora.data import Dataset
from mlxserve.lora.layers import base_only
from mlxserve.lora.optim import Arrays, Optimizer, clip_by_norm, schedule
from mlxserve.lora.packing import require_packing
from mlxserve.lora.step import Micro, Stepper

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


class Trainer:
    """Trains `model` (adapters already in it) on `train`.

    watch: called with every event: {"kind": "step" | "eval" | "save" | "sample" | "note", …}.
    group: mx.distributed's; each process calls with the same data and its own rank. stop: an event that ends
    the run after the running step, as Ctrl-C does. Only rank 0 writes files.
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
        stop: threading.Event | None = None,
    ) -> None:
        self.model, self.config, self.train_data, self.valid_data = model, config, train, valid
        self.base, self.run_folder, self.watch, self.generate = base, run, watch or (lambda _: None), generate
        self.group, self.stop = group, stop or threading.Event()
        self.rank: int = group.rank() if group is not None else 0
        self.size: int = group.size() if group is not None else 1
        if config.train.packing:
            require_packing(architecture or {})
        self.stepper = Stepper(model, config.train, checkpointing=checkpointing, vocabulary=vocabulary)
        self.optimizer = Optimizer(config, self.stepper.masters)
        self.state = checkpoint.State(data=train.digest(), settings=_fingerprint(config))
        self.total_steps = self._count_steps()
        self.rate = schedule(config.train, self.total_steps)
        self.references = [self._reference(data) for data in (train, valid)]
        self.history: list[Event] = []
        self._saved_step = -1
        self._just_evaluated = False

    # The plan.

    def _plan(self, data: Dataset, epoch: int) -> list[list[int]]:
        settings = self.config.train
        return plan_epoch(
            data.lengths,
            budget=settings.tokens_per_batch,
            seed=settings.seed,
            epoch=epoch,
            rows_per_batch=settings.rows_per_batch,
            packing=settings.packing,
            per_item=2 if settings.objective != "sft" else 1,
        )

    def _count_steps(self) -> int:
        window = self.config.train.accumulate * self.size
        if self.config.train.steps is not None:
            return self.config.train.steps
        return sum(
            math.ceil(len(self._plan(self.train_data, epoch)) / window)
            for epoch in range(self.config.train.epochs)
        )

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
        self._write_settings()
        why = "finished"
        with _interrupts(self.stop):
            try:
                why = self._loop()
            except TrainingDiverged:
                self._save_checkpoint()
                raise
        self._save_checkpoint()
        if why == "stopped":
            place = f" {self.run_folder} can be resumed." if self.run_folder else ""
            raise Cancelled(f"Stopped after step {self.state.step}.{place}")
        if self._evaluates and not self._just_evaluated:
            self._evaluate()
        self._finish()
        losses = [event["loss"] for event in self.history if event["kind"] == "step"]
        return Outcome(
            why, self.state.step, self.state.best_loss, losses[-1] if losses else None, self.history
        )

    def _loop(self) -> str:
        while self.state.step < self.total_steps:
            plan = self._plan(self.train_data, self.state.epoch)
            while self.state.cursor < len(plan) and self.state.step < self.total_steps:
                if self.stop.is_set():
                    return "stopped"
                self._step(plan)
                if self._after_step():
                    return "early"
            if self.state.cursor >= len(plan):
                self.state.epoch, self.state.cursor = self.state.epoch + 1, 0
        return "finished"

    def _step(self, plan: list[list[int]]) -> None:
        """One optimiser step over the next window, which is shorter at an epoch's end."""
        began = time.perf_counter()
        window = plan[self.state.cursor : self.state.cursor + self.config.train.accumulate * self.size]
        mine = range(self.rank, len(window), self.size)
        sums: Arrays | None = None
        loss, count, tokens, padded = 0.0, 0, 0, 0
        where: list[str] = []
        for place in mine:
            batch = self._batch(self.train_data, window[place])
            micro = self._micro(batch, window[place], self.state.cursor + place)
            sums = micro.gradients if sums is None else {n: sums[n] + g for n, g in micro.gradients.items()}
            mx.eval(sums)
            loss += float(micro.loss_sum)
            count += micro.count
            tokens, padded = tokens + batch.real_tokens, padded + batch.padded_tokens
            where += batch.where
        sums, loss, count, tokens = self._shared(sums, loss, count, tokens)
        rate = self.rate(self.state.step)
        gradients, norm = clip_by_norm({n: g / count for n, g in sums.items()}, self.config.train.clip)
        if not math.isfinite(float(norm)):
            raise TrainingDiverged(
                f"The gradient of step {self.state.step + 1} is not finite; its rows are {_listed(where)}."
            )
        masters = self.optimizer.apply(self.stepper.masters, gradients, rate)
        mx.eval(masters, self.optimizer.state())
        self.stepper.install(masters)
        self._bound_cache()
        self.state.step += 1
        self.state.cursor += len(window)
        self.state.trained_tokens += tokens
        self._report(loss, count, rate, float(norm), tokens, padded, time.perf_counter() - began)

    def _micro(self, batch: Batch, numbers: list[int], place: int) -> Micro:
        seed = int(
            np.random.SeedSequence([self.config.train.seed, self.state.epoch, place]).generate_state(1)[0]
        )
        micro = self.stepper.gradient(batch, self._known(0, numbers), seed)
        if not math.isfinite(float(micro.loss_sum)):
            bad = np.flatnonzero(~np.isfinite(np.array(micro.sequences)))
            rows = [batch.where[i] for i in bad] or list(batch.where)
            raise TrainingDiverged(
                f"The loss of step {self.state.step + 1} is not finite at {_listed(rows)}; lower train.lr, or "
                "look at these rows."
            )
        return micro

    def _shared(
        self, sums: Arrays | None, loss: float, count: int, tokens: int
    ) -> tuple[Arrays, float, int, int]:
        """Sums over all processes; a process without a batch adds zeros."""
        if sums is None:
            sums = {name: mx.zeros_like(value) for name, value in self.stepper.masters.items()}
        if self.size == 1:
            return sums, loss, count, tokens
        totals = mx.distributed.all_sum(mx.array([loss, count, tokens], mx.float32), group=self.group)
        sums = {name: mx.distributed.all_sum(value, group=self.group) for name, value in sorted(sums.items())}
        mx.eval(totals, sums)
        return sums, float(totals[0]), int(totals[1]), int(totals[2])

    def _bound_cache(self) -> None:
        """MLX keeps freed buffers of every shape; its peak does not count them, the user's memory does."""
        if mx.get_cache_memory() > max(64 * 2**20, CACHE_SHARE * mx.get_active_memory()):
            mx.clear_cache()

    # What happens between steps.

    def _after_step(self) -> bool:
        """Evaluate and save when it is time; True if the run should stop early."""
        self._just_evaluated = False
        every = self.config.eval.every
        if self._evaluates and every and self.state.step % every == 0:
            self._evaluate()
        patience = self.config.eval.patience
        if patience is not None and self.state.bad_evals >= patience:
            return True
        if self.config.save.every and self.state.step % self.config.save.every == 0:
            self._save_checkpoint()
        return False

    @property
    def _evaluates(self) -> bool:
        return self.valid_data is not None

    def _evaluate(self) -> None:
        assert self.valid_data is not None
        loss = self.evaluate(self.valid_data, 1)
        self._just_evaluated = True
        better = self.state.best_loss is None or loss < self.state.best_loss
        self.state.bad_evals = 0 if better else self.state.bad_evals + 1
        if better:
            self.state.best_loss = loss
            self._save_adapter("best")
        self._tell({"kind": "eval", "step": self.state.step, "loss": loss, "best": better})
        for sample in self.generate() if self.generate is not None else ():
            self._tell({"kind": "sample", "step": self.state.step, **sample})

    def evaluate(self, data: Dataset, which: int = 1) -> float:
        """Mean loss over all targets (or pairs) of a data set, each counted once."""
        total = np.zeros(2)
        for place, numbers in enumerate(self._plan(data, 0)):
            if place % self.size == self.rank:
                total += self.stepper.loss(self._batch(data, numbers), self._known(which, numbers))
        if self.size > 1:
            total = np.array(mx.distributed.all_sum(mx.array(total.astype(np.float32)), group=self.group))
        return float(total[0] / total[1])

    def _report(
        self, loss: float, count: int, rate: float, norm: float, tokens: int, padded: int, seconds: float
    ) -> None:
        self._tell(
            {
                "kind": "step",
                "step": self.state.step,
                "steps": self.total_steps,
                "epoch": self.state.epoch,
                "loss": loss / count,
                "lr": rate,
                "grad_norm": norm,
                "targets": count,
                "tokens": tokens,
                "tokens_per_s": tokens / seconds,
                "padding": 1 - tokens / padded if padded and self.size == 1 else 0.0,
                "active_bytes": mx.get_active_memory(),
                "peak_bytes": mx.get_peak_memory(),
                "seconds": seconds,
            }
        )

    def _tell(self, event: Event) -> None:
        if event["kind"] in ("step", "eval"):
            self.history.append(event)
        if self.rank == 0:
            self.watch(event)

    # Files.

    def _writes(self) -> bool:
        return self.run_folder is not None and self.rank == 0

    def _write_settings(self) -> None:
        if self._writes():
            assert self.run_folder is not None
            checkpoint.recover(self.run_folder)
            checkpoint.write_file(self.run_folder / "config.yaml", write_yaml(self.config))

    def adapter(self) -> adapters.Adapter:
        """What was trained, now."""
        kind = self.config.lora.type
        if kind == "full":
            return adapters.Adapter("full", dict(self.stepper.masters), {}, self.base)
        found = adapters.of_model(self.model, base=self.base)
        found.dropout = self.config.lora.dropout
        return found

    def _fill(self, folder: Path) -> None:
        adapters.save(folder, self.adapter(), {"lora": to_dict(self.config)["lora"]})

    def _save_adapter(self, name: str) -> None:
        if self._writes():
            assert self.run_folder is not None
            checkpoint.write_folder(self.run_folder / name, self._fill)
            self._tell({"kind": "save", "step": self.state.step, "path": str(self.run_folder / name)})

    def _save_checkpoint(self) -> None:
        if not self._writes() or self._saved_step == self.state.step:
            return
        assert self.run_folder is not None
        path = checkpoint.save_checkpoint(
            self.run_folder, self.state, self.optimizer.state(), self._fill, self.config.save.keep
        )
        self._saved_step = self.state.step
        self._tell({"kind": "save", "step": self.state.step, "path": str(path)})

    def _finish(self) -> None:
        """Write final/: the best adapter where eval.keep says so and there was an evaluation, else the last."""
        best = self.run_folder / "best" if self.run_folder else None
        if self.config.eval.keep == "best" and best is not None and best.is_dir() and self._evaluates:
            self._install_adapter(adapters.read(best))
        self._save_adapter("final")

    def _install_adapter(self, adapter: adapters.Adapter) -> None:
        masters = {name: adapter.arrays[name].astype(mx.float32) for name in self.stepper.masters}
        mx.eval(masters)
        self.stepper.install(masters)

    def resume(self, path: Path | None = None) -> None:
        """Take up the run folder's newest checkpoint, or `path`.

        Raises UsageError where there is none, or where it belongs to other data or settings.
        """
        if path is None:
            assert self.run_folder is not None
            checkpoint.recover(self.run_folder)
            found = checkpoint.checkpoints(self.run_folder)
            if not found:
                raise UsageError(f"{self.run_folder} holds no checkpoint to resume from.", param="resume")
            path = found[-1]
        state, arrays = checkpoint.read_checkpoint(path)
        for name, words in (("data", "other rows"), ("settings", "other settings")):
            if getattr(state, name) != getattr(self.state, name):
                raise UsageError(
                    f"{path} was written with {words}; resume with the run's own.", param="resume"
                )
        adapter = adapters.read(path)
        if adapter.arrays.keys() != self.stepper.masters.keys():
            raise UsageError(f"{path} trains other parameters than this run.", param="resume")
        self._install_adapter(adapter)
        self.optimizer.restore(arrays)
        self.state, self._saved_step = state, state.step
        self._tell({"kind": "resume", "step": state.step, "path": str(path)})


def _fingerprint(config: RunConfig) -> str:
    """A name for the settings that decide what is computed; not where it is saved or how it is shown."""
    values = to_dict(config)
    chosen = {key: values[key] for key in ("model", "quantize", "lora", "train")}
    return hashlib.sha256(json.dumps(chosen, sort_keys=True).encode()).hexdigest()


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
