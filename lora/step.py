"""One micro-batch: the sum of its loss, how much it counts, and the gradient of that sum.

Knows: a Split model, batches and objectives. Gradients are sums over targets (or pairs), never means, so
that micro-batches add up to exactly the gradient of one large batch. Does not know optimisers or files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from mlxserve.lora.batches import Batch, width_of
from mlxserve.lora.config import TrainConfig
from mlxserve.lora.loss import chunked_losses, default_chunk, dpo, orpo, sequence_sums
from mlxserve.lora.packing import segment_caches
from mlxserve.lora.split import Split

Arrays = dict[str, mx.array]


@dataclass(slots=True)
class Micro:
    """loss_sum: summed over what counts. count: targets (sft) or pairs. sequences: each one's loss (R,)."""

    loss_sum: mx.array
    count: int
    sequences: mx.array
    gradients: Arrays


class Stepper:
    """Computes losses and gradients of batches for one model and one objective.

    Masters are float32 by name; for full fine-tuning each is cast to the dtype that the model had.
    trunk: runs instead of the model's own, as `Share.trunk` says.
    """

    def __init__(
        self,
        model: nn.Module,
        config: TrainConfig,
        *,
        checkpointing: bool,
        vocabulary: int,
        trunk: Callable[[Arrays, mx.array], mx.array] | None = None,
    ) -> None:
        self.trunk = trunk
        self.model, self.config = model, config
        self.split = Split(model, checkpointing=checkpointing)
        self.chunk = default_chunk(vocabulary) if config.loss_chunk == "auto" else config.loss_chunk
        trainable = dict(tree_flatten(model.trainable_parameters()))
        self.dtypes = {name: value.dtype for name, value in trainable.items()}
        self.masters: Arrays = {name: value.astype(mx.float32) for name, value in trainable.items()}
        self.head_names = sorted(self.split.head_parameters())
        self._has_dropout = any(isinstance(m, nn.Dropout) and m._p_1 < 1 for _, m in model.named_modules())
        on_cpu = mx.default_device() == mx.cpu
        wanted = not on_cpu if config.compile == "auto" else config.compile
        self.compiles = wanted and trunk is None
        self._compiled: Callable[..., Any] | None = None

    def place(self, masters: Arrays) -> None:
        """Let the model compute with these masters."""
        cast = [(name, _cast(value, self.dtypes[name])) for name, value in masters.items()]
        self.model.update(tree_unflatten(cast))

    def install(self, masters: Arrays) -> None:
        """Keep these masters, and let the model compute with them."""
        self.masters = masters
        self.place(masters)

    def gradient(self, batch: Batch, reference: np.ndarray | None, seed: int) -> Micro:
        """Loss and gradient of one micro-batch. seed: of the dropout, fixed by the place in the data."""
        self.model.train()
        if self._has_dropout:
            mx.random.seed(seed)
        arrays = _arrays(batch, reference)
        run = self._run(batch)
        (loss_sum, sequences), gradients = run(self.masters, *arrays)
        mx.eval(loss_sum, sequences, gradients)
        self.place(self.masters)  # take tracers out of the model
        return Micro(loss_sum, self._count(batch), sequences, gradients)

    def loss(self, batch: Batch, reference: np.ndarray | None = None) -> tuple[float, int]:
        """(loss sum, count) without gradient or dropout."""
        self.model.eval()
        total, _ = self._forward({}, batch.segments, *_arrays(batch, reference))
        return float(total), self._count(batch)

    def logps(self, batch: Batch) -> np.ndarray:
        """(sequences,) summed log-probabilities of each sequence's targets, under the model as it is."""
        self.model.eval()
        inputs, rows, targets, weights, owners, _, counts = _arrays(batch, None)
        losses = self._rows({}, batch.segments, inputs, rows, targets) * weights
        return -np.array(sequence_sums(losses, owners, counts.shape[0]))

    def _count(self, batch: Batch) -> int:
        return len(batch.rows) if self.config.objective == "sft" else len(batch.where) // 2

    def _run(self, batch: Batch) -> Callable[..., Any]:
        """The gradient function; compiled unless rows are packed, whose segments differ each time."""

        def forward(masters: Arrays, *arrays: mx.array) -> tuple[mx.array, mx.array]:
            return self._forward(masters, batch.segments, *arrays)

        gradient = mx.value_and_grad(forward)
        if batch.segments or not self.compiles:
            return gradient
        if self._compiled is None:
            states: dict[str, Any] = (
                {"inputs": mx.random.state, "outputs": mx.random.state} if self._has_dropout else {}
            )
            self._compiled = mx.compile(gradient, **states)
        return self._compiled

    def _forward(
        self,
        masters: Arrays,
        segments: tuple[tuple[int, int], ...],
        inputs: mx.array,
        rows: mx.array,
        targets: mx.array,
        weights: mx.array,
        owners: mx.array,
        reference: mx.array,
        counts: mx.array,
    ) -> tuple[mx.array, mx.array]:
        """(loss sum, each sequence's summed loss)."""
        if masters:
            self.place(masters)
        losses = self._rows(masters, segments, inputs, rows, targets) * weights
        sums = sequence_sums(losses, owners, counts.shape[0])
        if self.config.objective == "sft":
            return losses.sum(), mx.stop_gradient(sums)
        if self.config.objective == "dpo":
            each, _ = dpo(-sums, reference, self.config.beta)
        else:
            each, _ = orpo(-sums, counts, self.config.beta)
        return each.sum(), mx.stop_gradient(sums)

    def _rows(
        self,
        masters: Arrays,
        segments: tuple[tuple[int, int], ...],
        inputs: mx.array,
        rows: mx.array,
        targets: mx.array,
    ) -> mx.array:
        """(N,) losses of the target rows; only these go through the head."""
        if self.trunk is not None:
            hidden = self.trunk(masters, inputs)  # (R, W, H)
        elif segments:
            hidden = self.split.hidden(inputs.T, cache=segment_caches(self.model, segments))  # (T, 1, H)
        else:
            hidden = self.split.hidden(inputs)  # (R, W, H)
        chosen = hidden.reshape(-1, hidden.shape[-1])[rows]  # (N, H)
        head = {name: masters[name] for name in self.head_names} if masters else {}
        return chunked_losses(self._head, chosen, targets, head, self.chunk)

    def _head(self, rows: mx.array, parameters: Arrays) -> mx.array:
        if not parameters:
            return self.split.logits(rows)
        before = [
            (name, value) for name, value in tree_flatten(self.model.parameters()) if name in parameters
        ]
        self.place(parameters)
        try:
            return self.split.logits(rows)
        finally:
            self.model.update(tree_unflatten(before))


def _cast(value: mx.array, dtype: mx.Dtype) -> mx.array:
    return value if value.dtype == dtype else value.astype(dtype)


def _arrays(batch: Batch, reference: np.ndarray | None) -> tuple[mx.array, ...]:
    """A batch on the device, targets padded to one of few sizes with rows of weight zero."""
    count = len(batch.rows)
    extra = width_of(count) - count
    sequences = len(batch.where)
    weights = np.concatenate([np.ones(count, np.float32), np.zeros(extra, np.float32)])
    known = np.zeros(sequences, np.float32) if reference is None else reference
    return (
        mx.array(batch.inputs),
        mx.array(np.pad(batch.rows, (0, extra))),
        mx.array(np.pad(batch.targets, (0, extra))),
        mx.array(weights),
        mx.array(np.pad(batch.owners, (0, extra))),
        mx.array(known),
        mx.array(np.bincount(batch.owners, minlength=sequences).astype(np.float32)),
    )
