"""An engine's figures, and what a person should know of how it serves its model.

Knows: an engine's books, read once. Changes nothing but the counters, which the engine moves on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from mlxserve.models.paged import SOLO

if TYPE_CHECKING:
    from mlxserve.engine.engine import Engine


@dataclass(slots=True)
class Counters:
    """What has happened since the start."""

    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    forced_tokens: int = 0
    finished: int = 0
    failed: int = 0
    busy_s: float = 0.0
    errors: dict[str, int] = field(default_factory=dict)


def figures(engine: Engine) -> dict[str, Any]:
    """Figures of now and since the start; bytes, tokens, seconds as named."""
    scheduler, counters = engine.scheduler, engine.counters
    pools, page_bytes, tree = scheduler.pools, engine.memory.page_bytes, scheduler.tree.stats
    return {
        "queue": len(scheduler.waiting),
        "running": len(scheduler.running),
        "pages_total": sum(pool.total for pool in pools),
        "pages_free": sum(pool.free for pool in pools),
        "pages_cached": sum(pool.idle for pool in pools),
        "prefix_lookup_tokens": tree.lookup_tokens,
        "prefix_hit_tokens": tree.hit_tokens,
        "prefix_hit_rate": tree.hit_tokens / tree.lookup_tokens if tree.lookup_tokens else 0.0,
        "generated_tokens": counters.generated_tokens,
        "forced_tokens": counters.forced_tokens,
        "prompt_tokens": counters.prompt_tokens,
        "tokens_per_s": counters.generated_tokens / counters.busy_s if counters.busy_s else 0.0,
        "preemptions": scheduler.preemptions,
        "steps": counters.steps,
        "finished": counters.finished,
        "failed": counters.failed,
        "disk_hits": 0 if engine.persistence is None else engine.persistence.disk.hits,
        "kv_bytes": engine.runner.model.nbytes,
        "kv_limit_bytes": sum(pool.total * size for pool, size in zip(pools, page_bytes)),
        "weight_bytes": engine.loaded.weight_bytes,
        "adapter_bytes": engine.adapters.stack.nbytes,
        "peak_bytes": mx.get_peak_memory(),
        "way": engine.way,
    }


def serving_notes(engine: Engine) -> list[str]:
    """What is not as somebody may expect, a sentence each."""
    config, notes = engine.config, []
    if engine.way == SOLO:
        notes.append(f"Requests are served one at a time and share no prefixes: {engine.reason}.")
    if config.kv_bits != 16 and engine.way == SOLO:
        notes.append(f"The cache stays in 16 bits: {engine.loaded.name} is not paged.")
    if config.cache_dir is not None and engine.persistence is None:
        notes.append(
            "Nothing is kept on disk: the model's own cache has no pages, or prefixes are not cached."
        )
    kept_whole = 0 if engine.sizes is None else engine.sizes.kept_whole
    if kept_whole and config.kv_bits != 16:
        notes.append(
            f"{kept_whole} of the layers keep their cache in 16 bits: "
            f"groups of {config.kv_group_size} do not divide the width of their keys or values."
        )
    return notes
