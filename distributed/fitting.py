"""Which splits there are of a model over hosts, what each rank would hold, and what would make it fit.

Knows: facts about a model, hosts, contexts; the best cut of a pipeline by memory. Does not know which split
is taken in the end (`plan`), nor MLX.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from mlxserve.config import GIB
from mlxserve.distributed.estimate import decode_speed, rank_loads
from mlxserve.distributed.facts import Facts, load_bytes
from mlxserve.distributed.hosts import Host
from mlxserve.distributed.shares import Option, RankShare, work_bytes
from mlxserve.distributed.split import Mode, Split
from mlxserve.errors import UsageError

SHORTEST_CONTEXT = 1_024  # below this a smaller context is no advice
MAC_SIZES = (16, 24, 32, 36, 48, 64, 96, 128, 192, 256, 512)  # memory that Macs are sold with, GiB
MORE_HOSTS = 8


@dataclass(frozen=True)
class Wanted:
    """What is to be fitted, and the arithmetic on it."""

    facts: Facts
    hosts: tuple[Host, ...]
    context: int
    sequences: int
    kv_bits: int
    link: str

    def __post_init__(self) -> None:
        if not self.hosts:
            raise UsageError("A plan needs at least one host.", param="hosts")
        if self.context < 1 or self.sequences < 1:
            raise UsageError("context and sequences must be at least 1.", param="context")
        if self.link not in ("rdma", "tcp"):
            raise UsageError(f"link is rdma or tcp, not {self.link!r}.", param="link")

    def candidates(self, mode: Mode | None, bounds: tuple[int, ...] | None) -> list[Split]:
        """The splits to look at: as asked, or by tensors and by layers over all hosts."""
        size, layers = len(self.hosts), self.facts.layers
        if bounds is not None:
            if bounds[0] != 0 or bounds[-1] != layers or any(a >= b for a, b in zip(bounds, bounds[1:])):
                raise UsageError(f"{list(bounds)} does not divide {layers} layers in order.", param="split")
            if len(bounds) != size + 1:
                raise UsageError(
                    f"The split names {len(bounds) - 1} ranks, and there are {size} hosts.", param="split"
                )
            return [Split("pipeline", size, bounds)]
        if size == 1:
            return [Split.tensor(1)] if mode != "pipeline" else [Split.pipeline([layers])]
        found = [Split.tensor(size)] if mode != "pipeline" else []
        if mode != "tensor" and size <= layers:
            found.append(Split.pipeline(self.layers_by_memory(self.hosts)))
        if not found:
            raise UsageError(f"{layers} layers cannot be divided over {size} hosts.", param="split")
        return found

    def layers_by_memory(self, hosts: Sequence[Host]) -> list[int]:
        """How many layers each host gets so that the fullest is as little filled as can be.

        Exact: over hosts in order, best[n] is the least possible fill of the fullest with n layers placed.
        """
        layers = self.facts.layers
        sums = _prefix_sums(self.facts, self.context, self.sequences, self.kv_bits)
        best: list[tuple[float, list[int]]] = [(0.0, []), *[_nowhere()] * layers]
        for rank, host in enumerate(hosts):
            least, most = rank + 1, layers - (len(hosts) - rank - 1)
            grown = [_nowhere()] * (layers + 1)
            for end in range(least, most + 1) if rank < len(hosts) - 1 else [layers]:
                for start in range(rank, end):
                    filled, held = best[start]
                    fill = max(filled, sums.needed(start, end) / host.usable_bytes)
                    if fill < grown[end][0]:
                        grown[end] = (fill, [*held, end - start])
            best = grown
        return best[layers][1]

    def shares(self, split: Split, hosts: Sequence[Host] | None = None) -> tuple[RankShare, ...]:
        loads, kv = rank_loads(self.facts, split, self.context, self.kv_bits)
        made = []
        for rank, host in enumerate(hosts or self.hosts):
            layers = split.layers_of(rank) if split.mode == "pipeline" else None
            files = self.facts.files_of(layers)
            held = layers or range(self.facts.layers)
            share = RankShare(
                rank=rank,
                host=host,
                bytes=load_bytes(loads[rank]),
                layers=(held.start, held.stop),
                kv_bytes=self.sequences * kv[rank],
                usable_bytes=host.usable_bytes,
            )
            if self.facts.files:
                names, size = tuple(file.name for file in files), sum(file.nbytes for file in files)
                share = replace(share, files=names, file_bytes=size)
            made.append(share)
        return tuple(made)

    def option(self, split: Split, link: str) -> Option:
        """What there is to say of one split; a pipeline's channels are TCP whatever the link."""
        link = link if split.mode == "tensor" else "tcp"
        refusal = self.facts.refusal(split.size) if split.mode == "tensor" else None
        if refusal:
            return Option(str(split), link, refusal=refusal)
        spare = min(share.spare_bytes for share in self.shares(split))
        speeds = [
            decode_speed(self.facts, split, self.hosts, link, context, self.kv_bits)
            for context in (0, self.context)
        ]
        empty, full = (speed.tokens_per_s if speed else None for speed in speeds)
        return Option(str(split), link, spare, empty, full)

    def over_rdma(self, candidates: list[Split]) -> list[Option]:
        """What tensor parallelism would reach with the faster link, where the hosts do not have it."""
        tensor = [split for split in candidates if split.mode == "tensor" and split.size > 1]
        if self.link == "rdma" or not tensor:
            return []
        found = self.option(tensor[0], "rdma")
        return [found] if found.refusal is None and found.full is not None else []

    def notes(self, split: Split) -> list[str]:
        found = list(self.facts.notes)
        own = self.facts.own_context
        if own is not None and self.context > own:
            found.append(
                f"The model's own context is {own:,} tokens, fewer than the {self.context:,} planned for."
            )
        if len(self.hosts) > 1:
            alone = [host.name for host in self.hosts if self._fits_alone(host)]
            if alone:
                found.append(f"It fits {' or '.join(alone)} alone; more hosts bring speed and room, not fit.")
        if split.mode == "tensor" and split.size > 1 and len({h.bandwidth for h in self.hosts}) > 1:
            found.append("All ranks of a tensor split wait for the slowest host.")
        return found

    def _fits_alone(self, host: Host) -> bool:
        return all(share.fits for share in self.shares(Split.tensor(1), [host]))

    def _fits(self, hosts: Sequence[Host]) -> bool:
        """True if some split fits these hosts."""
        size = len(hosts)
        splits = [Split.tensor(size)] if self.facts.refusal(size) is None else []
        if 1 < size <= self.facts.layers:
            splits.append(Split.pipeline(self.layers_by_memory(hosts)))
        return any(all(share.fits for share in self.shares(split, hosts)) for split in splits)

    def advice(self) -> list[str]:
        """What would make it fit: less context, more memory, more hosts."""
        found = []
        shorter = self._longest_context()
        if shorter is not None:
            found.append(f"--context {shorter}")
        size = len(self.hosts)
        for memory in MAC_SIZES:
            host = Host(name="", memory_bytes=memory * GIB)
            if self._fits([host] * size):
                found.append(f"{size} x {memory}GB" if size > 1 else f"a Mac with {memory}GB")
                break
        largest = max(self.hosts, key=lambda host: host.usable_bytes)
        for more in range(1, MORE_HOSTS + 1):
            if self._fits([*self.hosts, *[largest] * more]):
                size_gib = (largest.memory_bytes or 0) / GIB
                found.append(f"{more} more host{'s' if more > 1 else ''} with {size_gib:.0f}GB as a pipeline")
                break
        return found

    def _longest_context(self) -> int | None:
        """The longest context, in steps of 1,024 tokens, that fits these hosts; None if none does."""
        low, high = 0, (self.context - 1) // SHORTEST_CONTEXT
        while low < high:
            middle = (low + high + 1) // 2
            if replace(self, context=middle * SHORTEST_CONTEXT)._fits(self.hosts):
                low = middle
            else:
                high = middle - 1
        return low * SHORTEST_CONTEXT or None


