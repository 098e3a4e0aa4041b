"""What can go wrong between ranks, as errors that name the rank, its machine and the way out.

Knows: words, HTTP statuses and exit codes. Does not know how a fault is noticed.

MlxServeError
├── LaunchFailed      exit 69   the ranks could not be started
│   ├── HostUnreachable   exit 68   no connection, or no mlxserve at its other end
│   └── Mismatch          exit 76   ranks that differ: a version, a plan, a file's tensor
└── EngineStopped
    └── RankFailed    exit 70   a rank died, stood still or computed with other numbers
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mlxserve.errors import EngineStopped, MlxServeError

# How a rank's process ends, beside 0 and signals: the launcher reads from it who was at fault.
EXIT_LOST_PEER = 75  # another rank went away; this one was sound
EXIT_DIVERGED = 65  # its numbers are not the ones it loaded
EXIT_REFUSED = 76  # it could not begin: its own error was sent


class LaunchFailed(MlxServeError):
    http_status = 503
    exit_code = 69
    code = "launch_failed"


class HostUnreachable(LaunchFailed):
    exit_code = 68
    code = "host_unreachable"


class Mismatch(LaunchFailed):
    exit_code = 76
    code = "ranks_differ"


class RankFailed(EngineStopped):
    code = "rank_failed"


@dataclass(frozen=True, slots=True)
class Fault:
    """One rank's failure. what: a clause that goes on after its name, such as "was killed by SIGKILL"."""

    rank: int
    name: str
    what: str

    @property
    def sentence(self) -> str:
        """For people: who, on which host, and what."""
        return f"{self.name[0].upper()}{self.name[1:]} {self.what}."


def encode_error(error: MlxServeError) -> dict[str, Any]:
    """An error as plain values: its class's name and what it carries."""
    return {"kind": type(error).__name__, "facts": dict(vars(error))}


def decode_error(values: Mapping[str, Any]) -> MlxServeError:
    """The error that another process met, of the same class where this one knows it."""
    kinds = {kind.__name__: kind for kind in _descendants(MlxServeError)}
    kind = kinds.get(str(values["kind"]), EngineStopped)
    error = kind.__new__(kind, values["facts"]["message"])
    vars(error).update(values["facts"])
    return error


def _descendants(kind: type[MlxServeError]) -> Iterator[type[MlxServeError]]:
    for child in kind.__subclasses__():
        yield child
        yield from _descendants(child)
