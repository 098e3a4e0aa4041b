"""Who holds what: the choice of a split for given machines, with its reason, or what would be needed instead.

Knows: facts about a model, hosts and a context; pure arithmetic. Does not know MLX, files on disk or the
network, and starts nothing.

A rank fits if its weights, the K/V of the wanted contexts and 3 GB to work in (less for a small model, see
`shares.work_bytes`) stay below 0.75 of its memory. GB are 10^9 bytes here, as downloads are counted; only a Mac's own
"192 GB" are GiB.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from mlxserve.distributed.facts import Facts
from mlxserve.distributed.fitting import Wanted
from mlxserve.distributed.hosts import Host
from mlxserve.distributed.shares import Option, RankShare, gb
from mlxserve.distributed.split import Mode, Split
from mlxserve.errors import DoesNotFit, UsageError

DEFAULT_CONTEXT = 32_768


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
    wanted = Wanted(facts, tuple(hosts), context, sequences, kv_bits, link)
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
