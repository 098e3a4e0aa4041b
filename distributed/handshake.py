"""Before ranks connect: are they running the same program on the same model?

Knows: what must be equal on all ranks, and how to say which rank differs in what. Does not know how the
facts travel. MLX's collectives carry no headers: ranks that differ hang or compute nonsense, so every
difference is refused here, by name. No MLX in here.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Self

from mlxserve import __version__
from mlxserve.distributed.faults import Mismatch

# So many differences are written out; the rest is counted.
SHOWN = 5


@dataclass(frozen=True, slots=True)
class Versions:
    """What a host runs. Packages that are absent are ''."""

    mlxserve: str
    mlx: str
    mlx_lm: str
    python: str

    @classmethod
    def here(cls) -> Self:
        """Of this process."""
        minor = ".".join(platform.python_version_tuple()[:2])
        return cls(__version__, _package("mlx"), _package("mlx-lm"), minor)

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        """From a message; what it lacks is ''."""
        return cls(**{item.name: str(values.get(item.name, "")) for item in fields(cls)})

    def plain(self) -> dict[str, str]:
        return asdict(self)


def _package(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


@dataclass(frozen=True, slots=True)
class Identity:
    """What a rank is about to run: digests in hexadecimal.

    split: as text, layers of each rank included. tensors: a digest for every tensor, or part of one, whose
    bytes this rank has read, by name; two ranks are compared in the names that both have.
    """

    split: str
    dtype: str
    config: str
    tokenizer: str
    tensors: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        """From a message."""
        return cls(**{item.name: values[item.name] for item in fields(cls)})

    def plain(self) -> dict[str, Any]:
        return {**asdict(self), "tensors": dict(self.tensors)}


_WORDS = {
    "mlxserve": "mlxserve",
    "mlx": "mlx",
    "mlx_lm": "mlx-lm",
    "python": "Python",
}
_THINGS = {
    "split": "another split of the model",
    "dtype": "another data type",
    "config": "another config.json",
    "tokenizer": "another tokenizer",
}


def same_versions(names: Sequence[str], found: Sequence[Versions]) -> None:
    """Raise Mismatch, naming host, package and both versions, unless all run the same; names[i] runs found[i]."""
    problems = []
    for name, theirs in zip(names[1:], found[1:]):
        for key, word in _WORDS.items():
            wanted, got = getattr(found[0], key), getattr(theirs, key)
            if wanted != got:
                problems.append(
                    f"{name} has {_version(word, got)}, and {names[0]} has {_version(word, wanted)}"
                )
    _refuse(problems, "Install the same versions on every host")


def _version(word: str, number: str) -> str:
    return f"{word} {number}" if number else f"no {word}"


def same_model(names: Sequence[str], found: Sequence[Identity]) -> None:
    """Raise Mismatch, naming rank and tensor (or file), unless all ranks are about to run the same model.

    A tensor is compared with the first rank that has its bytes too.
    """
    problems = []
    holder: dict[str, int] = {}
    for rank, mine in enumerate(found):
        if rank:
            problems += [
                f"{names[rank]} has {thing} than {names[0]}"
                for key, thing in _THINGS.items()
                if getattr(mine, key) != getattr(found[0], key)
            ]
        for tensor, digest in mine.tensors.items():
            first = holder.setdefault(tensor, rank)
            if found[first].tensors[tensor] != digest:
                problems.append(f"{names[rank]} has another tensor {tensor} than {names[first]}")
    _refuse(problems, "Copy the model's files from one host to the others")


def _refuse(problems: list[str], way_out: str) -> None:
    if not problems:
        return
    more = f"; and {len(problems) - SHOWN} more differences" if len(problems) > SHOWN else ""
    raise Mismatch(f"The ranks differ: {'; '.join(problems[:SHOWN])}{more}. {way_out}.")
