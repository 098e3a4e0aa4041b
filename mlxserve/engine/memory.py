"""How many pages and state slots there may be: the machine's memory less the weights, divided.

Knows: bytes of a page and of a state slot (measured on the definition itself), device limits. Does not
know sequences. Nothing is allocated here; the runner's pools grow on demand up to these limits.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxserve.cache.pages import GroupSpec, pages_for
from mlxserve.cache.state import LayerState
from mlxserve.cache.store import LayerPages
from mlxserve.config import CACHE_SHARE, MIB, EngineConfig
from mlxserve.engine.capacity import Memory
from mlxserve.errors import DoesNotFit
from mlxserve.models.load import LoadedModel
from mlxserve.models.paged import PagedModel
from mlxserve.models.step import SOLO, Step

# A model with recurrent layers spends at most this much of its budget on their state.
STATE_SHARE = 0.5
MLX_CACHE_BYTES = 512 * MIB


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of one page of each group (all its layers together), and of one state slot.

    kept_whole: layers whose keys or values cannot be packed in `kv_bits` and stay as they are.
    """

    windows: tuple[int | None, ...]
    page_bytes: tuple[int, ...]
    slot_bytes: int
    kept_whole: int = 0


def measure(model: nn.Module, way: str, config: EngineConfig) -> Sizes:
    """Bytes of pages and slots, read off the shapes of one token's pass; nothing is evaluated."""
    from mlxserve.models.layout import read_layout

    groups = len(read_layout(model).windows)
    probe = PagedModel(
        model,
        way,
        page_size=config.page_size,
        group_pages=[1] * groups,
        state_slots=1,
        kv_bits=config.kv_bits,
        kv_group_size=config.kv_group_size,
    )
    one = np.array([1])
    table = np.zeros((1, 1), np.int32)
    step = Step(np.array([0]), one, one, [table] * groups, np.zeros(1, np.int32))
    probe.forward(mx.array([0]), step)
    pages = [
        sum(s.nbytes for s in probe.stores if isinstance(s, LayerPages) and s.window == window)
        for window in probe.windows
    ]
    slot = sum(s.nbytes for s in probe.stores if isinstance(s, LayerState))
    kept_whole = sum(s.kept_whole for s in probe.stores if isinstance(s, LayerPages))
    return Sizes(probe.windows, tuple(pages), slot, kept_whole)


def machine_budget() -> int:
    """Bytes that model and cache may take together: a Mac's recommended working set, else free memory."""
    if mx.metal.is_available():
        return int(mx.device_info()["max_recommended_working_set_size"])
    return mx.get_active_memory() + _free_memory()


def _free_memory() -> int:
    """Memory that can be had without swapping, in bytes."""
    if sys.platform.startswith("linux"):
        with open("/proc/meminfo") as file:
            fields = dict(line.split(":", 1) for line in file)
        return int(fields["MemAvailable"].split()[0]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def bound_mlx() -> None:
    """Keep MLX's own cache of freed buffers small; on a Mac, let it wire what the system recommends."""
    mx.set_cache_limit(MLX_CACHE_BYTES)
    if mx.metal.is_available():
        mx.set_wired_limit(int(mx.device_info()["max_recommended_working_set_size"]))


def plan_for(loaded: LoadedModel, way: str, config: EngineConfig) -> tuple[Memory, Sizes | None]:
    """What a model served in `way` may take of this machine now; no sizes where it has no pages.

    Raises DoesNotFit, as `plan_memory`.
    """
    if way == SOLO:
        return Memory((), 0, loaded.context), None
    sizes = measure(loaded.model, way, config)
    free_bytes = machine_budget() - mx.get_active_memory()
    return plan_memory(sizes, config, loaded.context, free_bytes), sizes


def plan_memory(sizes: Sizes, config: EngineConfig, context: int, free_bytes: int) -> Memory:
    """Divide the budget. Raises DoesNotFit, with both numbers, if not even one page of each group fits.

    free_bytes: what the machine has left beside the weights; `config.cache_bytes` overrides it.
    """
    budget = config.cache_bytes if config.cache_bytes is not None else int(free_bytes * CACHE_SHARE)
    slots = 0
    if sizes.slot_bytes:
        share = budget * STATE_SHARE if sizes.page_bytes else budget
        slots = min(int(share // sizes.slot_bytes), 2 * config.max_sequences)
        budget -= slots * sizes.slot_bytes
    needed = sum(sizes.page_bytes) or 0
    if budget < needed or (sizes.slot_bytes and slots < 1):
        least = needed + sizes.slot_bytes
        total = max(budget + slots * sizes.slot_bytes, 0)
        raise DoesNotFit(
            f"The smallest cache takes {least:,} bytes; {total:,} are free beside the model's weights. "
            "Use a smaller or more quantised model, or fewer bits for the cache (--kv-bits).",
            needed_bytes=least,
            available_bytes=total,
        )
    return Memory(page_groups(sizes, config, context, budget), slots, context, sizes.page_bytes)


def page_groups(sizes: Sizes, config: EngineConfig, context: int, budget: int) -> tuple[GroupSpec, ...]:
    """As many pages as `budget` bytes hold and sequences can use; at least one of each group."""
    full = _most(lambda pages: _bytes(sizes, config, pages) <= budget, _useful_pages(config, context))
    return tuple(GroupSpec(w, _group_pages(w, config, full)) for w in sizes.windows)


def _useful_pages(config: EngineConfig, context: int) -> int:
    """Pages that every sequence at full length would take; more are of no use."""
    return pages_for(context, config.page_size) * config.max_sequences


def _group_pages(window: int | None, config: EngineConfig, pages: int) -> int:
    """Pages of a group when full attention has `pages`: a window needs no more than it can see."""
    if window is None:
        return pages
    each = pages_for(2 * window + config.step_tokens, config.page_size) + 1
    return min(pages, each * config.max_sequences)


def _bytes(sizes: Sizes, config: EngineConfig, pages: int) -> int:
    counts = [_group_pages(window, config, pages) for window in sizes.windows]
    return sum(count * size for count, size in zip(counts, sizes.page_bytes))


def _most(fits: Callable[[int], bool], limit: int) -> int:
    """The largest number up to `limit`, at least 1, for which `fits` holds (it holds for all smaller ones)."""
    low, high = 1, max(limit, 1)
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low
