"""One rank's part of a plan, and a split that was looked at, in bytes and tokens a second.

Knows: what a rank needs and whether it fits. Does not know how a part is chosen (`fitting`), nor MLX.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlxserve.distributed.estimate import Speed
from mlxserve.distributed.hosts import Host

WORK_BYTES = 3 * 10**9  # activations, buffers and the program itself, of a large model
PROGRAM_BYTES = 5 * 10**8  # the program alone


@dataclass(frozen=True, slots=True)
class RankShare:
    """One rank's part. bytes: of its weights. layers: [first, behind the last). files: None if unknown."""

    rank: int
    host: Host
    bytes: int
    layers: tuple[int, int]
    kv_bytes: int
    usable_bytes: int
    files: tuple[str, ...] | None = None
    file_bytes: int | None = None

    @property
    def needed_bytes(self) -> int:
        return self.bytes + self.kv_bytes + work_bytes(self.bytes)

    @property
    def spare_bytes(self) -> int:
        """What stays free; below zero, what is short."""
        return self.usable_bytes - self.needed_bytes

    @property
    def fits(self) -> bool:
        return self.spare_bytes >= 0


@dataclass(frozen=True, slots=True)
class Option:
    """A split that was looked at. spare_bytes: of the fullest rank. empty, full: tokens a second of one
    sequence at its start and with the whole context; None without bandwidths. refusal: why it cannot be."""

    split: str
    link: str
    spare_bytes: int = 0
    empty: float | None = None
    full: float | None = None
    refusal: str | None = None

    @property
    def fits(self) -> bool:
        return self.refusal is None and self.spare_bytes >= 0

    @property
    def speed(self) -> Speed | None:
        return None if self.full is None else Speed(self.full)


def work_bytes(weight_bytes: float) -> int:
    """What a rank needs beside weights and K/V: 3 GB, but of a small model no more than its weights again."""
    return int(min(WORK_BYTES, PROGRAM_BYTES + weight_bytes))


def gb(nbytes: float) -> str:
    """Bytes as '150.7 GB' of 10^9."""
    return f"{nbytes / 1e9:.1f} GB"
