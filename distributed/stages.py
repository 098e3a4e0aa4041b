"""A pipeline out of any definition: each stage computes its own layers inside the definition's own call.

The list of layers keeps its length. A layer of another stage becomes a hollow one: the same class and
plain attributes (definitions read some, such as `use_sliding`), no weights. Called, it returns what
was handed over: before the stage's own layers, what the stage before gave; behind them, what the last
own layer gave. Masks, caches and layer numbers therefore stay as they are, and since MLX computes only
what is asked for, embedding and head cost nothing where their results are not used.

    stage 0   [embedding] 0 1 2 - - -  ─ hidden ─▶   stage 1   - - - 3 4 5 [norm, head]

Knows: modules and arrays. Does not know files, sockets or who runs the other stages.
"""

from __future__ import annotations

import io
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlxserve.errors import ModelUnsupported
from mlxserve.models.hooks import find_trunk
from mlxserve.models.layout import plain_caches

_OPERAND = re.compile(r'"([^"]+)" -> \d+$')
_RESULT = re.compile(r'\d+ -> "([^"]+)"$')


class Stage:
    """One part of a pipeline.

    layers: own layers of `total`. needs: names of the parameters its result depends on. input: what the
    stage before handed over; set it before each call of the model (not in the first stage). output: what
    this stage hands on, there after the call (not in the last). Both are an array (…, H), the hidden
    states of all rows, or, for definitions whose layers give more, a tuple with arrays in it; `hand_out`
    and `hand_in` are the same as a plain list of arrays.
    """

    def __init__(self, layers: range, total: int, form: Any, needs: frozenset[str]) -> None:
        self.layers = layers
        self.total = total
        self.needs = needs
        self.input: Any = None
        self.output: Any = None
        self._form = form

    @property
    def first(self) -> bool:
        return self.layers.start == 0

    @property
    def last(self) -> bool:
        return self.layers.stop == self.total

    @property
    def takes(self) -> int:
        """How many arrays `hand_in` wants."""
        return len(_arrays(self._form))

    def hand_out(self) -> list[mx.array]:
        """The arrays of `output`, in order."""
        return _arrays(self.output)

    def hand_in(self, arrays: Sequence[mx.array]) -> None:
        """Set `input` from what the stage before gave as `hand_out`."""
        self.input = _filled(self._form, iter(arrays))


def make_stage(model: nn.Module, layers: range, total: int) -> Stage:
    """Turn `model` into the stage that holds `layers` of its `total`, and return the handle to it.

    Nothing is evaluated. Raises ModelUnsupported where the definition's layers are not one list, or where
    a layer of the stage reads something of an earlier layer that is not handed over.
    """
    trunk, name = _layer_list(model)
    whole = list(trunk[name])
    if len(whole) != total or not layers or layers.start < 0 or layers.stop > total:
        raise ModelUnsupported(
            f"The model has {len(whole)} layers, so a stage cannot hold {layers.start} to {layers.stop - 1} "
            f"of {total}."
        )
    before, needs = _look_through(model, trunk, name, layers)
    stage = Stage(layers, total, before, needs)
    for number in range(total):
        if number not in layers:
            trunk[name][number] = _hollow(whole[number], stage, number < layers.start)
    if not stage.last:
        _watch(whole[layers[-1]], stage)
    return stage


def _layer_list(model: nn.Module) -> tuple[nn.Module, str]:
    """The module that owns the model's layers, and under which name."""
    trunk, layers = find_trunk(model), list(model.layers)
    for name, value in (trunk or {}).items():
        if isinstance(value, list) and value and value[0] is layers[0]:
            assert trunk is not None
            return trunk, name
    raise ModelUnsupported(
        f"The layers of {type(model).__module__} are not one list, so they cannot be divided."
    )


# -- what a stage takes, gives and needs: read from the computation itself ------------------------------


class _Seen:
    """What a layer gave, while `_look_through` runs the whole model."""

    output: Any = None


def _look_through(model: nn.Module, trunk: nn.Module, name: str, layers: range) -> tuple[Any, frozenset[str]]:
    """(what is handed in, parameters needed), found by building the computation of two tokens.

    MLX then says what the stage's result consists of. Going back from it, everything must end at what is
    handed in, at own layers or at parameters outside the layers (an embedding, for instance, is needed by
    the first stage, by a last one that uses it as head, and by any that looks at it for something else).
    """
    whole, first = trunk[name], layers.start
    parameters = dict(tree_flatten(model.parameters()))
    before, after = _Seen(), _Seen()
    with _watching(whole[first - 1] if first else None, before), _watching(whole[layers[-1]], after):
        logits = model(mx.zeros((1, 2), mx.int32), cache=plain_caches(model))
    handed, results = _arrays(before.output), [logits] if layers.stop == len(whole) else _arrays(after.output)
    names = {f"handed {n}": array for n, array in enumerate(handed)}
    goals = {f"result {n}": array for n, array in enumerate(results)}
    text = io.StringIO()
    mx.export_to_dot(text, **parameters, **names, **goals)
    needs = _upstream(text.getvalue(), goals.keys(), names.keys()) & parameters.keys()
    _refuse_foreign(model, trunk, name, layers, needs)
    return before.output, frozenset(needs)


