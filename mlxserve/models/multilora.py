"""LoRA adapters on one model, chosen row by row, beside each other and beside the base itself.

Knows: adapted layers, their stacked factors, and which adapter each row of the running call has. Does not
know requests, names or files. Nothing of the base is copied: a layer's class is exchanged for a subclass
that adds the low-rank product, so parameters and their names stay as they are, and a layer that no adapter
needs is plain again.

    factors of a layer with M adapters      a (M + 1, in, r)    b (M + 1, r, out), scale included
                                            gain, shift (M + 1, out) where one of them is DoRA
    rows of a call                          adapter 0 is none: zeros, gain 1; r is the largest rank

A layer of which this process has a part takes the same part of the factors: b by outputs, a by inputs. Where
the ranks' products are then added up, the low-rank product joins its rank's own before the sum.

A call in which no row has an adapter of this layer costs one comparison; one in which all rows have the same
one is two plain products; else rows are gathered (`mx.gather_mm`), or taken run by run where runs are long.

Sources: LoRA arXiv:2106.09685, DoRA arXiv:2402.09353; many adapters in one batch: S-LoRA arXiv:2311.03285.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxserve.errors import ModelInvalid, ModelUnsupported, Unsupported
from mlxserve.models.adapters import ADAPTER_LEAVES, Adapter
from mlxserve.models.linear import adds_up, dense_weight, is_linear, is_switch, linear_shape, own_product

# Rows a run must have on average before a product for each run beats one gathered product.
LONG_RUN = 8


class CallRows:
    """Which adapter each row of one call has: ids (T,) of the call's tokens, 0 for none.

    taken: (R,) numbers of the rows that the head sees; None where it sees all.
    """

    def __init__(self, ids: np.ndarray, taken: np.ndarray | None) -> None:
        self.ids, self.taken = ids, taken
        self.only = int(ids[0]) if (ids == ids[0]).all() else None
        self._known: dict[tuple[tuple[int, ...], int], _Choice | None] = {}

    def choose(self, members: tuple[int, ...], count: int, path: str) -> _Choice | None:
        """What a layer with these adapters does with its `count` rows; None: nothing.

        Raises ModelUnsupported where a layer sees other rows than the call has and their adapters differ.
        """
        key = (members, count)
        if key not in self._known:
            self._known[key] = self._choose(members, count, path)
        return self._known[key]

    def _choose(self, members: tuple[int, ...], count: int, path: str) -> _Choice | None:
        if self.only is not None:
            place = members.index(self.only) + 1 if self.only in members else 0
            return _Choice(only=place) if place else None
        ids = self.ids
        if count != len(ids):
            if self.taken is None or count != len(self.taken):
                raise ModelUnsupported(
                    f"{path} sees {count} rows of a step of {len(ids)}, so adapters cannot be told apart there."
                )
            ids = ids[self.taken]
        places = np.zeros(len(ids), np.int32)
        for place, member in enumerate(members, 1):
            places[ids == member] = place
        return _Choice.of(places)


class _Choice:
    """Local adapters of a layer's rows. only: all rows have this one. runs: (start, stop, place) of each run."""

    def __init__(
        self, *, only: int | None = None, places: mx.array | None = None, runs: tuple[Any, ...] = ()
    ) -> None:
        self.only, self.places, self.runs = only, places, runs

    @staticmethod
    def of(places: np.ndarray) -> _Choice | None:
        if not places.any():
            return None
        if (places == places[0]).all():
            return _Choice(only=int(places[0]))
        cuts = np.flatnonzero(np.diff(places)) + 1
        starts, stops = [0, *cuts.tolist()], [*cuts.tolist(), len(places)]
        long = len(places) >= LONG_RUN * len(starts)
        runs = tuple((a, b, int(places[a])) for a, b in zip(starts, stops)) if long else ()
        return _Choice(places=mx.array(places), runs=runs)


