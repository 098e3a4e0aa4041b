"""What has happened in an engine, and its books in figures.

Knows: the scheduler's books, read once. Changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mlxserve.engine.scheduler import Scheduler


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


def figures(scheduler: Scheduler, counters: Counters) -> dict[str, Any]:
    """Figures of now and since the start; tokens, seconds as named."""
    pools, tree = scheduler.pools, scheduler.tree.stats
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
    }