def _refuse_foreign(model: nn.Module, trunk: nn.Module, name: str, layers: range, needs: set[str]) -> None:
    path = next(path for path, module in model.named_modules() if module is trunk)
    numbered = re.compile(re.escape(f"{path}.{name}." if path else f"{name}.") + r"(\d+)\.")
    for parameter in sorted(needs):
        match = numbered.match(parameter)
        if match and int(match[1]) not in layers:
            raise ModelUnsupported(
                f"Layers {layers.start} to {layers[-1]} use results of layer {match[1]} (such as shared keys and "
                "values), so the model cannot be cut there; choose another cut.",
                param="split",
            )


def _upstream(dot: str, goals: Iterable[str], stops: Collection[str]) -> set[str]:
    """Every array that `goals` are computed from, not going beyond `stops`."""
    sources = _operands(dot)
    found: set[str] = set()
    waiting = list(goals)
    while waiting:
        array = waiting.pop()
        if array not in found:
            found.add(array)
            waiting += [] if array in stops else sources.get(array, [])
    return found


def _operands(dot: str) -> dict[str, list[str]]:
    """Which arrays each array is made of, from MLX's drawing of a computation.

    Each operation is drawn as its box, arrows from its operands, arrows to its results. Boxes are read
    one by one: a compiled function's share their names.
    """
    sources: dict[str, list[str]] = {}
    operands: list[str] = []
    for line in dot.splitlines():
        if "[label" in line:
            operands = []
        elif match := _OPERAND.match(line):
            operands.append(match[1])
        elif match := _RESULT.match(line):
            sources[match[1]] = operands
    return sources


def _arrays(value: Any) -> list[mx.array]:
    """The arrays in nested tuples, lists and dicts, in order."""
    if isinstance(value, mx.array):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [array for part in value for array in _arrays(part)] if isinstance(value, list | tuple) else []


def _filled(form: Any, arrays: Iterator[mx.array]) -> Any:
    """`form` with other arrays in the places of its own."""
    if isinstance(form, mx.array):
        return next(arrays)
    if isinstance(form, dict):
        return {key: _filled(part, arrays) for key, part in form.items()}
    return type(form)(_filled(part, arrays) for part in form) if isinstance(form, list | tuple) else form


# -- layers that stand in ---------------------------------------------------------------------------------


def _watch(layer: nn.Module, seen: Any) -> None:
    """Let a layer leave what it gives in `seen.output`; parameters and their names stay as they are."""
    layer._seen = seen
    layer.__class__ = _watched(type(layer))


@contextmanager
def _watching(layer: nn.Module | None, seen: _Seen) -> Iterator[None]:
    if layer is None:
        yield
        return
    own = type(layer)
    _watch(layer, seen)
    try:
        yield
    finally:
        layer.__class__ = own
        del layer._seen


def _watched(layer_class: type) -> type:
    class Watched(layer_class):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            self._seen.output = super().__call__(*args, **kwargs)
            return self._seen.output

    return _named(Watched, layer_class)


def _hollow(layer: nn.Module, stage: Stage, before: bool) -> nn.Module:
    """A layer of another stage: no weights, and instead of computing it gives what was handed over."""
    bare = _skeleton(layer)
    bare._stage = stage
    bare.__class__ = _handing(type(layer), before)
    return bare


def _handing(layer_class: type, before: bool) -> type:
    class Hollow(layer_class):
        def __call__(self, *_: Any, **__: Any) -> Any:
            return self._stage.input if before else self._stage.output

    return _named(Hollow, layer_class)


def _skeleton(value: Any) -> Any:
    """A module without arrays: plain attributes and, hollow again, the modules below it.

    Modules at the ends become plain ones, so that nobody takes one for a layer with weights.
    """
    if isinstance(value, nn.Module):
        bare: Any = nn.Module.__new__(type(value) if value.children() else nn.Module)
        nn.Module.__init__(bare)
        vars(bare).update(vars(value))
        for key, part in value.items():
            if not isinstance(part, mx.array):
                dict.__setitem__(bare, key, _skeleton(part))
        return bare
    if isinstance(value, dict):
        return {key: _skeleton(part) for key, part in value.items() if not isinstance(part, mx.array)}
    if isinstance(value, list | tuple):
        return type(value)(_skeleton(part) for part in value if not isinstance(part, mx.array))
    return value


def _named(new: type, like: type) -> type:
    new.__name__, new.__qualname__, new.__module__ = like.__name__, like.__qualname__, like.__module__
    return new
