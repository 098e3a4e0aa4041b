"""Who waits a little because another sequence is just computing the tokens that it starts with.

Knows: tokens, and how far each sequence is computed. Does not know what is cached, or what there is room for.
"""

from __future__ import annotations

from collections.abc import Iterable

from mlxserve.engine.sequence import Sequence, Status


def held_back(sequence: Sequence, running: Iterable[Sequence], page_size: int) -> bool:
    """True while one of `running` is computing a prefix that `sequence` can take over when it is done.

    Whom it waits for, and until when, is noted in `sequence`: the tokens are compared once.
    """
    leader = sequence.waits_for
    if leader is not None:
        if leader.status is Status.RUNNING and leader.computed < sequence.waits_until:
            return True
        sequence.waits_for = None
    for other in running:
        if other.decoding or other.request.adapter != sequence.request.adapter:
            continue
        shared = _shared_pages(sequence.tokens, other.tokens, page_size) * page_size
        if shared > other.computed:
            sequence.waits_for, sequence.waits_until = other, shared
            return True
    return False


def _shared_pages(mine: list[int], theirs: list[int], size: int) -> int:
    """Whole pages of tokens that both start with, the last token of `mine` left out."""
    low, high = 0, min(len(mine) - 1, len(theirs)) // size
    while low < high:  # prefixes either agree or not: halve
        middle = (low + high + 1) // 2
        if mine[low * size : middle * size] == theirs[low * size : middle * size]:
            low = middle
        else:
            high = middle - 1
    return low
