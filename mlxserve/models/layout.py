"""What a definition keeps between tokens, layer by layer, read from the caches it makes itself.

Knows: mlx-lm's cache classes and what each asks of memory. Does not allocate anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mlxserve.models.definitions import import_definition


@dataclass(frozen=True, slots=True)
class Leaf:
    """One cache object. kind: 'pages' (keys and values), 'state' (recurrent arrays) or 'other'.

    window: keys a sliding layer sees, None for all. arrays: how many recurrent arrays. name: mlx-lm's
    class, for messages.
    """

    kind: str
    window: int | None = None
    arrays: int = 0
    name: str = ""


@dataclass(frozen=True, slots=True)
class Layout:
    """leaves: every cache object in order. tree: the same as (possibly nested) lists of leaf indices."""

    leaves: tuple[Leaf, ...]
    tree: tuple[Any, ...]

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The page groups: one a window, full attention (None) first."""
        found = {leaf.window for leaf in self.leaves if leaf.kind == "pages"}
        return tuple(sorted(found, key=lambda window: (window is not None, window or 0)))

    @property
    def unknown(self) -> str | None:
        """The name of a cache class that has no place here, or None."""
        return next((leaf.name for leaf in self.leaves if leaf.kind == "other"), None)


def plain_caches(model: Any) -> list[Any]:
    """The caches mlx-lm itself would run `model` with."""
    if hasattr(model, "make_cache"):
        return list(model.make_cache())
    kv_cache = import_definition("cache").KVCache
    return [kv_cache() for _ in model.layers]


def read_layout(model: Any) -> Layout:
    """The layout of `model`, from the caches it makes."""
    leaves: list[Leaf] = []

    def visit(cache: Any) -> Any:
        classes = import_definition("cache")
        if type(cache) is classes.CacheList:
            return tuple(visit(part) for part in cache.caches)
        leaves.append(_leaf(cache, classes))
        return len(leaves) - 1

    tree = tuple(visit(cache) for cache in plain_caches(model))
    return Layout(tuple(leaves), tree)


def _leaf(cache: Any, classes: Any) -> Leaf:
    name = type(cache).__name__
    if type(cache) is classes.KVCache:
        return Leaf("pages", name=name)
    if type(cache) is classes.RotatingKVCache and cache.keep == 0:
        return Leaf("pages", window=cache.max_size, name=name)
    if type(cache) is classes.ArraysCache:
        return Leaf("state", arrays=len(cache.cache), name=name)
    return Leaf("other", name=name)
