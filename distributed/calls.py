"""What the front asks of rank 0's engine, and what comes back, as frames.

Knows: kinds of frames and how requests, deltas and errors become bytes. Does not know sockets, or who
restarts whom.

    front → rank 0    SUBMIT request | CANCEL id | EMBED (number, token ids, adapter)
                      FILE (parcel, name, bytes that follow those before) of an adapter, then
                      LOAD (number, parcel, name of the adapter) | DROP (number, name)
    rank 0 → front    NEWS [(id, delta or error)] | ANSWER (number, value or error) | FIGURES of the engine
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any

import msgspec

from mlxserve.config import EngineConfig, LoadConfig
from mlxserve.distributed.faults import decode_error, encode_error
from mlxserve.errors import MlxServeError
from mlxserve.request import Delta, Request

News = Delta | MlxServeError


class Call(IntEnum):
    SUBMIT = 1
    CANCEL = 2
    EMBED = 3
    NEWS = 4
    ANSWER = 5
    FIGURES = 6
    FILE = 7
    LOAD = 8
    DROP = 9


def pack(value: Any) -> bytes:
    """Plain values as bytes (https://msgpack.org)."""
    return msgspec.msgpack.encode(value)


def unpack(body: bytes | bytearray) -> Any:
    return msgspec.msgpack.decode(body)


def unpack_request(body: bytes | bytearray) -> Request:
    return msgspec.msgpack.decode(body, type=Request)


def pack_news(news: Sequence[tuple[str, News]]) -> bytes:
    """What happened to several requests since the last time."""
    return pack(
        [(name, encode_error(item) if isinstance(item, MlxServeError) else item) for name, item in news]
    )


def unpack_news(body: bytes | bytearray) -> list[tuple[str, News]]:
    found = []
    for name, item in unpack(body):
        error = isinstance(item, Mapping) and "kind" in item
        found.append((name, decode_error(item) if error else msgspec.convert(item, Delta)))
    return found


def plain_settings(settings: LoadConfig | EngineConfig) -> dict[str, Any]:
    """Settings as plain values, for a message."""
    values: dict[str, Any] = msgspec.to_builtins(settings, enc_hook=str)
    return values


def load_settings(values: Mapping[str, Any]) -> LoadConfig:
    return msgspec.convert(values, LoadConfig)


def engine_settings(values: Mapping[str, Any]) -> EngineConfig:
    def read(kind: type, value: Any) -> Any:
        return Path(value) if kind is Path else value

    return msgspec.convert(values, EngineConfig, dec_hook=read)
