"""`mlxserve launch`: from a hostfile and a command to an exit code.

Knows: how a command runs on every rank, what is shown of each, what its end means. Serving, where ranks are
restarted and requests survive them, is supervise.py. No MLX in here: this process must be able to act while
ranks hang.

The exit code is 0 only if every rank ended with 0. A rank that fails takes the others with it: collectives
would wait for it for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections import deque
from collections.abc import Callable, Sequence

from mlxserve.distributed.faults import EXIT_DIVERGED, EXIT_LOST_PEER, Fault, RankFailed
from mlxserve.distributed.fleet import Fleet, News, choose_backend
from mlxserve.distributed.hosts import Host, Hostfile

SETTLE_S = 0.5  # one death causes others: so long their order is not taken for the order of causes
GRACE_S = 5.0
LAST_LINES = 20
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

Say = Callable[[str], None]
Argv = Callable[[Host], list[str]]


def run_everywhere(hostfile: Hostfile, argv: Argv, *, backend: str | None, verbose: bool, say: Say) -> int:
    """Run a command on every rank; rank 0's output is ours. `argv(host)` is its command line there.

    Returns 0, or 128 + n after signal n. Raises HostUnreachable, Mismatch, or RankFailed (its exit code
    replaced by the rank's own, where it has one).
    """
    return asyncio.run(_everywhere(hostfile, argv, choose_backend(hostfile, backend), verbose, say))


async def _everywhere(hostfile: Hostfile, argv: Argv, backend: str, verbose: bool, say: Say) -> int:
    with stop_signals() as stop:
        async with Fleet(hostfile) as fleet:
            await fleet.open()
            fleet.next_epoch()
            await _start(fleet, argv, backend)
            watch = asyncio.ensure_future(_watch(fleet, verbose, say))
            stopped = asyncio.ensure_future(stop.get())
            await asyncio.wait([watch, stopped], return_when=asyncio.FIRST_COMPLETED)
            if watch.done():
                stopped.cancel()
                watch.result()
                return 0
            await _stop(fleet, stop, stopped.result(), watch)
            return 128 + stopped.result()


async def _start(fleet: Fleet, argv: Argv, backend: str) -> None:
    ports = await fleet.free_ports()
    for rank, host in enumerate(fleet.hosts):
        env, files = fleet.meeting(rank, ports, backend)
        await fleet.start(rank, argv(host), env, files, control=False)


async def _stop(fleet: Fleet, stop: asyncio.Queue[int], number: int, watch: asyncio.Task[None]) -> None:
    """End the ranks in their own time; a second signal does not wait."""
    killing = asyncio.ensure_future(fleet.kill(GRACE_S))
    again = asyncio.ensure_future(stop.get())
    await asyncio.wait([killing, again], return_when=asyncio.FIRST_COMPLETED)
    if not killing.done():
        await fleet.kill(0)
        await killing
    again.cancel()
    watch.cancel()
    with contextlib.suppress(asyncio.CancelledError, RankFailed):
        await watch


async def _watch(fleet: Fleet, verbose: bool, say: Say) -> None:
    """Until all ranks have ended. Raises RankFailed for the one at fault, after ending the others."""
    scribe = Scribe(fleet, verbose, say)
    while True:
        news = await fleet.news.get()
        if news.event == "wrote":
            scribe.write(news)
        elif failed := _failure(fleet, news):
            failures = [failed, *await _settle(fleet, scribe)]
            await fleet.kill(0)
            raise _failed(fleet, failures, scribe)
        elif not fleet.running:
            return


async def _settle(fleet: Fleet, scribe: Scribe) -> list[tuple[Fault, int]]:
    """What else happens in the moment after a first failure."""
    found = []
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(SETTLE_S):
            while fleet.running:
                news = await fleet.news.get()
                if news.event == "wrote":
                    scribe.write(news)
                elif failed := _failure(fleet, news):
                    found.append(failed)
    return found


def _failure(fleet: Fleet, news: News) -> tuple[Fault, int] | None:
    """A rank's fault and its exit code, where the news is one."""
    name = fleet.name(news.rank)
    if news.event == "lost":
        return Fault(news.rank, name, f"was lost: {str(news.fields['reason']).rstrip('.')}"), 0
    code = news.fields.get("code", 0) if news.event == "ended" else 0
    return (Fault(news.rank, name, ending(code)), code) if code else None


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


def at_fault(failures: Sequence[tuple[Fault, int]]) -> tuple[Fault, int]:
    """The cause among failures that came together: a signal or a lost host before exit codes, and those
    before ranks that only lost their connection to another."""

    def order(item: tuple[Fault, int]) -> int:
        code = item[1]
        return 2 if code == EXIT_LOST_PEER else 1 if code > 0 else 0

    return min(failures, key=order)


def _failed(fleet: Fleet, failures: Sequence[tuple[Fault, int]], scribe: Scribe) -> RankFailed:
    fault, code = at_fault(failures)
    error = RankFailed(f"{str(fault)[0].upper()}{str(fault)[1:]}{scribe.last_words(fault.rank)}")
    if code:
        error.exit_code = code if code > 0 else 128 - code
    return error


class Scribe:
    """What ranks write: rank 0's passes, the others' standard error is kept for when they fail.

    verbose: all of it is shown, each line with its rank.
    """

    def __init__(self, fleet: Fleet, verbose: bool, say: Say) -> None:
        self._fleet, self._verbose, self._say = fleet, verbose, say
        self._rest = [""] * fleet.size
        self._kept: list[deque[str]] = [deque(maxlen=LAST_LINES) for _ in range(fleet.size)]

    def write(self, news: News) -> None:
        text = news.fields["text"]
        if news.rank == 0:
            out = sys.stdout if news.fields["stream"] == "stdout" else sys.stderr
            out.write(text)
            out.flush()
            return
        if news.fields["stream"] == "stdout" and not self._verbose:
            return
        *lines, self._rest[news.rank] = (self._rest[news.rank] + text).split("\n")
        self._kept[news.rank].extend(lines)
        if self._verbose:
            for line in lines:
                self._say(f"[{self._fleet.name(news.rank)}] {line}")

    def last_words(self, rank: int) -> str:
        """The last line that a rank other than 0 wrote on standard error, as a sentence's end."""
        lines = [line for line in [*self._kept[rank], self._rest[rank]] if line.strip()]
        return f" It wrote last: {lines[-1].strip()}" if lines else ""


class stop_signals:
    """While open, SIGINT, SIGTERM and SIGHUP arrive as numbers in a queue."""

    def __enter__(self) -> asyncio.Queue[int]:
        self._loop = asyncio.get_running_loop()
        found: asyncio.Queue[int] = asyncio.Queue()
        for number in STOP_SIGNALS:
            self._loop.add_signal_handler(number, found.put_nowait, int(number))
        return found

    def __exit__(self, *_: object) -> None:
        for number in STOP_SIGNALS:
            self._loop.remove_signal_handler(number)
