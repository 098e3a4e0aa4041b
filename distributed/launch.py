"""`mlxserve launch`: from a hostfile and a command to an exit code.

Knows: how a command runs on every rank (`run_everywhere`), or in front of ranks that serve its model
(`run_front`); signals; exit codes. Watching and restarting ranks that serve is supervise.py. No MLX in here:
this process must be able to act while ranks hang.

The exit code is 0 only if every rank ended with 0, or could be restored. A rank of a program that fails
takes the others with it: collectives would wait for it for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from types import TracebackType

from mlxserve.distributed.faults import RankFailed
from mlxserve.distributed.fleet import Fleet
from mlxserve.distributed.hosts import Host, Hostfile
from mlxserve.distributed.outcome import SETTLE_S, Failure, Say, Scribe, at_fault, failure_of
from mlxserve.distributed.supervise import Rules, Supervisor

GRACE_S = 5.0
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# What a front is told by its environment: the socket to here, the hosts with their memory, the wanted split.
LAUNCH = "MLXSERVE_LAUNCH"

Argv = Callable[[Host], list[str]]


def run_everywhere(hostfile: Hostfile, argv: Argv, *, backend: str, verbose: bool, say: Say) -> int:
    """Run a command on every rank; rank 0's output is ours. `argv(host)` is its command line there.

    Returns 0, or 128 + n after signal n. Raises HostUnreachable, Mismatch, or RankFailed (its exit code
    replaced by the rank's own, where it has one).
    """
    return asyncio.run(_everywhere(hostfile, argv, backend, verbose, say))


async def _everywhere(hostfile: Hostfile, argv: Argv, backend: str, verbose: bool, say: Say) -> int:
    with StopSignals() as stop:
        async with Fleet(hostfile) as fleet:
            await fleet.open()
            fleet.next_epoch()
            await _start(fleet, argv, backend)
            scribe = Scribe(fleet, say, verbose=verbose, first_is_ours=True)
            watch = asyncio.ensure_future(_watch(fleet, scribe))
            stopped = asyncio.ensure_future(stop.get())
            await asyncio.wait([watch, stopped], return_when=asyncio.FIRST_COMPLETED)
            if watch.done():
                stopped.cancel()
                watch.result()
                return 0
            await _stop(fleet, stop, watch)
            return 128 + stopped.result()


async def _start(fleet: Fleet, argv: Argv, backend: str) -> None:
    ports = await fleet.free_ports()
    for rank, host in enumerate(fleet.hosts):
        env, files = fleet.meeting(rank, ports, backend)
        await fleet.start(rank, argv(host), env, files, control=False)


async def _stop(fleet: Fleet, stop: asyncio.Queue[int], watch: asyncio.Task[None]) -> None:
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


async def _watch(fleet: Fleet, scribe: Scribe) -> None:
    """Until all ranks have ended. Raises RankFailed for the one at fault, after ending the others."""
    while True:
        news = await fleet.news.get()
        if news.event == "wrote":
            scribe.write(news)
        elif failed := failure_of(fleet, news):
            failures = [failed, *await _settle(fleet, scribe)]
            await fleet.kill(0)
            raise _failed(at_fault(failures), scribe)
        elif not fleet.running:
            return


async def _settle(fleet: Fleet, scribe: Scribe) -> list[Failure]:
    """What else happens in the moment after a first failure."""
    found = []
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(SETTLE_S):
            while fleet.running:
                news = await fleet.news.get()
                if news.event == "wrote":
                    scribe.write(news)
                elif failed := failure_of(fleet, news):
                    found.append(failed)
    return found


def _failed(failure: Failure, scribe: Scribe) -> RankFailed:
    error = RankFailed(failure.fault.sentence + scribe.last_words(failure.fault.rank))
    if failure.code:
        error.exit_code = failure.code if failure.code > 0 else 128 - failure.code
    return error


# -- a front, and ranks that serve its model ------------------------------------------------------------------


def run_front(hostfile: Hostfile, argv: Sequence[str], rules: Rules, *, verbose: bool, say: Say) -> int:
    """Run one of our commands here, its model on the ranks of a hostfile.

    Returns the command's exit code, 128 + n if signal n killed it; where that is 0 although ranks were lost
    for good, their error's. Raises HostUnreachable or Mismatch before anything runs.
    """
    return asyncio.run(_front(hostfile, argv, rules, verbose, say))


async def _front(hostfile: Hostfile, argv: Sequence[str], rules: Rules, verbose: bool, say: Say) -> int:
    with StopSignals() as stop:
        async with Fleet(hostfile) as fleet:
            await fleet.open()
            scribe = Scribe(fleet, say, verbose=verbose, first_is_ours=False)
            ours, theirs = socket.socketpair()
            with theirs:
                hosts = [asdict(host) for host in await fleet.measured_hosts()]
                setting = {"fd": theirs.fileno(), "hosts": hosts, "split": rules.split, "link": hostfile.link}
                env = {**os.environ, LAUNCH: json.dumps(setting)}
                front = await asyncio.create_subprocess_exec(*argv, env=env, pass_fds=(theirs.fileno(),))
            passing = asyncio.ensure_future(_pass_signals(stop, front))
            supervisor = Supervisor(fleet, ours, rules, scribe)
            supervising = asyncio.ensure_future(supervisor.run())
            code = await front.wait()
            passing.cancel()
            await supervising
    if code == 0 and supervisor.failed is not None:
        return supervisor.failed.exit_code
    return code if code >= 0 else 128 - code


async def _pass_signals(stop: asyncio.Queue[int], front: asyncio.subprocess.Process) -> None:
    """Hand stop signals to the front, which drains and ends. Ctrl-C at a terminal has reached it already."""
    while True:
        number = await stop.get()
        if not (number == signal.SIGINT and _in_foreground()):
            with contextlib.suppress(ProcessLookupError):
                front.send_signal(number)


def _in_foreground() -> bool:
    try:
        return os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except (OSError, ValueError):
        return False


class StopSignals:
    """While open, SIGINT, SIGTERM and SIGHUP arrive as numbers in a queue."""

    def __enter__(self) -> asyncio.Queue[int]:
        self._loop = asyncio.get_running_loop()
        found: asyncio.Queue[int] = asyncio.Queue()
        for number in STOP_SIGNALS:
            self._loop.add_signal_handler(number, found.put_nowait, int(number))
        return found

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number in STOP_SIGNALS:
            self._loop.remove_signal_handler(number)
