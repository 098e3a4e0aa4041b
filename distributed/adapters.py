"""LoRA adapters of a model whose layers lie on several ranks.

Knows: which of an adapter's layers a rank has, and how the rest reaches the others. Does not know requests,
or what an adapter computes.

Rank 0 reads an adapter's folder and sends its arrays to every rank; each keeps what belongs to its own
layers. A layer that no rank has is an error, and then no rank has the adapter. Rows name it by its digest,
as everywhere.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import msgspec

from mlxserve.distributed.crew import Crew
from mlxserve.distributed.frames import Kind, decode_names, decode_refusal
from mlxserve.distributed.handover import Packed, unpack
from mlxserve.engine.adapters import AdapterInfo, Adapters
from mlxserve.errors import ModelInvalid, Unsupported
from mlxserve.models.adapters import Adapter, read
from mlxserve.models.load import LoadedModel
from mlxserve.models.multilora import AdapterStack

_HEAD_LENGTH = struct.Struct("<I")
# digest, kind, base, scales by path, names of the arrays that follow
_decode_head = msgspec.msgpack.Decoder(tuple[str, str, str, dict[str, float], list[str]]).decode


class RankAdapters(Adapters):
    """Rank 0's adapters. whole_layers: False where every layer is divided; then none can be loaded."""

    def __init__(
        self, loaded: LoadedModel, way: str, users: Callable[[str], int], *, crew: Crew, whole_layers: bool
    ) -> None:
        super().__init__(loaded, way, users, alone=False)
        self._crew, self._whole_layers = crew, whole_layers
        self._sent: set[str] = set()

    def load(self, name: str, folder: Path) -> AdapterInfo:
        """As in one process, on every rank. Raises Unsupported where ranks hold parts of layers."""
        info = super().load(name, folder)
        if info.digest not in self._sent:
            try:
                self._send(info, read(folder))
            except BaseException:
                self.drop(name)
                raise
        return info

    def _refuse_where_unfit(self) -> None:
        if not self._whole_layers:
            raise Unsupported(
                "Adapters are not served where every layer is divided over ranks; divide the model by layers "
                "(--split pipeline:N), or fuse the adapter ('mlxserve lora fuse') and serve the result.",
                param="adapter",
            )

    def tidy(self) -> None:
        """Take off, on every rank, what has no name and no user any more."""
        super().tidy()
        for digest in [digest for digest in self._sent if digest not in self._ids]:
            self._sent.remove(digest)
            self._crew.send_all(Kind.DROP, 0, digest.encode())

    def _send(self, info: AdapterInfo, adapter: Adapter) -> None:
        self._sent.add(info.digest)
        self._crew.send_all(Kind.ADAPTER, 0, *pack(info.digest, adapter))
        missing = set(adapter.paths) - set(own_part(self.loaded.model, adapter).paths)
        replies = self._crew.replies()
        refusal = next((reply for reply in replies if reply.kind == Kind.REFUSED), None)
        if refusal is not None:
            raise decode_refusal(refusal.payload)
        for reply in replies:
            missing.intersection_update(decode_names(reply.payload))
        if missing:
            raise ModelInvalid(
                f"The adapter's layer {min(missing)} does not exist in this model; it was made for "
                f"{adapter.base or 'another one'}.",
                param="adapter",
            )

    def _add(self, adapter: Adapter) -> int:
        mine = own_part(self.loaded.model, adapter)
        return super()._add(mine) if mine.paths else 0


class FollowerAdapters:
    """Another rank's part of the adapters that rank 0 has sent."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.stack = AdapterStack(loaded.model, loaded.dtype)
        self._model = loaded.model
        self._ids: dict[str, int] = {}

    def take(self, payload: bytearray) -> list[str]:
        """Keep what belongs to layers here; the paths of those that are elsewhere. Raises as AdapterStack.add."""
        digest, adapter = unpack_adapter(payload)
        mine = own_part(self._model, adapter)
        self._ids[digest] = self.stack.add(mine) if mine.paths else 0
        return sorted(set(adapter.paths) - set(mine.paths))

    def drop(self, digest: str) -> None:
        """Nothing where it was refused."""
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


def pack(digest: str, adapter: Adapter) -> list[bytes | memoryview]:
    """An adapter as a frame's parts."""
    names = list(adapter.arrays)
    head = msgspec.msgpack.encode((digest, adapter.kind, adapter.base, adapter.scales, names))
    arrays = Packed([[adapter.arrays[name] for name in names]])
    return [_HEAD_LENGTH.pack(len(head)), head, *arrays.parts()]


def unpack_adapter(payload: bytearray) -> tuple[str, Adapter]:
    """(digest, adapter) of `pack`."""
    (length,) = _HEAD_LENGTH.unpack_from(payload)
    at = _HEAD_LENGTH.size + length
    digest, kind, base, scales, names = _decode_head(payload[_HEAD_LENGTH.size : at])
    (arrays,) = unpack(payload[at:])
    return digest, Adapter(kind, dict(zip(names, arrays, strict=True)), scales, base)