class Factors:
    """One layer's stacked factors. members: ids of its adapters, in the order of the stack from place 1."""

    def __init__(self, owner: AdapterStack, path: str, layer: nn.Module) -> None:
        self.owner, self.path = owner, path
        self.inputs, self.outputs = linear_shape(layer)
        self.members: tuple[int, ...] = ()
        self.a = mx.zeros((1, self.inputs, 0), owner.dtype)
        self.b = mx.zeros((1, 0, self.outputs), owner.dtype)
        self.scaling: tuple[mx.array, mx.array] | None = None  # gain, shift

    def arrays(self) -> list[mx.array]:
        return [self.a, self.b, *(self.scaling or ())]

    def with_member(self, member: int, part: _Part) -> Factors:
        """The same with one more adapter at the end of the stack."""
        made = self._like((*self.members, member))
        rank = max(self.a.shape[2], part.a.shape[1])
        dtype = self.owner.dtype
        made.a = mx.concatenate([_wider(self.a, 2, rank), _wider(part.a[None].astype(dtype), 2, rank)])
        made.b = mx.concatenate([_wider(self.b, 1, rank), _wider(part.b[None].astype(dtype), 1, rank)])
        if self.scaling is not None or part.scaling is not None:
            before = self.scaling or self._neutral(len(self.members) + 1)
            mine = [value.reshape(1, -1).astype(dtype) for value in part.scaling or self._neutral(1)]
            gain, shift = (mx.concatenate(list(pair)) for pair in zip(before, mine))
            made.scaling = gain, shift
        return made

    def without(self, member: int) -> Factors:
        """The same without one adapter; the rank shrinks no further than the stack's own columns."""
        keep = [0, *(place for place, known in enumerate(self.members, 1) if known != member)]
        made = self._like(tuple(known for known in self.members if known != member))
        chosen = mx.array(keep)
        made.a, made.b = self.a[chosen], self.b[chosen]
        if self.scaling is not None:
            gain, shift = self.scaling
            made.scaling = gain[chosen], shift[chosen]
        return made

    def _like(self, members: tuple[int, ...]) -> Factors:
        made = Factors.__new__(Factors)
        made.owner, made.path, made.inputs, made.outputs = self.owner, self.path, self.inputs, self.outputs
        made.members, made.scaling = members, None
        return made

    def _neutral(self, count: int) -> tuple[mx.array, mx.array]:
        shape, dtype = (count, self.outputs), self.owner.dtype
        return mx.ones(shape, dtype), mx.zeros(shape, dtype)

    def add(self, x: mx.array, y: mx.array) -> mx.array:
        """The layer's output (…, out) with each row's adapter in it; x (…, in), y what the base gives."""
        rows = self.owner.rows
        if rows is None:
            return y
        count = x.size // self.inputs
        choice = rows.choose(self.members, count, self.path)
        if choice is None:
            return y
        y = y + self._product(x.reshape(count, 1, self.inputs), choice).reshape(y.shape).astype(y.dtype)
        if self.scaling is None:
            return y
        gain, shift = self.scaling
        if choice.only is not None:
            return y * gain[choice.only] + shift[choice.only]
        return y * gain[choice.places].reshape(y.shape) + shift[choice.places].reshape(y.shape)

    def _product(self, x: mx.array, choice: _Choice) -> mx.array:
        """x (T, 1, in) -> (T, 1, out)."""
        if choice.only is not None:
            return (x @ self.a[choice.only]) @ self.b[choice.only]
        if choice.runs:
            parts = [
                (x[start:stop] @ self.a[place]) @ self.b[place]
                if place
                else mx.zeros((stop - start, 1, self.outputs), x.dtype)
                for start, stop, place in choice.runs
            ]
            return mx.concatenate(parts)
        low = mx.gather_mm(x, self.a, rhs_indices=choice.places)  # (T, 1, r)
        return mx.gather_mm(low, self.b, rhs_indices=choice.places)


