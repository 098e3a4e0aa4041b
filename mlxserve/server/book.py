"""Which adapters there are, by base and name, whether they are loaded or not.

Knows: names and folders. Does not know engines or HTTP.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

from mlxserve.engine.adapters import AdapterInfo


@dataclass(slots=True)
class KnownAdapter:
    """base: the served name of its model. info: what the engine said of it when it was last loaded.

    shown: whether lists name it; checkpoints of a training are only found by whoever knows their names.
    """

    base: str
    name: str
    folder: Path
    shown: bool = True
    info: AdapterInfo | None = None
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def id(self) -> str:
        return f"{self.base}@{self.name}"


class AdapterBook:
    """All adapters that requests may name."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], KnownAdapter] = {}

    def add(self, known: KnownAdapter) -> None:
        self._known[known.base, known.name] = known

    def remove(self, known: KnownAdapter) -> None:
        self._known.pop((known.base, known.name), None)

    def find(self, base: str, name: str) -> KnownAdapter | None:
        return self._known.get((base, name))

    def listed(self, base: str | None = None) -> list[KnownAdapter]:
        """Those that lists show, of one base or all, in the order in which they came."""
        return [k for k in self._known.values() if k.shown and base in (None, k.base)]
