"""What there is room for: how many pages a sequence may ever need, and which requests can never run.

Knows: page groups, windows, the context. Does not know what is free now, nor who holds what.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlxserve.cache.pages import GroupSpec, pages_for
from mlxserve.config import EngineConfig
from mlxserve.errors import DoesNotFit, PromptTooLong
from mlxserve.request import Request


@dataclass(frozen=True, slots=True)
class Memory:
    """What the engine has: page groups, slots of recurrent state (0: the model has none), the context."""

    groups: tuple[GroupSpec, ...]
    state_slots: int
    context: int
    page_bytes: tuple[int, ...] = ()


def most_pages(tokens: int, spec: GroupSpec, config: EngineConfig) -> int:
    """Pages of a group that a sequence of `tokens` positions ever holds at once."""
    whole = pages_for(tokens, config.page_size)
    if spec.window is None:
        return whole
    return min(whole, pages_for(spec.window + config.step_tokens, config.page_size) + 1)


def refuse_hopeless(request: Request, memory: Memory, config: EngineConfig) -> None:
    """Raise PromptTooLong or DoesNotFit for a request that could not run if it were alone."""
    wanted = len(request.prompt) + (request.params.max_tokens or 1)
    if not request.prompt:
        raise PromptTooLong("The prompt is empty; it needs at least one token.", needed=0, limit=1)
    if wanted > memory.context:
        raise PromptTooLong(
            f"The prompt has {len(request.prompt)} tokens and max_tokens is {request.params.max_tokens}, "
            f"{wanted} together; the context holds {memory.context}.",
            needed=wanted,
            limit=memory.context,
        )
    for group, spec in enumerate(memory.groups):
        needed = most_pages(wanted - 1, spec, config)
        if needed > spec.pages:
            size = memory.page_bytes[group] if memory.page_bytes else config.page_size
            raise DoesNotFit(
                f"The request needs {needed} pages of {config.page_size} tokens in the cache, "
                f"which has {spec.pages}; give it more memory or ask for less.",
                needed_bytes=needed * size,
                available_bytes=spec.pages * size,
            )