def _wider(value: mx.array, axis: int, size: int) -> mx.array:
    """`value` with zeros behind it along `axis`."""
    if value.shape[axis] == size:
        return value
    pads = [(0, 0)] * value.ndim
    pads[axis] = (0, size - value.shape[axis])
    return mx.pad(value, pads)


# path, squares (out,) of the rows that this process has -> those of the whole rows
SumSquares = Callable[[str, mx.array], mx.array]


class _Part:
    """One adapter's share of one layer: a (in, r), b (r, out) scaled; of DoRA also gain and shift (out,)."""

    def __init__(self, layer: nn.Module, path: str, adapter: Adapter, sum_squares: SumSquares) -> None:
        self._sum_squares = sum_squares
        self.a = adapter.arrays[f"{path}.lora_a"]
        self.b = adapter.arrays[f"{path}.lora_b"] * adapter.scales[path]
        self.scaling: tuple[mx.array, mx.array] | None = None
        length = adapter.arrays.get(f"{path}.m")
        if length is not None:
            self.scaling = self._scale_rows(layer, path, length)

    def _scale_rows(self, layer: nn.Module, path: str, length: mx.array) -> tuple[mx.array, mx.array]:
        """y = gain · (W x + Δ x) + bias, as gain · (W x + bias + Δ x) + (1 - gain) · bias.

        A layer that adds up over ranks has its bias behind the sum, so there nothing is to be made up for.
        """
        merged = dense_weight(layer).astype(mx.float32) + (self.a @ self.b).T  # (out, in)
        gain = length / mx.sqrt(self._sum_squares(path, mx.square(merged).sum(axis=1)))
        bias = None if adds_up(layer) else layer.get("bias")
        shift = mx.zeros_like(gain) if bias is None else (1 - gain) * bias
        mx.eval(gain, shift)  # one layer's dense weight at a time
        return gain, shift


class AdapterStack:
    """All adapters on one model. ids are given once and never again.

    sum_squares: where rows of matrices go on in other processes, adds up their squares over all (DoRA).
    """

    def __init__(
        self, model: nn.Module, dtype: mx.Dtype, sum_squares: SumSquares = lambda path, own: own
    ) -> None:
        self.model, self.dtype, self._sum_squares = model, dtype, sum_squares
        self.rows: CallRows | None = None
        self._layers: dict[str, Factors] = {}
        self._next = 1

    @property
    def nbytes(self) -> int:
        return sum(value.nbytes for factors in self._layers.values() for value in factors.arrays())

    def bytes_of(self, adapter: Adapter) -> int:
        """What the factors of one more adapter take, were its rank not above the others'."""
        size = self.dtype.size
        return sum(value.size * size for value in adapter.arrays.values())

    def add(self, adapter: Adapter) -> int:
        """Put an adapter on the model; its id. Raises ModelInvalid or Unsupported, and then nothing changed."""
        check_fit(self.model, adapter)
        modules = dict(self.model.named_modules())
        member = self._next
        made = {}
        for path in adapter.paths:
            layer = modules[path]
            factors = self._layers.get(path) or Factors(self, path, layer)
            made[path] = factors.with_member(member, _Part(layer, path, adapter, self._sum_squares))
        mx.eval([factors.arrays() for factors in made.values()])
        for path, factors in made.items():
            self._install(modules[path], factors)
        self._next += 1
        return member

    def remove(self, member: int) -> None:
        """Take an adapter off; no row may have it any more."""
        modules = dict(self.model.named_modules())
        touched = {path: f for path, f in self._layers.items() if member in f.members}
        left = {path: factors.without(member) for path, factors in touched.items()}
        mx.eval([factors.arrays() for factors in left.values()])
        for path, factors in left.items():
            self._install(modules[path], factors)

    def _install(self, layer: nn.Module, factors: Factors) -> None:
        if factors.members:
            self._layers[factors.path] = layer._factors = factors
            if not hasattr(type(layer), "plain"):
                own_class: Any = type(layer)
                layer.__class__ = _adapting(own_class, _part_product if adds_up(layer) else _whole_product)
        else:
            del self._layers[factors.path]
            make_plain(layer)

    @contextmanager
    def call(self, ids: np.ndarray | None, taken: np.ndarray | None = None) -> Iterator[None]:
        """Inside, rows of the model's calls have these adapters; None: the base alone."""
        self.rows = None if ids is None else CallRows(ids, taken)
        try:
            yield
        finally:
            self.rows = None


