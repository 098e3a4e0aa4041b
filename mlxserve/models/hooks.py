"""Where mlx-lm's definitions are made to look at our cache, and to compute only the logits that are wanted.

The points of contact with mlx-lm, which tests/models/test_contract.py names, beside the cache protocol
(cache/store.py): the attention and SwiGLU functions that definitions look up in their module's globals, and the
trunk whose output the head reads.

Knows: modules and their classes. Does not know pages, steps or requests.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxserve.models.definitions import import_definition

LOG2_E = math.log2(math.e)


class Selection:
    """Which rows of the trunk's output go on to the head (None: all), and that output itself if asked."""

    __slots__ = ("capture", "captured", "take")

    def __init__(self) -> None:
        self.take: mx.array | None = None
        self.capture = False
        self.captured: mx.array | None = None


def install_attention() -> None:
    """Make definitions' attention look at its cache: ours goes to pages, any other to mlx-lm's own."""
    _exchange("base", "scaled_dot_product_attention", _dispatching)


def install_activation() -> None:
    """On a CPU, make definitions' SwiGLU quick while a model runs on pages; elsewhere MLX fuses it well."""
    if mx.default_device() == mx.Device(mx.cpu):
        _exchange("activations", "swiglu", _quick_on_pages)


@contextmanager
def on_pages() -> Iterator[None]:
    """What this thread computes inside is a step of ours, not of a person's own mlx-lm or of a trainer."""
    _here.on_pages = True
    try:
        yield
    finally:
        _here.on_pages = False


_here = threading.local()


def _exchange(home: str, function: str, make: Callable[[Any], Any]) -> None:
    """Put make(original) in place of a function of mlx-lm's module `home`, once.

    Definitions import it into their own globals, so every loaded one is patched; those imported later take
    the patched one from `home`.
    """
    replacement = getattr(import_definition(home), function)
    original = getattr(replacement, "original", replacement)
    if replacement is original:
        replacement = make(original)
        replacement.original = original
    for name, module in list(sys.modules.items()):
        if name.startswith("mlx_lm.models.") and getattr(module, function, None) is original:
            setattr(module, function, replacement)


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

    return scaled_dot_product_attention


def _quick_on_pages(original: Any) -> Any:
    """MLX's CPU backend takes powers of two in less than half of the time of exponentials."""

    def swiglu(gate: mx.array, x: mx.array) -> mx.array:
        if getattr(_here, "on_pages", False) and gate.dtype == mx.float32:
            return gate / (1 + mx.power(2.0, gate * -LOG2_E)) * x
        return original(gate, x)

    return swiglu


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
