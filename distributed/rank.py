"""One rank's place among the others: its number, its part of the model, its connections.

Knows: which rank talks to which. Does not know what is said.

    rank 0 ── control ── every other rank
    rank r ── handover ── rank r + 1          (a pipeline's only)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mlxserve.distributed.channel import Channel, Listener, Purpose, close_all, connect
from mlxserve.distributed.split import Split
from mlxserve.errors import EngineStopped

if TYPE_CHECKING:
    import mlx.core as mx

Address = tuple[str, int]


def _nothing(*_: object) -> None:
    return None


@dataclass(slots=True)
class RankContext:
    """What a rank needs to take part.

    group: MLX's group of all ranks, for a tensor split. control: to rank 0 (None on rank 0 itself).
    followers: on rank 0, to ranks 1, 2, …. before, after: to the neighbouring stages of a pipeline.
    gathered_bytes: on rank 0, up to which size sums are gathered (collective.py); None measures it.
    sharing: ranks on this host, which share its memory. patience_s: how long rank 0 waits for the tokens of a
    pipeline's step; None where a supervisor watches instead.
    on_step: called with the number of each step that is complete on this rank, from any thread.
    on_fault: called on rank 0, from any thread, with a rank and a sentence when that rank fails or leaves.
    """

    rank: int
    split: Split
    group: mx.distributed.Group | None = None
    control: Channel | None = None
    followers: Sequence[Channel] = ()
    before: Channel | None = None
    after: Channel | None = None
    gathered_bytes: int | None = None
    sharing: int = 1
    patience_s: float | None = None
    on_step: Callable[[int], None] = field(default=_nothing)
    on_fault: Callable[[int, str], None] = field(default=_nothing)

    @property
    def size(self) -> int:
        return self.split.size

    @property
    def last(self) -> bool:
        return self.rank == self.size - 1

    def close(self) -> None:
        """End every connection."""
        close_all([self.control, *self.followers, self.before, self.after])


def join(
    rank: int,
    split: Split,
    addresses: Sequence[Address],
    token: bytes,
    *,
    timeout_s: float,
    group: mx.distributed.Group | None = None,
) -> RankContext:
    """Connect this rank with those it talks to; every rank calls it, in any order.

    addresses[r] is where rank r listens, as seen from here; this rank listens at addresses[rank] (of a
    tensor split only rank 0 does). token: the secret that all ranks were started with.
    Raises PeerLost or EngineStopped, naming the rank, if not all are there within `timeout_s`.
    """
    context = RankContext(rank, split, group)
    pipeline = split.mode == "pipeline"
    listener = Listener(addresses[rank], token) if rank == 0 or pipeline else None
    try:
        if rank == 0 and listener is not None:
            context.followers = _gather(listener, split.size, timeout_s)
        else:
            context.control = connect(addresses[0], token, rank=rank, peer=0, timeout_s=timeout_s)
        if pipeline and not context.last:
            context.after = connect(
                addresses[rank + 1],
                token,
                rank=rank,
                peer=rank + 1,
                purpose=Purpose.HANDOVER,
                timeout_s=timeout_s,
            )
        if pipeline and rank > 0 and listener is not None:
            context.before = _expect(listener, rank - 1, timeout_s)
    except BaseException:
        context.close()
        raise
    finally:
        close_all([listener])
    return context


def _gather(listener: Listener, size: int, timeout_s: float) -> list[Channel]:
    """Control channels of ranks 1 to size - 1, in their order."""
    found: dict[int, Channel] = {}
    while len(found) < size - 1:
        try:
            channel = listener.accept(timeout_s)
        except EngineStopped:
            close_all(list(found.values()))
            missing = ", ".join(str(rank) for rank in range(1, size) if rank not in found)
            raise EngineStopped(f"Rank {missing} did not connect within {timeout_s:g} s.") from None
        if channel.purpose is not Purpose.CONTROL or not 0 < channel.rank < size or channel.rank in found:
            channel.close()
            continue
        found[channel.rank] = channel
    return [found[rank] for rank in range(1, size)]


def _expect(listener: Listener, rank: int, timeout_s: float) -> Channel:
    """The handover channel of one rank."""
    while True:
        channel = listener.accept(timeout_s)
        if channel.purpose is Purpose.HANDOVER and channel.rank == rank:
            return channel
        channel.close()