def make_plain(layer: nn.Module) -> None:
    """Give a layer its own class back; nothing where it has it."""
    plain = getattr(type(layer), "plain", None)
    if plain is not None:
        layer.__class__ = plain
        del layer._factors


@cache
def _adapting(layer_class: Hashable, product: Callable[[Any, mx.array], mx.array]) -> type:
    """A layer's class, but for what a call computes: product(layer, x)."""
    base: Any = layer_class

    class Adapting(base):
        plain = base

        def __call__(self, x: mx.array) -> mx.array:
            return product(self, x)

    Adapting.__name__ = base.__name__
    Adapting.__qualname__ = base.__qualname__
    return Adapting


def _whole_product(layer: Any, x: mx.array) -> mx.array:
    return layer._factors.add(x, type(layer).plain.__call__(layer, x))


def _part_product(layer: Any, x: mx.array) -> mx.array:
    """Of a layer that adds up over ranks: one sum for the base's product and the adapters'."""
    y = mx.distributed.all_sum(layer._factors.add(x, own_product(layer, x)), group=layer.group)
    return y + layer["bias"] if "bias" in layer else y


def check_fit(model: nn.Module, adapter: Adapter) -> None:
    """Raise ModelInvalid or Unsupported, naming the first thing at fault, unless all of it fits `model`."""
    if adapter.kind == "full":
        raise Unsupported(
            "A full fine-tuning is no adapter: fuse it ('mlxserve lora fuse') and serve the result as a model.",
            param="adapter",
        )
    if not adapter.paths:
        raise ModelInvalid("The adapter adapts no layer.", param="adapter")
    modules = dict(model.named_modules())
    for path in adapter.paths:
        _check_layer(modules.get(path), path, adapter)


def _check_layer(layer: nn.Module | None, path: str, adapter: Adapter) -> None:
    if layer is not None and is_switch(layer):
        raise Unsupported(
            f"The adapter changes {path}, a layer of experts; such adapters are not served unfused. Fuse it "
            "('mlxserve lora fuse') and serve the result as a model.",
            param="adapter",
        )
    if layer is None or not is_linear(layer):
        made_for = adapter.base or "another one"
        raise ModelInvalid(
            f"The adapter's layer {path} does not exist in this model; it was made for {made_for}.",
            param="adapter",
        )
    for leaf, shape in _shapes(layer, path, adapter).items():
        value = adapter.arrays.get(f"{path}.{leaf}")
        if value is None:
            raise ModelInvalid(f"The adapter lacks {path}.{leaf}.", param="adapter")
        if tuple(value.shape) != shape:
            raise ModelInvalid(
                f"The adapter's {path}.{leaf} has shape {list(value.shape)}; the model's layer wants "
                f"{list(shape)}.",
                param="adapter",
            )


def _shapes(layer: nn.Module, path: str, adapter: Adapter) -> dict[str, tuple[int, ...]]:
    """What each of the adapter's arrays for a layer must look like."""
    inputs, outputs = linear_shape(layer)
    a = adapter.arrays.get(f"{path}.lora_a")
    rank = a.shape[-1] if a is not None else 0
    wanted = dict(zip(ADAPTER_LEAVES, ((inputs, rank), (rank, outputs), (outputs,))))
    if f"{path}.m" not in adapter.arrays and adapter.kind != "dora":
        del wanted["m"]
    return wanted
