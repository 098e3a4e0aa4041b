"""Where mlx-lm's definitions are made to look at our cache, and to compute only the logits that are wanted.

Two of the three points of contact with mlx-lm that tests/models/test_contract.py names: the attention function
that definitions look up in their module's globals, and the trunk whose output the head reads. The third is the
cache protocol (cache/store.py).

Knows: modules and their classes. Does not know pages, steps or requests.
"""

from __future__ import annotations

import sys
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxserve.models.definitions import import_definition


class Selection:
    """Which rows of the trunk's output go on to the head (None: all), and that output itself if asked."""

    __slots__ = ("capture", "captured", "take")

    def __init__(self) -> None:
        self.take: mx.array | None = None
        self.capture = False
        self.captured: mx.array | None = None


def install_attention() -> None:
    """Make definitions' attention look at its cache: ours goes to pages, any other to mlx-lm's own.

    Definitions import the function into their own globals, so every loaded one is patched; those
    imported later take the patched one from `base`.
    """
    base = import_definition("base")
    original = getattr(base.scaled_dot_product_attention, "original", base.scaled_dot_product_attention)
    replacement = base.scaled_dot_product_attention
    if replacement is original:
        replacement = _dispatching(original)
    for name, module in list(sys.modules.items()):
        if (
            name.startswith("mlx_lm.models.")
            and getattr(module, "scaled_dot_product_attention", None) is original
        ):
            module.scaled_dot_product_attention = replacement  # type: ignore[attr-defined]


def _dispatching(original: Any) -> Any:
    def scaled_dot_product_attention(
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        cache: Any,
        scale: float,
        mask: Any,
        sinks: Any = None,
    ) -> mx.array:
        if getattr(cache, "rows", False) is True:  # pages, or the trainer's packed rows
            return cache.attend(queries, scale, sinks)
        return original(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)

    scaled_dot_product_attention.original = original  # type: ignore[attr-defined]
    return scaled_dot_product_attention


def install_selection(model: nn.Module) -> Selection | None:
    """Let the trunk hand only the wanted rows to the head; None where no trunk can be told apart.

    The trunk is the outermost module below the model that owns its layers. Its class is exchanged for a
    subclass, so parameters and their names stay as they are.
    """
    trunk = find_trunk(model)
    if trunk is None:
        return None
    selection = getattr(trunk, "_row_selection", None)
    if selection is None:
        selection = trunk._row_selection = Selection()
        trunk.__class__ = _selecting(type(trunk))
    return selection


def find_trunk(model: nn.Module) -> nn.Module | None:
    """The module below `model` whose list of layers the model's is."""
    layers = list(model.layers)
    for path, module in sorted(model.named_modules(), key=lambda item: item[0].count(".")):
        if not path or module is model:
            continue
        for value in module.values():
            if isinstance(value, list) and len(value) >= len(layers) and layers and value[0] is layers[0]:
                return module
    return None


def _selecting(trunk_class: type) -> type:
    class Selecting(trunk_class):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            out = super().__call__(*args, **kwargs)
            selection = self._row_selection
            if selection.capture:
                selection.captured = out
            take = selection.take
            if take is None or not isinstance(out, mx.array):
                return out
            return out.reshape(-1, 1, out.shape[-1])[take]  # (R, 1, H)

    Selecting.__name__ = trunk_class.__name__
    Selecting.__qualname__ = trunk_class.__qualname__
    return Selecting
