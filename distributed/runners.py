"""Runners of one rank: a tensor-parallel part, or a stage of a pipeline.

Knows: how a part of a model carries out a batch, and what it owes the other ranks. Does not know who
orders the batches (leader.py, follower.py) or what they mean.

- *tensor*: every rank runs the same graph, so that the sums inside it meet. Rank 0 draws; a sum in which
  the others put zeros brings the tokens to all of them, without leaving the device.
- *stage*: hidden states come from the stage before and go to the next one. The last stage draws.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

from mlxserve.distributed.handover import Calls, Packed, Part, StageCall
from mlxserve.engine.batch import Batch
from mlxserve.engine.runner import Forward, Runner
from mlxserve.engine.sampler import Logprobs


class TensorRunner(Runner):
    """Runs this rank's part of every matrix."""

    def __init__(self, model: Any, *, group: mx.distributed.Group, **settings: Any) -> None:
        super().__init__(model, **settings)
        self._group = group

    def _sample(
        self, logits: mx.array, forward: Forward, masks: dict[int, np.ndarray]
    ) -> tuple[mx.array, Logprobs | None]:
        """Rank 0's tokens, (R,) int32, on every rank."""
        logprobs = None
        if self._group.rank() == 0:
            tokens, logprobs = super()._sample(logits, forward, masks)
        else:
            tokens = mx.zeros(len(forward.slots), mx.int32)
        return mx.distributed.all_sum(tokens, group=self._group), logprobs


class StageRunner(Runner):
    """Runs this stage's layers. `given` (not in the first stage): the hidden states of the next batch.

    Of a stage that is not the last, `forward` starts the hidden states and leaves them in `packed`.
    """

    def __init__(self, model: Any, *, stage: Part, **settings: Any) -> None:
        super().__init__(model, **settings)
        self.stage = stage
        self.packed: Packed | None = None
        self._call = model.model = StageCall(model.model, stage)

    def give(self, calls: Calls) -> None:
        """Hidden states from the stage before, for the `forward` or `embedding` that follows."""
        self._call.given.extend(calls)

    def forward(self, batch: Batch) -> Forward:
        """Start a step of this stage."""
        if self.stage.last:
            return super().forward(batch)
        forward = self._build(batch)
        self._pack()
        return forward

    def embedding(self, ids: list[int], adapter: str | None) -> mx.array:
        """This stage's part of an embedding: in the last stage the vector (H,), before it `packed`."""
        vector = self._embedding(ids, adapter)
        if self.stage.last:
            mx.async_eval(vector)
        else:
            self._pack()
        return vector

    def _pack(self) -> None:
        self.packed = Packed(self._call.take())
        mx.async_eval(*self.packed.bodies, *self.model.arrays())
