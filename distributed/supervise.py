"""The supervisor: brings ranks up, watches them, and starts them all anew when one fails.

    launcher (this; no MLX)
    ├── front       `serve` or `generate` itself: HTTP, terminals, requests; outlives every rank
    └── agent …     one a host, over ssh or local
        └── rank …  loads its part; rank 0 has the engine, and a connection from the front

Knows: epochs, faults, how often to try again. Does not know requests: the front keeps those and sends them
again. A rank cannot be replaced alone, since MLX's groups are fixed: an epoch is one generation of all
ranks. Its token is drawn anew, so that nothing left of an old epoch can speak to a new one.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import time
from collections import deque
from dataclasses import asdict, dataclass, replace
from typing import Any

from mlxserve.distributed.faults import (
    EXIT_DIVERGED,
    EXIT_LOST_PEER,
    Fault,
    HostUnreachable,
    RankFailed,
    decode_error,
    encode_error,
)
from mlxserve.distributed.fleet import Fleet, News
from mlxserve.distributed.handshake import Identity, same_model
from mlxserve.distributed.heartbeat import Beat, Monitor
from mlxserve.distributed.member import TOKEN, Job
from mlxserve.distributed.outcome import SETTLE_S, Failure, Scribe, at_fault, failure_of
from mlxserve.distributed.wire import LINE_LIMIT, decode, encode
from mlxserve.errors import MlxServeError

RESTARTS = 5
RESTART_WINDOW_S = 600.0
STOP_S = 10.0
FIRST_PAUSE_S = 1.0  # before ranks that did not come up are tried again; doubled each time
MEMBER = ("-m", "mlxserve.distributed.member")


@dataclass(frozen=True, slots=True)
class Rules:
    """deadline_s: silence or standstill that is a fault. sweep_s: within which every weight is looked at
    again. restarts: how often within RESTART_WINDOW_S ranks are started anew before giving up."""

    split: str | None = None
    backend: str = "ring"
    deadline_s: float = 10.0
    sweep_s: float = 300.0
    restarts: int = RESTARTS


class Supervisor:
    """Answers one front. `failed` is why it gave up, if it did."""

    def __init__(self, fleet: Fleet, front: socket.socket, rules: Rules, scribe: Scribe) -> None:
        self.fleet, self.rules = fleet, rules
        self.failed: MlxServeError | None = None
        self._front, self._scribe = front, scribe
        self._wanted = asyncio.Event()
        self._up = self._was_up = False  # this epoch's ranks; those of any
        self._order: dict[str, Any] = {}
        self._faults_s: deque[float] = deque(maxlen=rules.restarts + 1)

    async def run(self) -> None:
        """Do what the front asks until its connection ends."""
        reader, writer = await asyncio.open_connection(sock=self._front, limit=LINE_LIMIT)
        self._writer = writer
        serving: asyncio.Task[None] | None = None
        try:
            while line := await reader.readline():
                message = decode(line) or {}
                if message.get("do") == "open" and (serving is None or serving.done()):
                    self._order = message
                    self._wanted.set()
                    serving = asyncio.ensure_future(self._serve())
                elif message.get("do") == "close" and serving is not None:
                    await self._end(serving)
        finally:
            if serving is not None:
                await self._end(serving)
            writer.close()

    async def _end(self, serving: asyncio.Task[None]) -> None:
        """The front is done: its connection to rank 0 has ended, and the ranks end with it."""
        self._wanted.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_S if self._up else 0):
                while self.fleet.running:
                    await asyncio.sleep(0.05)
        serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await serving
        await self.fleet.kill(0)

    def _tell(self, **message: Any) -> None:
        self._writer.write(encode(message))

    # -- epochs --------------------------------------------------------------------------------------------

    async def _serve(self) -> None:
        """Epoch after epoch, until the front closes or the ranks cannot be restored.

        Ranks that never were up are not tried again, nor such as differ or refuse; a rank that failed or a
        host that was lost is, each time after a longer pause.
        """
        pause_s = 0.0
        while self._wanted.is_set():
            self._up = False
            try:
                await self._epoch()
            except (RankFailed, HostUnreachable) as error:
                self._faults_s.append(time.monotonic())
                if not self._wanted.is_set():
                    return
                if not self._was_up or self._exhausted:
                    self._give_up(error)
                    return
                self._scribe.say(f"{error.message} All ranks are started anew.")
                self._tell(event="down", reason=error.message)
                pause_s = 0.0 if self._up else 2 * pause_s + FIRST_PAUSE_S
                await asyncio.sleep(pause_s)
            except MlxServeError as error:
                self._give_up(error)
                return

    async def _epoch(self) -> None:
        """One generation of ranks, from start to fault. Raises what kept it from coming up, or RankFailed."""
        await self.fleet.open()
        self.fleet.next_epoch()
        try:
            await self._come_up()
            self._up = self._was_up = True
            while True:
                await self._next()
        finally:
            await self.fleet.kill(0)

    @property
    def _exhausted(self) -> bool:
        """Whether there were too many faults of late."""
        recent = [at for at in self._faults_s if time.monotonic() - at < RESTART_WINDOW_S]
        return len(recent) > self.rules.restarts

    def _give_up(self, error: MlxServeError) -> None:
        self.failed = error
        if self._was_up:
            self._scribe.say(f"{error.message} Giving up.")
        self._tell(event="failed", error=encode_error(error))

    # -- coming up -----------------------------------------------------------------------------------------

    async def _come_up(self) -> None:
        """Start every rank, compare what they are, let them join, and tell the front."""
        token = secrets.token_hex(32)
        ports = await self.fleet.free_ports(extra=2)
        jobs = [self._job(rank, ports) for rank in range(self.fleet.size)]
        for job in jobs:
            await self._start(job, token, ports)
        self.monitor = Monitor(self.fleet.names, self.rules.deadline_s)
        said = await self._all_say("identity")
        same_model(self.fleet.names, [Identity.read(each) for each in said])
        for rank in range(self.fleet.size):
            self.fleet.tell(rank, {"do": "join"})
        ups = await self._all_say("up")
        self._tell(event="up", **ups[0], requests=jobs[0].requests, token=token)

    def _job(self, rank: int, ports: list[list[int]]) -> Job:
        """Ports of a rank: one for each of its addresses, one for the other ranks, one for the front."""
        fleet, order, host = self.fleet, self._order, self.fleet.hosts[rank]
        return Job(
            rank=rank,
            split=order["split"],
            backend=self.rules.backend,
            model=order["model"],
            folder=host.folder or "",
            load=order["load"],
            engine=order["engine"],
            addresses=[[fleet.addresses(r)[0], ports[r][-2]] for r in range(fleet.size)],
            requests=[fleet.addresses(0)[0], ports[0][-1]],
            sharing=sum(fleet.link(r) is fleet.link(rank) for r in range(fleet.size)),
            deadline_s=self.rules.deadline_s,
            sweep_s=self.rules.sweep_s,
        )

    async def _start(self, job: Job, token: str, ports: list[list[int]]) -> None:
        fleet = self.fleet
        env, files = fleet.meeting(job.rank, ports, self.rules.backend)
        argv = [fleet.python(job.rank), *MEMBER]
        await fleet.start(job.rank, argv, {**env, TOKEN: token}, files, control=True)
        fleet.tell(job.rank, {"do": "job", "job": asdict(job)})

    async def _all_say(self, what: str) -> list[Any]:
        """What every rank says under this word, by rank. Raises RankFailed, or what a rank refuses with."""
        found: dict[int, Any] = {}
        while len(found) < self.fleet.size:
            rank, message = await self._next()
            if message is None:
                continue
            if "refused" in message:
                error = decode_error(message["refused"])
                error.message = f"{self.fleet.name(rank)}: {error.message}"
                raise error
            if what in message:
                found[rank] = message[what]
        return [found[rank] for rank in range(self.fleet.size)]

    # -- watching ------------------------------------------------------------------------------------------

    async def _next(self) -> tuple[int, dict[str, Any] | None]:
        """The next message of a rank, after what is judged here. Raises RankFailed."""
        try:
            news = await asyncio.wait_for(self.fleet.news.get(), self.monitor.every_s)
        except TimeoutError:
            news = None
        if news is not None and news.event == "wrote":
            self._scribe.write(news)
        elif news is not None and news.event == "said":
            message = news.fields["message"]
            if "beat" in message:
                self.monitor.hear(news.rank, Beat(**message["beat"]))
            elif (failure := self._said_failure(news)) is None:
                return news.rank, message
            else:
                raise await self._failed(failure)
        elif news is not None and (ended := failure_of(self.fleet, news, any_end=True)) is not None:
            raise await self._failed(ended)
        self._judge()
        return -1, None

    def _judge(self) -> None:
        fault = self.monitor.fault()
        if fault is not None:
            raise RankFailed(fault.sentence)

    def _said_failure(self, news: News) -> Failure | None:
        """A failure in a rank's own words."""
        message, name = news.fields["message"], self.fleet.name(news.rank)
        if "diverged" in message:
            what = f"no longer has the weights it loaded: {message['diverged']} has changed in its memory"
            return Failure(Fault(news.rank, name, f"{what}; {self.monitor.did(news.rank)}"), EXIT_DIVERGED)
        if "lost" in message:
            what = f"lost another rank: {str(message['reason']).rstrip('.')}"
            return Failure(Fault(news.rank, name, what), EXIT_LOST_PEER)
        if "failed" in message:
            rank = int(message.get("of", news.rank))
            what = f"failed: {str(message['failed']).rstrip('.')}"
            return Failure(Fault(rank, self.fleet.name(rank), what), 1)
        return None

    async def _failed(self, first: Failure) -> RankFailed:
        """The cause among what fails in the same moment."""
        failures = [first]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_S):
                while self.fleet.running:
                    news = await self.fleet.news.get()
                    if news.event == "wrote":
                        self._scribe.write(news)
                    elif news.event == "said":
                        failures += filter(None, [self._said_failure(news)])
                    elif (ended := failure_of(self.fleet, news, any_end=True)) is not None:
                        failures.append(ended)
        cause = at_fault(failures).fault
        did = self.monitor.did(cause.rank)
        what = cause.what if did in cause.what else f"{cause.what}; {did}"
        return RankFailed(replace(cause, what=what).sentence)
