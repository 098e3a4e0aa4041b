"""One process's part of a run that several make together, and one optimiser step of it.

Knows: sums over processes, clipping, an Optimizer, a Stepper. Does not know files, data sets or how a model
was split: whoever splits one hands in a `Share`.

Sums of gradients, of losses and of target counts are added over processes and divided once, so that uneven
batches weigh as in one process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from mlxserve.lora.batches import Batch
from mlxserve.lora.optim import Arrays, Optimizer, clip_by_norm, sum_of_squares
from mlxserve.lora.step import Stepper

Reduce = Callable[[Arrays, mx.array], tuple[Arrays, mx.array]]
Trunk = Callable[[Arrays, mx.array], mx.array]
LOSS, COUNT, TOKENS, PADDED, STOP, BROKEN = range(6)  # places in a step's totals


def alone(gradients: Arrays, totals: mx.array) -> tuple[Arrays, mx.array]:
    """The reduction of one process."""
    return gradients, totals


def unchanged(arrays: Arrays) -> Arrays:
    return arrays


@dataclass(frozen=True, slots=True)
class Share:
    """What this process trains, and how it agrees with the others. The default is a run of one process.

    rank, size: of each window's micro-batches this process takes number rank, rank + size, … Processes that
    hold parts of one model see the same batches: there these are their data-parallel numbers.
    writes: this process writes the run's files.
    reduce(gradients, totals) -> both, summed: each gradient over the processes that saw other batches, and
    over those that hold parts of a layer whose parameter they share; totals (6,) float32 (loss sum, targets,
    real and padded tokens, stop, broken) over those that saw other batches.
    squares(gradients) -> the sum of squares of the whole model's gradient, each value once.
    trunk(masters, inputs) -> hidden: inputs (R, W) int32 -> (R, W, H), differentiable in `masters`, the
    float32 parameters by name (none in evaluation); None runs the model's own. It may talk to other
    processes, so it is never compiled, and every process calls it once for each micro-batch, in order.
    spread(arrays) -> the writing process's arrays, where others give zeros of the same shapes.
    whole(arrays) -> parameters of the whole model from this process's part; part(arrays) -> the reverse.
    """

    rank: int = 0
    size: int = 1
    writes: bool = True
    reduce: Reduce = alone
    squares: Callable[[Arrays], mx.array] = sum_of_squares
    trunk: Trunk | None = None
    spread: Callable[[Arrays], Arrays] = unchanged
    whole: Callable[[Arrays], Arrays] = unchanged
    part: Callable[[Arrays], Arrays] = unchanged


def data_parallel(group: Any) -> Share:
    """Every process has the whole model and its own micro-batches. group: mx.distributed's."""
    if group is None or group.size() == 1:
        return Share()

    def add(value: mx.array) -> mx.array:
        return mx.distributed.all_sum(value, group=group)

    def reduce(gradients: Arrays, totals: mx.array) -> tuple[Arrays, mx.array]:
        names = sorted(gradients)
        # One message for all: a round trip costs more than these bytes do.
        message = add(mx.concatenate([totals, *(gradients[name].reshape(-1) for name in names)]))
        ends = np.cumsum([totals.size, *(gradients[name].size for name in names)]).tolist()
        parts = mx.split(message, ends[:-1])
        return {name: part.reshape(gradients[name].shape) for name, part in zip(names, parts[1:])}, parts[0]

    def spread(arrays: Arrays) -> Arrays:
        return {name: add(arrays[name]) for name in sorted(arrays)}

    rank = group.rank()
    return Share(rank, group.size(), writes=rank == 0, reduce=reduce, spread=spread)


@dataclass(frozen=True, slots=True)
class Work:
    """One micro-batch. reference: log-probabilities for DPO. seed: of its dropout."""

    batch: Batch
    reference: np.ndarray | None
    seed: int


@dataclass(slots=True)
class Window:
    """Sums over the micro-batches of one optimiser step; `bad` are rows whose loss is not finite."""

    gradients: Arrays = field(default_factory=dict)
    totals: np.ndarray = field(default_factory=lambda: np.zeros(6, np.float64))
    bad: list[str] = field(default_factory=list)
    where: list[str] = field(default_factory=list)

    def add(self, stepper: Stepper, work: Work) -> None:
        """Compute one micro-batch's gradient and add it."""
        batch = work.batch
        micro = stepper.gradient(batch, work.reference, work.seed)
        loss = float(micro.loss_sum)
        self._take(micro.gradients)
        self.totals[:4] += (loss, micro.count, batch.real_tokens, batch.padded_tokens)
        self.where += batch.where
        if not math.isfinite(loss):
            broken = np.flatnonzero(~np.isfinite(np.array(micro.sequences)))
            self.bad += [batch.where[i] for i in broken] or list(batch.where)

    def _take(self, gradients: Arrays) -> None:
        before, self.gradients = self.gradients, gradients
        if before:
            self.gradients = {name: value + gradients[name] for name, value in before.items()}
            mx.eval(self.gradients)


@dataclass(frozen=True, slots=True)
class Step:
    """What one optimiser step was, over all processes. norm: of the gradient before clipping.

    finite: False where nothing was applied, since the loss or the gradient was no number. stop: a process
    was asked to stop.
    """

    loss: float
    count: int
    tokens: int
    padded: int
    norm: float
    finite: bool
    stop: bool


def finish_window(
    stepper: Stepper,
    optimizer: Optimizer,
    window: Window,
    *,
    rate: float,
    clip: float,
    share: Share | None = None,
    stop: bool = False,
) -> Step:
    """Add up over processes, clip, and step; `stepper` then holds the new parameters.

    All processes of a share call this once a window, also those whose part of it was empty.
    """
    share = share or Share()
    window.totals[STOP], window.totals[BROKEN] = stop, bool(window.bad)
    sums = window.gradients or {name: mx.zeros_like(value) for name, value in stepper.masters.items()}
    sums, totals = share.reduce(sums, mx.array(window.totals.astype(np.float32)))
    mx.eval(sums, totals)
    loss, count, tokens, padded, stops, broken = np.array(totals).astype(np.float64).tolist()
    gradients = {name: value / count for name, value in sums.items()}
    norm = float(mx.sqrt(share.squares(gradients)))
    finite = math.isfinite(norm) and math.isfinite(loss) and not broken
    if finite:
        gradients, _ = clip_by_norm(gradients, clip, mx.array(norm))
        masters = optimizer.apply(stepper.masters, gradients, rate)
        mx.eval(masters, optimizer.state())
        stepper.install(masters)
    return Step(loss / count, int(count), int(tokens), int(padded), norm, finite, stops > 0)


def train_step(
    stepper: Stepper,
    optimizer: Optimizer,
    works: Iterable[Work],
    *,
    rate: float,
    clip: float = 0.0,
    share: Share | None = None,
) -> Step:
    """One optimiser step over this process's micro-batches of a window: `finish_window` of all of them."""
    window = Window()
    for work in works:
        window.add(stepper, work)
    return finish_window(stepper, optimizer, window, rate=rate, clip=clip, share=share)
