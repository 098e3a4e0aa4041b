"""A model as trunk and head, without changing it: hidden states, and logits of chosen rows only.

Knows: mlx-lm's definitions have a trunk whose output the head reads. While a call is traced, the trunk (or
each block, for gradient checkpointing) is swapped for a stand-in object and put back; no class is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlxserve.models.hooks import find_trunk


class _Captured(Exception):
    """Carries the trunk's output out of the definition before its head runs."""

    def __init__(self, hidden: mx.array) -> None:
        self.hidden = hidden


class _StandIn:
    """Looks like `module` but for what a call does."""

    def __init__(self, module: nn.Module, call: Callable[..., Any]) -> None:
        self._module, self._call = module, call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def __getitem__(self, name: str) -> Any:
        return self._module[name]

    def __contains__(self, name: str) -> bool:
        return name in self._module


class Split:
    """Trunk and head of a definition.

    checkpointing: each block's inner values are computed again in the backward pass instead of kept.
    """

    def __init__(self, model: nn.Module, *, checkpointing: bool = False) -> None:
        self.model = model
        self.checkpointing = checkpointing
        self.trunk = find_trunk(model)
        self._owner, self._key = _place_of(model, self.trunk) if self.trunk is not None else (model, "")
        self._list_owner, self._list_key = _list_of_blocks(model)

    def hidden(self, inputs: mx.array, cache: Any = None) -> mx.array:
        """inputs (B, L) -> the head's input (B, L, H); the logits themselves where there is no trunk apart."""
        with self._blocks():
            if self.trunk is None:
                return self.model(inputs, cache=cache)
            trunk = self.trunk

            def capture(*args: Any, **kwargs: Any) -> Any:
                raise _Captured(trunk(*args, **kwargs))

            try:
                with _swapped(self._owner, self._key, _StandIn(trunk, capture)):
                    self.model(inputs, cache=cache)
            except _Captured as captured:
                return captured.hidden
        raise AssertionError("the definition did not call its trunk")

    def logits(self, hidden: mx.array) -> mx.array:
        """hidden (N, H) -> logits (N, V), with the definition's own scaling and soft caps."""
        if self.trunk is None:
            return hidden
        with _swapped(self._owner, self._key, _StandIn(self.trunk, lambda *_, **__: hidden[None])):
            out = self.model(mx.zeros((1, hidden.shape[0]), mx.int32))
        return out[0]

    def head_parameters(self) -> dict[str, mx.array]:
        """Trainable parameters outside the blocks, by path: those that the head may read."""
        inside = {id(value) for layer in self.model.layers for _, value in tree_flatten(layer.parameters())}
        return {
            name: value
            for name, value in tree_flatten(self.model.trainable_parameters())
            if id(value) not in inside
        }

    @contextmanager
    def _blocks(self) -> Iterator[None]:
        if not self.checkpointing:
            yield
            return
        blocks = self._list_owner[self._list_key]
        with _swapped(self._list_owner, self._list_key, [_checkpointed(block) for block in blocks]):
            yield


def _checkpointed(block: nn.Module) -> _StandIn:
    def call(*args: Any, **kwargs: Any) -> Any:
        def inner(parameters: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
            before = block.trainable_parameters()
            block.update(parameters)
            try:
                return block(*args, **kwargs)
            finally:
                block.update(before)

        return mx.checkpoint(inner)(block.trainable_parameters(), *args, **kwargs)

    return _StandIn(block, call)


@contextmanager
def _swapped(owner: nn.Module, key: str, value: Any) -> Iterator[None]:
    """`owner[key]` is `value` inside; set as a dict's item, so that nothing of Module's bookkeeping runs."""
    before = owner[key]
    dict.__setitem__(owner, key, value)
    try:
        yield
    finally:
        dict.__setitem__(owner, key, before)


def _place_of(model: nn.Module, module: nn.Module) -> tuple[nn.Module, str]:
    for _, owner in model.named_modules():
        for key, value in owner.items():
            if value is module:
                return owner, key
    raise AssertionError("the trunk is not an attribute of any module")


def _list_of_blocks(model: nn.Module) -> tuple[nn.Module, str]:
    first = model.layers[0]
    for _, owner in model.named_modules():
        for key, value in owner.items():
            if isinstance(value, list) and value and value[0] is first:
                return owner, key
    raise AssertionError("the model's layers are no module's list")