def _nowhere() -> tuple[float, list[int]]:
    return float("inf"), []


@dataclass(frozen=True)
class _Sums:
    """Bytes of the layers [0, n) for each n, weights and K/V apart, and of what is on the ends."""

    weights: list[int]
    kv: list[int]
    first: int
    last: int
    ends: int

    def needed(self, start: int, end: int) -> int:
        """What the rank with layers [start, end) needs, as RankShare.needed_bytes."""
        begins, closes = start == 0, end == len(self.kv) - 1
        weights = self.weights[end] - self.weights[start]
        weights += self.first * begins + self.last * closes + self.ends * (begins or closes)
        return weights + self.kv[end] - self.kv[start] + work_bytes(weights)


def _prefix_sums(facts: Facts, context: int, sequences: int, kv_bits: int) -> _Sums:
    kv = [
        sequences * facts.kv_bytes(context, range(layer, layer + 1), kv_bits=kv_bits)
        for layer in range(facts.layers)
    ]
    weights = [0] * facts.layers
    outside = {"first": 0, "last": 0, "ends": 0}
    for tensor in facts.tensors:
        if tensor.layer is None:
            outside[tensor.place] += tensor.nbytes
        else:
            weights[tensor.layer] += tensor.nbytes
    return _Sums([0, *accumulate(weights)], [0, *accumulate(kv)], **outside)
