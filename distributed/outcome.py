"""What ranks' ends mean, and what is shown of what they write.

Knows: exit codes, signals, which of several failures is the cause. Does not know how ranks are started or
whether they will be again. No MLX in here.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mlxserve.distributed.faults import EXIT_DIVERGED, EXIT_LOST_PEER, Fault
from mlxserve.distributed.fleet import Fleet, News

SETTLE_S = 0.5  # one death causes others: so long their order is not taken for the order of causes
LAST_LINES = 20

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Failure:
    """A fault and the exit code that came with it, 0 where there is none."""

    fault: Fault
    code: int


def failure_of(fleet: Fleet, news: News, *, any_end: bool = False) -> Failure | None:
    """The failure that a rank's end is, if it is one; any_end: an end with 0 is one too."""
    name = fleet.name(news.rank)
    if news.event == "lost":
        return Failure(Fault(news.rank, name, f"was lost: {str(news.fields['reason']).rstrip('.')}"), 0)
    code = int(news.fields.get("code", 0))
    if news.event != "ended" or (code == 0 and not any_end):
        return None
    return Failure(Fault(news.rank, name, ending(code)), code)


def ending(code: int) -> str:
    """How a process ended, as a clause: its exit code, or the signal's name."""
    if code == EXIT_LOST_PEER:
        return "lost its connection to another rank"
    if code == EXIT_DIVERGED:
        return "found its numbers changed"
    if code >= 0:
        return f"ended with exit code {code}"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"


def at_fault(failures: Sequence[Failure]) -> Failure:
    """The cause among failures that came together.

    A signal, a lost host or changed numbers come before exit codes, and those before ranks that only lost
    their connection to another.
    """

    def order(failure: Failure) -> int:
        code = failure.code
        return 2 if code == EXIT_LOST_PEER else 1 if code > 0 and code != EXIT_DIVERGED else 0

    return min(failures, key=order)


class Scribe:
    """What ranks write. Of rank 0 it passes if `first_is_ours`; the rest of standard error is kept for when
    a rank fails. verbose: all of it is shown, each line with its rank.
    """

    def __init__(self, fleet: Fleet, say: Say, *, verbose: bool, first_is_ours: bool) -> None:
        self.say = say
        self._fleet, self._verbose, self._first_is_ours = fleet, verbose, first_is_ours
        self._rest = [""] * fleet.size
        self._kept: list[deque[str]] = [deque(maxlen=LAST_LINES) for _ in range(fleet.size)]

    def write(self, news: News) -> None:
        """Take in one piece of output."""
        text, stream = news.fields["text"], news.fields["stream"]
        if news.rank == 0 and self._first_is_ours:
            out = sys.stdout if stream == "stdout" else sys.stderr
            out.write(text)
            out.flush()
        elif stream == "stderr" or self._verbose:
            self._keep(news.rank, text)

    def _keep(self, rank: int, text: str) -> None:
        *lines, self._rest[rank] = (self._rest[rank] + text).split("\n")
        self._kept[rank].extend(lines)
        if self._verbose:
            for line in lines:
                self.say(f"[{self._fleet.name(rank)}] {line}")

    def last_words(self, rank: int) -> str:
        """The last line that a rank wrote and nobody has seen, as a sentence's end."""
        lines = [line for line in [*self._kept[rank], self._rest[rank]] if line.strip()]
        return f" It wrote last: {lines[-1].strip()}" if lines else ""
