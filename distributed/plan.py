"""Who holds what: the choice of a split for given machines, with its reason, or what would be needed instead.

Knows: facts about a model, hosts and a context; pure arithmetic. Does not know MLX, files on disk or the
network, and starts nothing.

A rank fits if its weights, the K/V of the wanted contexts and 3 GB to work in stay below 0.75 of its
memory. GB are 10^9 bytes here, as downloads are counted; only a Mac's own "192 GB" are GiB.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import accumulate
from typing import Any

from mlxserve.config import GIB
from mlxserve.distributed.estimate import Speed, decode_speed, rank_loads
from mlxserve.distributed.facts import Facts, load_bytes
from mlxserve.distributed.hosts import Host
from mlxserve.distributed.split import Mode, Split
from mlxserve.errors import DoesNotFit, UsageError

WORK_BYTES = 3 * 10**9  # activations, buffers and the program itself
DEFAULT_CONTEXT = 32_768
SHORTEST_CONTEXT = 1_024  # below this a smaller context is no advice
MAC_SIZES = (16, 24, 32, 36, 48, 64, 96, 128, 192, 256, 512)  # memory that Macs are sold with, GiB
MORE_HOSTS = 8


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
        return self.bytes + self.kv_bytes + WORK_BYTES

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


@dataclass(frozen=True, slots=True)
class Plan:
    """A split for a model on hosts. It may not fit: `require` says so, `advice` what would help.

    digest: names model, split, quantisation and context; ranks with another digest must not meet.
    bits: of weights that are quantised while loading, None as stored. active: parameters a token uses.
    """

    model: str
    parameters: int
    active: float
    total_bytes: int
    form: str
    bits: int | None
    split: Split
    shares: tuple[RankShare, ...]
    context: int
    sequences: int
    kv_bits: int
    link: str
    reason: str
    options: tuple[Option, ...]
    advice: tuple[str, ...]
    notes: tuple[str, ...]
    digest: str

    def rank(self, number: int) -> RankShare:
        """The part of one rank. Raises UsageError for a number that is none."""
        if not 0 <= number < len(self.shares):
            raise UsageError(f"The plan has ranks 0 to {len(self.shares) - 1}, not {number}.", param="rank")
        return self.shares[number]

    @property
    def fits(self) -> bool:
        return all(share.fits for share in self.shares)

    def require(self) -> None:
        """Raise DoesNotFit, naming the fullest rank and what would help, unless it fits."""
        if self.fits:
            return
        worst = min(self.shares, key=lambda share: share.spare_bytes)
        raise DoesNotFit(
            f"{self.model} as {self.split} needs {gb(worst.needed_bytes)} on {worst.host.name}, which has "
            f"{gb(worst.usable_bytes)} for it: short by {gb(-worst.spare_bytes)}. "
            f"What would do: {'; '.join(self.advice) or 'more memory'}.",
            needed_bytes=worst.needed_bytes,
            available_bytes=worst.usable_bytes,
        )

    def to_json(self) -> str:
        """Everything in the plan; `from_json` reads it back."""
        return json.dumps(self.as_dict(), indent=1)

    def as_dict(self) -> dict[str, Any]:
        """The plan as plain values, with what follows from them (fits, needed and spare bytes, ranges)."""
        values = asdict(self)
        values["split"] = str(self.split)
        for entry, share in zip(values["shares"], self.shares):
            entry |= {
                "needed_bytes": share.needed_bytes,
                "spare_bytes": share.spare_bytes,
                "fits": share.fits,
            }
        for entry, option in zip(values["options"], self.options):
            speed = option.speed
            entry |= {"fits": option.fits, "range": None if speed is None else [speed.low, speed.high]}
        return {**values, "fits": self.fits, "estimate": "tokens a second are estimates, ±35 %"}

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan that `to_json` wrote. Raises UsageError for anything else."""
        try:
            values = json.loads(text)
            layers = values["shares"][-1]["layers"][1]
            values["split"] = Split.parse(values["split"], layers)
            values["shares"] = tuple(_share_from(entry) for entry in values["shares"])
            values["options"] = tuple(Option(**_known(Option, entry)) for entry in values["options"])
            values |= {key: tuple(values[key]) for key in ("advice", "notes")}
            return cls(**_known(cls, values))
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise UsageError(f"This is no plan of mlxserve: {error!r}.", param="plan") from error

    def __str__(self) -> str:
        from mlxserve.distributed.show import plan_text

        return plan_text(self)

    def _repr_html_(self) -> str:
        from mlxserve.distributed.show import plan_html

        return plan_html(self)


def _known(kind: Any, values: dict[str, Any]) -> dict[str, Any]:
    return {item.name: values[item.name] for item in fields(kind)}


