"""LoRA adapters of a model that lies on several ranks.

Knows: which part of an adapter a rank has, and how it gets there. Does not know requests, or what an adapter
computes.

Rank 0 reads an adapter's folder and sends its arrays to every rank; each keeps what belongs to its own layers
(a pipeline), or to its own part of every layer (a tensor split, see division.py). A layer that no rank has is
an error, and then no rank has the adapter. Rows name it by its digest, as everywhere.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
import msgspec

from mlxserve.distributed.channel import MIB, Frame
from mlxserve.distributed.crew import Crew
from mlxserve.distributed.division import Division
from mlxserve.distributed.frames import Kind, decode_names, decode_refusal
from mlxserve.distributed.handover import Packed, unpack
from mlxserve.distributed.rank import RankContext
from mlxserve.engine.adapters import Adapters, require_memory
from mlxserve.errors import MlxServeError, ModelInvalid
from mlxserve.models.adapters import Adapter
from mlxserve.models.load import LoadedModel
from mlxserve.models.multilora import AdapterStack, check_fit

# Arrays of so many bytes go in one frame, or one array that is larger.
LOT_BYTES = 64 * MIB
_HEAD_LENGTH = struct.Struct("<I")
# digest, kind, base, scales by path, names of the arrays that follow
_decode_head = msgspec.msgpack.Decoder(tuple[str, str, str, dict[str, float], list[str]]).decode


class Holding(Protocol):
    """Which part of an adapter a rank has. Both raise what `part` finds at fault with the adapter."""

    def part(self, adapter: Adapter) -> Adapter:
        """The layers and numbers of an adapter that belong to this rank."""

    def sum_squares(self, path: str, own: mx.array) -> mx.array:
        """Squares (out,) of a layer's rows over all ranks, from those of this rank's part of the rows."""


def holding(context: RankContext, loaded: LoadedModel) -> Holding:
    """What this rank has of any adapter, as its model is divided."""
    return (Layers if context.split.mode == "pipeline" else Parts)(context, loaded)


class Layers:
    """Of a pipeline: whole layers, and nothing of the others."""

    def __init__(self, context: RankContext, loaded: LoadedModel) -> None:
        self._model = loaded.model

    def part(self, adapter: Adapter) -> Adapter:
        mine = own_part(self._model, adapter)
        if mine.paths or not adapter.paths:
            check_fit(self._model, mine)
        return mine

    def sum_squares(self, path: str, own: mx.array) -> mx.array:
        return own


class Parts:
    """Of a tensor split: the same part of every layer's factors as of its matrix."""

    def __init__(self, context: RankContext, loaded: LoadedModel) -> None:
        self._context, self._loaded = context, loaded
        self._division: Division | None = None

    def part(self, adapter: Adapter) -> Adapter:
        return self._divided().part(adapter)

    def sum_squares(self, path: str, own: mx.array) -> mx.array:
        if not self._divided().shares_rows(path):
            return own
        return mx.distributed.all_sum(own, group=self._context.group)

    def _divided(self) -> Division:
        """Found when the first adapter comes: it takes a look at the whole definition."""
        if self._division is None:
            rank, size = self._context.rank, self._context.size
            self._division = Division(self._loaded.model, self._loaded.config, rank, size)
        return self._division


class RankAdapters(Adapters):
    """Rank 0's adapters, which it sends to the others."""

    def __init__(
        self, loaded: LoadedModel, way: str, users: Callable[[str], int], *, crew: Crew, holding: Holding
    ) -> None:
        super().__init__(loaded, way, users, alone=False)
        self.stack = AdapterStack(loaded.model, loaded.dtype, holding.sum_squares)
        self._crew, self._holding = crew, holding

    def _require_memory(self, adapter: Adapter, name: str) -> None:
        super()._require_memory(self._holding.part(adapter), name)

    def _add(self, adapter: Adapter, digest: str) -> int:
        """On every rank, or on none: it is offered to all, and put on when nobody has a reason against it."""
        mine = self._holding.part(adapter)
        try:
            for more, parts in pack(digest, adapter):
                self._crew.send_all(Kind.ADAPTER, more, *parts)
            _require_complete(adapter, mine, self._crew.replies())
            self._crew.send_all(Kind.ADOPT, 0)
            return super()._add(mine, digest) if mine.paths else 0
        except MlxServeError:
            self._crew.send_all(Kind.DROP, 0, digest.encode())
            raise

    def _remove(self, member: int, digest: str) -> None:
        super()._remove(member, digest)
        self._crew.send_all(Kind.DROP, 0, digest.encode())


