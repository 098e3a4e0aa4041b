"""A model in numbers: which tensors it has, what each weighs, and what a rank would hold of it.

Knows: sums over tensors for a stage of a pipeline or a part of a tensor split, and over layers for K/V.
Does not know: MLX, definitions (`arithmetic` counts them), machines or speed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from mlxserve.models.kvlayout import KvLayer
from mlxserve.models.memory import bytes_per_value

# Where a tensor outside the layers belongs in a pipeline. An embedding that is also the head is on both ends.
Place = Literal["layer", "first", "last", "ends"]


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor as it lies in memory.

    parameters: trained numbers it stands for (0 for the scales of a packed one). layer: None outside the
    layers. share: the part of it that one token reads: 1, of a layer of experts those that are chosen, of
    an embedding nothing that counts.
    """

    name: str
    nbytes: int
    parameters: int = 0
    layer: int | None = None
    place: Place = "layer"
    share: float = 1.0


@dataclass(frozen=True, slots=True)
class File:
    """One file of the model: the layers it holds parts of, and whether it holds what is outside of them."""

    name: str
    nbytes: int
    layers: frozenset[int]
    first: bool = False
    last: bool = False


# Bytes by the share of them that one token reads.
Load = dict[float, int]


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything a plan is made from.

    kv: what each layer keeps for a token, None for a layer without K/V. replicated_kv: every rank of a
    tensor split keeps all of it (a compressed latent). tensor_parallel: ranks -> bytes of each tensor on
    one of them, or why it cannot be divided so. files: empty where they are not known. bits: of the weights
    as asked for, None as they are stored. form: the same in words. hidden: numbers handed from layer to
    layer for a token. own_context: tokens that the model itself is made for. notes: for a person to read.
    """

    name: str
    config: Mapping[str, Any]
    tensors: tuple[Tensor, ...]
    kv: tuple[KvLayer | None, ...]
    replicated_kv: bool = False
    tensor_parallel: Mapping[int, Mapping[str, int] | str] = field(default_factory=dict)
    files: tuple[File, ...] = ()
    bits: int | None = None
    form: str = ""
    hidden: int = 0
    own_context: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def layers(self) -> int:
        return len(self.kv)

    @property
    def total_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def parameters(self) -> int:
        return sum(tensor.parameters for tensor in self.tensors)

    @property
    def active_parameters(self) -> float:
        """Parameters that one token is multiplied with."""
        return sum(tensor.parameters * tensor.share for tensor in self.tensors)

    @property
    def has_experts(self) -> bool:
        return any(0 < tensor.share < 1 for tensor in self.tensors)

    def refusal(self, size: int) -> str | None:
        """Why the model cannot be divided by tensor parallelism over `size` ranks; None if it can."""
        if size == 1:
            return None
        found = self.tensor_parallel.get(size, f"nobody has counted its tensors over {size} ranks")
        return found if isinstance(found, str) else None

    def tensor_load(self, size: int) -> Load:
        """What each rank of a tensor split holds. `refusal(size)` must be None."""
        found = self.tensor_parallel.get(size)
        divided = found if isinstance(found, Mapping) else {}
        return _add_up((tensor.share, divided.get(tensor.name, tensor.nbytes)) for tensor in self.tensors)

    def stage_load(self, layers: range) -> Load:
        """What the rank of a pipeline with `layers` holds: they, and the ends of the model that it is."""
        return _add_up((tensor.share, tensor.nbytes) for tensor in self.tensors if self.holds(tensor, layers))

    def holds(self, tensor: Tensor, layers: range) -> bool:
        """True if the stage with `layers` holds `tensor`."""
        if tensor.layer is not None:
            return tensor.layer in layers
        first, last = 0 in layers, self.layers - 1 in layers
        return {"first": first, "last": last, "ends": first or last, "layer": False}[tensor.place]

    def kv_bytes(self, context: int, layers: range | None = None, size: int = 1, kv_bits: int = 16) -> int:
        """Bytes of K/V of one sequence of `context` tokens in `layers` (None: all), on one of `size` ranks."""
        chosen = self.kv if layers is None else self.kv[layers.start : layers.stop]
        values = sum(layer.values * layer.tokens(context) for layer in chosen if layer is not None)
        parts = 1 if self.replicated_kv else size
        return round(values * bytes_per_value(kv_bits) / parts)

    def files_of(self, layers: range | None) -> tuple[File, ...]:
        """The files that a rank needs: of a pipeline those with its layers, of a tensor split all."""
        if layers is None:
            return self.files
        first, last = 0 in layers, self.layers - 1 in layers
        return tuple(
            file
            for file in self.files
            if not file.layers.isdisjoint(layers) or (first and file.first) or (last and file.last)
        )

    @property
    def digest(self) -> str:
        """A name for these tensors and this configuration, the same on every machine."""
        seen = hashlib.sha256(json.dumps(self.config, sort_keys=True, default=str).encode())
        for tensor in self.tensors:
            seen.update(f"{tensor.name}:{tensor.nbytes};".encode())
        return seen.hexdigest()[:32]


def load_bytes(load: Load) -> int:
    """All bytes of a load."""
    return sum(load.values())


def bytes_read(load: Load, tokens: int = 1) -> float:
    """Bytes of a load that a step with `tokens` tokens reads, each choosing its experts by itself.

    Of n experts of which a token takes the share s, t tokens miss one with (1 - s)^t.
    """
    return sum(nbytes * (1.0 - (1.0 - share) ** tokens) for share, nbytes in load.items())


def _add_up(pairs: Any) -> Load:
    load: Load = {}
    for share, nbytes in pairs:
        load[share] = load.get(share, 0) + nbytes
    return load
