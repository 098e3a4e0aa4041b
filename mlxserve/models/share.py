"""A second tree of modules over the same arrays, so that a model can be trained while it is served.

Knows: modules, their attributes, adapted layers. Nothing of the weights is copied; what is exchanged in one
tree (layers, classes, training switches) is not seen in the other.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxserve.models.multilora import make_plain


def shared_copy(model: nn.Module) -> nn.Module:
    """The copy, without adapters. Everything it holds is evaluated, so that another thread may use it."""
    copies: dict[int, nn.Module] = {}
    arrays: list[mx.array] = []
    made: nn.Module = _copied(model, copies, arrays)
    mx.eval(arrays)
    for copy in copies.values():
        make_plain(copy)
    return made


def _copied(value: Any, copies: dict[int, nn.Module], arrays: list[mx.array]) -> Any:
    """Modules and containers anew, each once; everything else is the same object."""
    if isinstance(value, nn.Module):
        return copies[id(value)] if id(value) in copies else _copied_module(value, copies, arrays)
    if isinstance(value, mx.array):
        arrays.append(value)
    elif type(value) in (list, tuple, set):
        return type(value)(_copied(item, copies, arrays) for item in value)
    elif type(value) is dict:
        return {key: _copied(item, copies, arrays) for key, item in value.items()}
    return value


def _copied_module(module: nn.Module, copies: dict[int, nn.Module], arrays: list[mx.array]) -> nn.Module:
    module_class: Any = type(module)
    made: nn.Module = module_class.__new__(module_class)
    copies[id(module)] = made
    for key, value in module.items():
        dict.__setitem__(made, key, _copied(value, copies, arrays))
    for key, value in vars(module).items():
        made.__dict__[key] = _copied(value, copies, arrays)
    return made
