"""How fast a split model would decode: closed formulas, with their error.

Knows: bytes to be read, bandwidths, and what a message between ranks costs. Nothing here was measured on
Macs by this program; against figures that others published the formulas err by up to 35 %, so every result
is a range and is called an estimate.

    tensor    t = bytes a rank / (eta * bandwidth) + layers * c + 2 * layers * alpha
    pipeline  t = sum over stages of bytes / (eta * bandwidth) + layers * c + 1.3 ms * stages

Bytes are those that one token reads: of experts the chosen ones, of an embedding nothing, and the K/V of
the context. c is what a layer of experts costs beside its bytes, alpha one reduction of a small array.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlxserve.distributed.facts import Facts, Load, bytes_read
from mlxserve.distributed.hosts import Host
from mlxserve.distributed.split import Split

ETA_DENSE, ETA_EXPERTS = 0.75, 0.9  # of the published bandwidth
EXPERT_LAYER_S = 150e-6
REDUCTION_S = {"rdma": 31e-6, "tcp": 0.94e-3}
REDUCTIONS_A_LAYER = 2
HANDOVER_S = 1.3e-3  # hidden states from one stage of a pipeline to the next, over TCP
ERROR = 0.35


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens a second of one sequence; the true value is expected between `low` and `high`."""

    tokens_per_s: float

    @property
    def low(self) -> float:
        return self.tokens_per_s * (1 - ERROR)

    @property
    def high(self) -> float:
        return self.tokens_per_s * (1 + ERROR)

    def __str__(self) -> str:
        return f"{_short(self.low)} to {_short(self.high)}"


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 20 else f"{value:.1f}"


def eta(facts: Facts) -> float:
    """The share of the published bandwidth that reading weights reaches."""
    return ETA_EXPERTS if facts.has_experts else ETA_DENSE


def layer_seconds(facts: Facts) -> float:
    """What a layer costs beside the bytes it reads."""
    return EXPERT_LAYER_S if facts.has_experts else 0.0


def decode_seconds(
    facts: Facts, split: Split, hosts: Sequence[Host], link: str = "tcp", context: int = 0, kv_bits: int = 16
) -> float | None:
    """Seconds for one token of one sequence with `context` tokens before it; None where a bandwidth lacks."""
    loads, kv = rank_loads(facts, split, context, kv_bits)
    times = []
    for host, load, kv_bytes in zip(hosts, loads, kv):
        if host.bandwidth is None:
            return None
        times.append((bytes_read(load) + kv_bytes) / (eta(facts) * host.bandwidth))
    total = facts.layers * layer_seconds(facts)
    if split.size == 1:
        return total + times[0]
    if split.mode == "tensor":
        return total + max(times) + REDUCTIONS_A_LAYER * facts.layers * REDUCTION_S[link]
    return total + sum(times) + HANDOVER_S * split.size


def decode_speed(
    facts: Facts, split: Split, hosts: Sequence[Host], link: str = "tcp", context: int = 0, kv_bits: int = 16
) -> Speed | None:
    """`decode_seconds` as tokens a second."""
    seconds = decode_seconds(facts, split, hosts, link, context, kv_bits)
    return None if seconds is None else Speed(1 / seconds)


def rank_loads(facts: Facts, split: Split, context: int, kv_bits: int = 16) -> tuple[list[Load], list[int]]:
    """For each rank its weights, and its bytes of K/V for one sequence of `context` tokens."""
    if split.mode == "tensor":
        load, kv = facts.tensor_load(split.size), facts.kv_bytes(context, size=split.size, kv_bits=kv_bits)
        return [load] * split.size, [kv] * split.size
    stages = [split.layers_of(rank) for rank in range(split.size)]
    return (
        [facts.stage_load(stage) for stage in stages],
        [facts.kv_bytes(context, stage, kv_bits=kv_bits) for stage in stages],
    )
