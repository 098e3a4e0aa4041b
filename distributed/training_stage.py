"""Training a model whose layers lie on several ranks: hidden states forward, their gradients back.

Knows: a stage, MLX's send and recv between neighbours, one micro-batch at a time. Does not know the trainer:
`StagePart.share()` gives what `lora.share.Share` takes (see training.py).

    stage 0   embed, layers ─ hidden ─▶   stage 1   layers, head, loss
                            ◀─ d loss / d hidden ─

A rank's trainer calls `trunk` and differentiates through it. On the way in it receives what the stage before
gave; the backward pass, having reached that point, sends its gradient there. On the way out, likewise, the
backward pass begins with the gradient that the next stage sends. Only the last stage's loss counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from mlxserve.distributed.exchange import exchange
from mlxserve.distributed.load import ShardLoaded
from mlxserve.distributed.training import SUMMED, Arrays, sum_in_order
from mlxserve.errors import Unsupported
from mlxserve.models.hooks import find_trunk

LEAVES = ("lora_a", "lora_b", "m")
DTYPES = (mx.float32, mx.float16, mx.bfloat16, mx.int32, mx.uint32, mx.bool_)
MOST_AXES = 6


class StagePart:
    """Training by layers: every rank sees every batch, and holds some layers with their adapters."""

    def __init__(self, loaded: ShardLoaded, group: mx.distributed.Group) -> None:
        assert loaded.stage is not None, "loaded with a split by tensors"
        self.model, self.stage, self.group = loaded.loaded.model, loaded.stage, group
        self._own: list[str] = []
        self._forms: dict[tuple[int, ...], list[tuple[tuple[int, ...], mx.Dtype]]] = {}
        if not self.stage.last:
            _without_head(self.model, loaded.loaded.config)
        trunk = find_trunk(self.model)
        assert trunk is not None
        self._trunk: nn.Module = trunk

    def connect(self, start: Arrays, *, optimizer: str) -> None:
        """Take this stage's part of what one process would start with.

        start: every trainable parameter of the whole model, by name, as the trainer makes them; DoRA's
        lengths, which follow from the weights, may be left out. Any `optimizer` will do: each parameter is
        whole on its rank. Raises Unsupported, on all ranks, for what cannot be trained in stages.
        """
        self._own = [name for name, _ in tree_flatten(self.model.trainable_parameters())]
        odd = [name for name in start if name.rpartition(".")[2] not in LEAVES]
        if odd:
            raise Unsupported(
                f"A model divided by layers trains adapters only, not {odd[0]}; use lora.type=lora.",
                param="lora.type",
            )
        if not all(exchange(self.group, bool(self._own))):
            raise Unsupported(
                "Every stage of a pipeline must hold a layer that trains; set lora.layers to all, or divide the "
                "model otherwise.",
                param="lora.layers",
            )
        self.model.update(tree_unflatten(list(self.part(start).items())))
        mx.eval(self.model.trainable_parameters())

    def share(self) -> dict[str, Any]:
        """Settings for the trainer's Share."""
        return {
            "writes": self.group.rank() == 0,
            "reduce": self.reduce,
            "squares": self.squares,
            "trunk": self.trunk,
            "spread": self.spread,
            "whole": self.whole,
            "part": self.part,
        }

    # -- what the trainer calls ---------------------------------------------------------------------------

    def trunk(self, masters: Arrays, inputs: mx.array) -> mx.array:
        """inputs (R, W) → the last stage's hidden states (R, W, H); on others (R, W, 1), of no meaning.

        masters: what the gradient will be asked of, already in the model; empty where none will.
        """
        anchor = next(iter(masters.values()), None)
        if not self.stage.first:
            received = self._receive(inputs.shape, self.group.rank() - 1)
            self.stage.hand_in(received if anchor is None else self._entering(received, anchor))
        hidden = self._trunk(inputs)
        if self.stage.last:
            return hidden
        given = self.stage.hand_out()
        self._send(given, inputs.shape, self.group.rank() + 1)
        if anchor is None:
            return mx.zeros((*inputs.shape, 1))
        return self._leaving(given, inputs.shape)

    def reduce(self, gradients: Arrays, totals: mx.array) -> tuple[Arrays, mx.array]:
        """Gradients as they are; the last stage's sums, and any stage's flags."""
        own = totals if self.stage.last else mx.concatenate([mx.zeros(SUMMED), totals[SUMMED:]])
        return gradients, mx.distributed.all_sum(own, group=self.group)

    def squares(self, gradients: Arrays) -> mx.array:
        """Sum of squares of the whole model's gradient."""
        own = sum((mx.square(gradients[name]).sum() for name in sorted(gradients)), mx.array(0.0))
        return mx.distributed.all_sum(own, group=self.group)

    def spread(self, arrays: Arrays) -> Arrays:
        """The writing rank's arrays on all, where the others give zeros."""
        return sum_in_order(arrays, self.group)

    def whole(self, arrays: Arrays) -> Arrays:
        """Every stage's parameters (or their moments) together."""
        mine = {name: (list(value.shape), DTYPES.index(value.dtype)) for name, value in arrays.items()}
        forms: dict[str, Any] = {}
        for theirs in exchange(self.group, mine):
            forms |= theirs
        full = {
            name: arrays[name] if name in arrays else mx.zeros(shape, DTYPES[dtype])
            for name, (shape, dtype) in forms.items()
        }
        return sum_in_order(full, self.group)

    def part(self, arrays: Arrays) -> Arrays:
        """This stage's of the whole model's parameters (or moments)."""
        return {name: value for name, value in arrays.items() if name in self._own}

    # -- between stages ---------------------------------------------------------------------------------------

    def _entering(self, received: list[mx.array], anchor: mx.array) -> Sequence[mx.array]:
        """`received`, such that the backward pass, having reached it, sends its gradient back.

        anchor: something that a gradient is asked of, or the backward pass would not come here.
        """

        @mx.custom_function
        def enter(*arrays: mx.array) -> Any:
            return tuple(arrays[:-1]) if len(arrays) > 2 else arrays[0]

        @enter.vjp
        def enter_vjp(primals: Any, cotangents: Any, _: Any) -> Any:
            gradients = list(cotangents) if isinstance(cotangents, list | tuple) else [cotangents]
            mx.eval(gradients)
            for gradient in gradients:
                mx.eval(mx.distributed.send(gradient, self.group.rank() - 1, group=self.group))
            return tuple(mx.zeros_like(primal) for primal in primals)

        entered: Any = enter(*received, anchor)
        return entered if isinstance(entered, list | tuple) else [entered]

    def _leaving(self, given: list[mx.array], shape: tuple[int, ...]) -> mx.array:
        """(R, W, 1) zeros, through which the backward pass takes the gradient that the next stage sends."""

        @mx.custom_function
        def leave(*_: mx.array) -> mx.array:
            return mx.zeros((*shape, 1))

        @leave.vjp
        def leave_vjp(primals: Any, _: Any, __: Any) -> Any:
            forms = [(array.shape, array.dtype) for array in given]
            gradients = [_receive(*form, self.group.rank() + 1, self.group) for form in forms]
            return tuple(gradients) if isinstance(primals, list | tuple) else gradients[0]

        left: Any = leave(*given)
        return left

    def _send(self, arrays: list[mx.array], shape: tuple[int, ...], to: int) -> None:
        """Arrays to the next stage; what form they have is said once for each shape of inputs."""
        mx.eval(arrays)
        if shape not in self._forms:
            self._forms[shape] = [(array.shape, array.dtype) for array in arrays]
            head = np.zeros((len(arrays), MOST_AXES + 2), np.int32)
            for row, array in zip(head, arrays):
                row[: 2 + array.ndim] = [DTYPES.index(array.dtype), array.ndim, *array.shape]
            mx.eval(mx.distributed.send(mx.array(head), to, group=self.group))
        for array in arrays:
            mx.eval(mx.distributed.send(mx.contiguous(array), to, group=self.group))

    def _receive(self, shape: tuple[int, ...], source: int) -> list[mx.array]:
        key = (-1, *shape)  # a stage in the middle remembers both directions
        if key not in self._forms:
            head = np.array(_receive((self.stage.takes, MOST_AXES + 2), mx.int32, source, self.group))
            self._forms[key] = [(tuple(row[2 : 2 + row[1]].tolist()), DTYPES[row[0]]) for row in head]
        return [_receive(*form, source, self.group) for form in self._forms[key]]


def _receive(shape: Sequence[int], dtype: mx.Dtype, source: int, group: mx.distributed.Group) -> mx.array:
    array = mx.distributed.recv(shape, dtype, source, group=group)
    mx.eval(array)
    return array


def _without_head(model: nn.Module, config: dict[str, Any]) -> None:
    """Let a stage that has no head answer zeros, which the trainer may take losses of at no cost."""
    trunk = find_trunk(model)
    owner, key = next(
        (module, name)
        for _, module in model.named_modules()
        for name, value in module.items()
        if value is trunk
    )
    vocabulary = int(config.get("vocab_size") or config["text_config"]["vocab_size"])
    own: Any = type(model)

    class Headless(own):
        def __call__(self, inputs: mx.array, cache: Any = None, **_: Any) -> mx.array:
            hidden = owner[key](inputs, cache=cache)
            return mx.zeros((*hidden.shape[:-1], vocabulary))

    Headless.__name__, Headless.__qualname__, Headless.__module__ = (
        own.__name__,
        own.__qualname__,
        own.__module__,
    )
    model.__class__ = Headless