def _require_complete(whole: Adapter, mine: Adapter, replies: Sequence[Frame]) -> None:
    """Raise what a rank refuses with, or ModelInvalid for a layer that no rank has."""
    refusal = next((reply for reply in replies if reply.kind == Kind.REFUSED), None)
    if refusal is not None:
        raise decode_refusal(refusal.payload)
    missing = set(whole.paths) - set(mine.paths)
    for reply in replies:
        missing.intersection_update(decode_names(reply.payload))
    if missing:
        raise ModelInvalid(
            f"The adapter's layer {min(missing)} does not exist in this model; it was made for "
            f"{whole.base or 'another one'}.",
            param="adapter",
        )


class FollowerAdapters:
    """Another rank's part of the adapters that rank 0 has sent."""

    def __init__(self, context: RankContext, loaded: LoadedModel) -> None:
        self._holding = holding(context, loaded)
        self._rank = context.rank
        self.stack = AdapterStack(loaded.model, loaded.dtype, self._holding.sum_squares)
        self._offered: tuple[str, Adapter] | None = None
        self._ids: dict[str, int] = {}
        self._come: dict[str, mx.array] = {}

    def take(self, payload: bytearray, more: int) -> list[str] | None:
        """Look at what is offered; the paths of layers that are elsewhere. None while `more` frames follow.

        Raises what is wrong with it, and DoesNotFit where this rank has no room for its part.
        """
        digest, adapter = unpack_adapter(payload)
        self._come |= adapter.arrays
        if more:
            return None
        adapter.arrays, self._come = self._come, {}
        mine = self._holding.part(adapter)
        require_memory(self.stack, mine, f"The adapter's part on rank {self._rank}")
        self._offered = digest, mine
        return sorted(set(adapter.paths) - set(mine.paths))

    def adopt(self) -> None:
        """Put on what was offered last; every rank does so at once, since they may have to add something up."""
        assert self._offered is not None
        (digest, mine), self._offered = self._offered, None
        self._ids[digest] = self.stack.add(mine) if mine.paths else 0

    def drop(self, digest: str) -> None:
        """Nothing where it was refused."""
        self._offered = None
        self.stack.remove(self._ids.pop(digest, 0))

    def id_of(self, digest: str) -> int:
        """The number of an adapter in this rank's stack, 0 where it changes nothing here."""
        return self._ids[digest]


def own_part(model: nn.Module, adapter: Adapter) -> Adapter:
    """What of an adapter belongs to layers that `model` has the weights of."""
    mine = {path for path, layer in model.named_modules() if path in adapter.scales and _present(layer)}
    arrays = {name: value for name, value in adapter.arrays.items() if name.rpartition(".")[0] in mine}
    return replace(adapter, arrays=arrays, scales={path: adapter.scales[path] for path in mine})


def _present(layer: Any) -> bool:
    """False for a layer of another stage, which is there without its weights."""
    return any(isinstance(value, mx.array) for value in layer.values())


def pack(digest: str, adapter: Adapter) -> Iterator[tuple[int, list[bytes | memoryview]]]:
    """An adapter as frames: of each, how many follow it, and its parts."""
    lots = _lots(adapter.arrays)
    for number, names in enumerate(lots, 1):
        head = msgspec.msgpack.encode((digest, adapter.kind, adapter.base, adapter.scales, names))
        arrays = Packed([[adapter.arrays[name] for name in names]])
        yield len(lots) - number, [_HEAD_LENGTH.pack(len(head)), head, *arrays.parts()]


def _lots(arrays: dict[str, mx.array]) -> list[list[str]]:
    """Names of arrays that go in one frame together."""
    lots: list[list[str]] = [[]]
    room = LOT_BYTES
    for name, value in arrays.items():
        if value.nbytes > room and lots[-1]:
            lots.append([])
            room = LOT_BYTES
        lots[-1].append(name)
        room -= value.nbytes
    return lots


def unpack_adapter(payload: bytearray) -> tuple[str, Adapter]:
    """(digest, adapter) of one of `pack`'s frames, with the arrays that are in it."""
    (length,) = _HEAD_LENGTH.unpack_from(payload)
    at = _HEAD_LENGTH.size + length
    digest, kind, base, scales, names = _decode_head(payload[_HEAD_LENGTH.size : at])
    (arrays,) = unpack(payload[at:])
    return digest, Adapter(kind, dict(zip(names, arrays, strict=True)), scales, base)
