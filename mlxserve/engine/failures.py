"""Whose requests a failed step costs, and what they are told.

Knows: exceptions, and how many tokens each sequence holds. Does not know what failed, or how the loop goes on.
"""

from __future__ import annotations

import mlx.core as mx

from mlxserve.engine.sequence import Sequence
from mlxserve.errors import DoesNotFit, EngineFailed, MlxServeError


def to_fail(touched: list[Sequence], error: Exception) -> list[Sequence]:
    """All that the step touched; where memory ran out, only the largest: the others are computed anew."""
    if touched and _out_of_memory(error):
        return [max(touched, key=lambda sequence: len(sequence.tokens))]
    return touched


def explained(error: Exception, tokens: int, bytes_per_token: int) -> MlxServeError:
    """What a request that held `tokens` tokens is told, at so many bytes of K/V each."""
    if isinstance(error, MlxServeError):
        return error
    if not _out_of_memory(error):
        return EngineFailed(f"A step of the engine failed ({type(error).__name__}: {error}); try again.")
    return DoesNotFit(
        f"Memory ran out while {tokens} tokens of this request were held; it was the largest. "
        "Ask for less, or give the cache a smaller share.",
        needed_bytes=bytes_per_token * tokens,
        available_bytes=mx.get_active_memory(),
    )


def _out_of_memory(error: Exception) -> bool:
    text = str(error).lower()
    return isinstance(error, MemoryError) or any(
        word in text for word in ("out of memory", "malloc", "bad_alloc", "insufficient memory")
    )
