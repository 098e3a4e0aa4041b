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

from dataclasses import dataclass

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

    def __str__(self) -> str:
        return f"{self.name} {self.what}."