def _share_from(entry: dict[str, Any]) -> RankShare:
    host = _known(Host, entry["host"])
    host |= {"addresses": tuple(host["addresses"]), "rdma": tuple(_frozen(part) for part in host["rdma"])}
    values = _known(RankShare, entry) | {"host": Host(**host), "layers": tuple(entry["layers"])}
    values["files"] = None if entry["files"] is None else tuple(entry["files"])
    return RankShare(**values)


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def gb(nbytes: float) -> str:
    """Bytes as '150.7 GB' of 10^9."""
    return f"{nbytes / 1e9:.1f} GB"


def make_plan(
    facts: Facts,
    hosts: Sequence[Host],
    context: int = DEFAULT_CONTEXT,
    mode: Mode | None = None,
    bounds: Sequence[int] | None = None,
    *,
    sequences: int = 1,
    kv_bits: int = 16,
    link: str = "tcp",
) -> Plan:
    """Choose a split of the model over `hosts`, rank by rank in their order.

    context, sequences: so many sequences of so many tokens are to fit. mode: only this kind. bounds: a
    pipeline cut exactly so, as `Split.bounds`. link: "rdma" or "tcp" between the hosts.
    Raises UsageError for what cannot be: no host, unknown memory, a split that names other ranks or layers,
    or a mode that the model does not allow. What could be but does not fit is a plan that says so.
    """
    wanted = _Wanted(facts, tuple(hosts), context, sequences, kv_bits, link)
    candidates = wanted.candidates(mode, tuple(bounds) if bounds else None)
    options = [wanted.option(split, link) for split in candidates]
    possible = [(s, o) for s, o in zip(candidates, options) if o.refusal is None]
    if not possible:
        raise UsageError(
            f"{facts.name} cannot be divided so: {'; '.join(str(o.refusal) for o in options)}.", param="split"
        )
    split, reason = _choose(possible, [o for o in options if o.refusal], explicit=bool(mode or bounds))
    shares = wanted.shares(split)
    fits = all(share.fits for share in shares)
    return Plan(
        model=facts.name,
        parameters=facts.parameters,
        active=facts.active_parameters,
        total_bytes=facts.total_bytes,
        form=facts.form,
        bits=facts.bits,
        split=split,
        shares=shares,
        context=context,
        sequences=sequences,
        kv_bits=kv_bits,
        link=link,
        reason=reason,
        options=(*options, *wanted.over_rdma(candidates)),
        advice=() if fits else tuple(wanted.advice()),
        notes=tuple(wanted.notes(split)),
        digest=_digest(facts, split, context, sequences, kv_bits),
    )


def _digest(facts: Facts, split: Split, *settings: int) -> str:
    words = [facts.digest, str(facts.bits), str(split), *map(str, settings)]
    return hashlib.sha256(":".join(words).encode()).hexdigest()[:32]


def _choose(
    possible: list[tuple[Split, Option]], refused: list[Option], *, explicit: bool
) -> tuple[Split, str]:
    """The fastest that fits, else the one that is least short; with the reason in a sentence."""
    if len(possible) == 1:
        split, option = possible[0]
        if explicit:
            return split, "as asked"
        return split, f"the only way: {refused[0].refusal}" if refused else "one host needs no split"
    fitting = [pair for pair in possible if pair[1].fits]
    if not fitting:
        split, option = max(possible, key=lambda pair: pair[1].spare_bytes)
        return split, f"nothing fits; {split} is least short, by {gb(-option.spare_bytes)}"
    if len(fitting) == 1:
        other = next(option for split, option in possible if split is not fitting[0][0])
        return fitting[0][0], f"{other.split} is short by {gb(-other.spare_bytes)}"
    if any(option.full is None for _, option in fitting):
        chosen = max(fitting, key=lambda pair: pair[1].spare_bytes)
        return chosen[0], "it leaves most memory free; without bandwidths of the hosts no speed is known"
    (split, best), (_, other) = sorted(fitting, key=lambda pair: -(pair[1].full or 0.0))[:2]
    return split, f"both fit; an estimated {best.full:.1f} tokens/s against {other.full:.1f} of {other.split}"


@dataclass(frozen=True)
class _Wanted:
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
                    fill = max(filled, (sums.stage(start, end) + WORK_BYTES) / host.usable_bytes)
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
    """Bytes of layers [0, n) for each n, and of the ends."""

    layers: list[int]
    first: int
    last: int
    ends: int

    def stage(self, start: int, end: int) -> int:
        total = len(self.layers) - 1
        nbytes = self.layers[end] - self.layers[start]
        nbytes += self.first if start == 0 else 0
        nbytes += self.last if end == total else 0
        return nbytes + (self.ends if start == 0 or end == total else 0)


def _prefix_sums(facts: Facts, context: int, sequences: int, kv_bits: int) -> _Sums:
    each = [
        sequences * facts.kv_bytes(context, range(layer, layer + 1), kv_bits=kv_bits)
        for layer in range(facts.layers)
    ]
    outside = {"first": 0, "last": 0, "ends": 0}
    for tensor in facts.tensors:
        if tensor.layer is None:
            outside[tensor.place] += tensor.nbytes
        else:
            each[tensor.layer] += tensor.nbytes
    return _Sums([0, *accumulate(each)], **outside)
