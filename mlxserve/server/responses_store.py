"""Responses kept for `previous_response_id` and retrieval: in memory, bounded, least recently used first out.

Knows: response objects and the items they grew from. Keeps nothing on disk.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import msgspec

from mlxserve.server.faults import NotFound


@dataclass(frozen=True, slots=True)
class Stored:
    """`items` are the input items of the whole conversation up to this response, its own input included."""

    response: dict[str, Any]
    items: list[dict[str, Any]]
    size_bytes: int


class ResponseStore:
    """At most `max_count` responses and `max_bytes` of their JSON. One event loop uses it."""

    def __init__(self, max_count: int, max_bytes: int) -> None:
        self._max_count, self._max_bytes = max_count, max_bytes
        self._kept: OrderedDict[str, Stored] = OrderedDict()
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, response: dict[str, Any], items: list[dict[str, Any]]) -> None:
        """Keeps a response; a single one that is larger than the bound is not kept."""
        size = len(msgspec.json.encode([response, items]))
        if size > self._max_bytes:
            return
        self._kept[response["id"]] = Stored(response, items, size)
        self.size_bytes += size
        while len(self._kept) > self._max_count or self.size_bytes > self._max_bytes:
            _, oldest = self._kept.popitem(last=False)
            self.size_bytes -= oldest.size_bytes

    def get(self, id_: str, param: str | None = None) -> Stored:
        """Raises NotFound."""
        stored = self._kept.get(id_)
        if stored is None:
            raise NotFound(f"No response '{id_}' is stored here.", param=param)
        self._kept.move_to_end(id_)
        return stored

    def drop(self, id_: str) -> None:
        """Raises NotFound."""
        self.size_bytes -= self.get(id_).size_bytes
        del self._kept[id_]
