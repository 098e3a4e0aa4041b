"""All hosts of one launch: their agents, their ranks' processes, and where ranks meet.

Knows: which rank is on which host, what ranks are called in messages, which ports they use. Does not know
what ranks compute or when they should be restarted. No MLX in here.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mlxserve.distributed.faults import HostUnreachable, LaunchFailed
from mlxserve.distributed.handshake import same_versions
from mlxserve.distributed.hosts import Host, Hostfile
from mlxserve.distributed.link import Link, is_local
from mlxserve.errors import MlxServeError, UsageError

LOOPBACK = "127.0.0.1"
BACKENDS = ("ring", "jaccl", "jaccl-ring")


@dataclass(frozen=True, slots=True)
class News:
    """What a rank's process did: event is "said", "wrote", "ended" or "lost" (with its host)."""

    rank: int
    event: str
    fields: dict[str, Any] = field(default_factory=dict)


class Fleet:
    """Agents of a hostfile, rank r being its r-th host. Ranks on one host share its agent.

    An *epoch* is one generation of rank processes; news of earlier ones is dropped. Use as an async context
    manager: leaving ends everything that was started.
    """

    def __init__(self, hostfile: Hostfile) -> None:
        self.hosts = hostfile.hosts
        self.envs = dict(_variable(text) for text in hostfile.envs)
        self.epoch = 0
        self.news: asyncio.Queue[News] = asyncio.Queue()
        self._links: dict[tuple[str, str | None], Link] = {}
        self._running: set[int] = set()

    async def __aenter__(self) -> Fleet:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def size(self) -> int:
        return len(self.hosts)

    @property
    def local(self) -> bool:
        """True where all ranks are on this machine."""
        return all(is_local(host) for host in self.hosts)

    def name(self, rank: int) -> str:
        """A rank in a sentence."""
        return f"rank {rank} ({self.hosts[rank].name})"

    @property
    def names(self) -> list[str]:
        return [self.name(rank) for rank in range(self.size)]

    def python(self, rank: int) -> str:
        """The interpreter of a rank's host: the one that runs here, unless the hostfile names another."""
        return self.hosts[rank].python or sys.executable

    # -- agents --------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Connect to every host that has no living agent, and compare versions.

        Raises HostUnreachable or Mismatch; where several hosts fail, the first one's error.
        """
        for error in (await self.connect()).values():
            raise error
        same_versions(self.names, [self.link(rank).versions for rank in range(self.size)])  # type: ignore[misc]

    async def connect(self) -> dict[int, MlxServeError]:
        """Connect to every host that has no living agent; errors by rank."""
        missing = {
            self._key(rank): host
            for rank, host in enumerate(self.hosts)
            if not ((link := self._links.get(self._key(rank))) and link.alive)
        }
        for key, host in missing.items():
            self._links[key] = Link(host, self._hear)
        opened = [self._links[key].open() for key in missing]
        failed: dict[Any, MlxServeError] = {}
        for key, result in zip(missing, await asyncio.gather(*opened, return_exceptions=True)):
            if isinstance(result, MlxServeError):
                failed[key] = result
            elif isinstance(result, BaseException):
                raise result
        return {rank: failed[key] for rank in range(self.size) if (key := self._key(rank)) in failed}

    async def measured_hosts(self) -> list[Host]:
        """The hosts, with the memory that they tell where the hostfile does not. Raises HostUnreachable."""
        found = []
        for rank, host in enumerate(self.hosts):
            if host.memory_bytes is None:
                look = await self.link(rank).call("look")
                host = replace(host, memory_bytes=int(look["memory_bytes"]))
            found.append(host)
        return found

    def link(self, rank: int) -> Link:
        return self._links[self._key(rank)]

    def _key(self, rank: int) -> tuple[str, str | None]:
        host = self.hosts[rank]
        return ("" if is_local(host) else host.ssh, host.python)

    async def close(self) -> None:
        """End every agent, and with them every process."""
        await asyncio.gather(*(link.close() for link in self._links.values()))

    def _hear(self, link: Link, message: dict[str, Any]) -> None:
        event = message.pop("event", "")
        if event == "lost":
            for rank in range(self.size):
                if self._links.get(self._key(rank)) is link:
                    self._running.discard(rank)
                    self.news.put_nowait(News(rank, "lost", message))
            return
        epoch, _, rank_text = str(message.pop("worker", "")).partition(".")
        if epoch == str(self.epoch):
            rank = int(rank_text)
            if event == "ended":
                self._running.discard(rank)
            self.news.put_nowait(News(rank, event, message))

    # -- ranks ---------------------------------------------------------------------------------------------

    def next_epoch(self) -> int:
        """Forget the news of the processes so far."""
        self.epoch += 1
        self.news = asyncio.Queue()
        self._running.clear()
        return self.epoch

    async def start(
        self, rank: int, argv: Sequence[str], env: dict[str, str], files: dict[str, str], *, control: bool
    ) -> int:
        """Start one rank's process group; its id on its host. Raises LaunchFailed with the reason."""
        pid = await self.link(rank).start(
            f"{self.epoch}.{rank}",
            list(argv),
            env={**self.envs, **env},
            files=files,
            cwd=os.getcwd(),
            control=control,
        )
        self._running.add(rank)
        return pid

    def tell(self, rank: int, message: dict[str, Any]) -> None:
        self.link(rank).tell(f"{self.epoch}.{rank}", message)

    @property
    def running(self) -> frozenset[int]:
        """Ranks whose processes have been started and have not ended."""
        return frozenset(self._running)

    async def kill(self, grace_s: float) -> None:
        """End this epoch's processes: SIGTERM, and SIGKILL after `grace_s`; at once for 0."""
        calls = [
            self.link(rank).call("kill", worker=f"{self.epoch}.{rank}", grace_s=grace_s)
            for rank in sorted(self._running)
        ]
        await asyncio.gather(*calls, return_exceptions=True)

    # -- where they meet -----------------------------------------------------------------------------------

    def addresses(self, rank: int) -> tuple[str, ...]:
        """Under which the other ranks reach this one. Raises UsageError where the hostfile has none."""
        host = self.hosts[rank]
        if self.local:
            return host.addresses or (LOOPBACK,)
        named = host.addresses or ((host.ssh.rpartition("@")[2],) if not is_local(host) else ())
        if not named:
            raise UsageError(
                f'{host.name} needs "ips" in the hostfile: the others connect to it.', param="ips"
            )
        return named

    async def free_ports(self, extra: int = 0) -> list[list[int]]:
        """By rank: a free port for each of its addresses, and `extra` more; every other rank reaches them.

        Raises HostUnreachable that names both ranks and the address where one cannot.
        """
        try:
            ports = [
                await self.link(rank).call("ports", count=len(self.addresses(rank)) + extra, address="")
                for rank in range(self.size)
            ]
            await asyncio.gather(*(self._probe(rank, ports) for rank in range(self.size)))
        finally:
            releases = (link.call("release") for link in self._links.values())
            await asyncio.gather(*releases, return_exceptions=True)
        return ports

    async def _probe(self, rank: int, ports: list[list[int]]) -> None:
        """A connection from `rank` to every address of every other rank."""
        for other in range(self.size):
            if other == rank:
                continue
            targets = list(zip(self.addresses(other), ports[other]))
            failed = await self.link(rank).call("probe", targets=targets)
            if failed:
                where = f"{failed[0]['address']} port {failed[0]['port']}"
                raise HostUnreachable(
                    f"{self.name(rank)} cannot reach {self.name(other)} at {where}: {failed[0]['reason']}. "
                    "Check the addresses in the hostfile, and the firewall of both."
                )

    def meeting(
        self, rank: int, ports: list[list[int]], backend: str
    ) -> tuple[dict[str, str], dict[str, str]]:
        """Environment and files with which MLX's `init` finds the other ranks.

        Ring: https://ml-explore.github.io/mlx/build/html/usage/distributed.html. A single rank needs nothing.
        Raises LaunchFailed where a backend's devices are missing from the hostfile.
        """
        if self.size == 1:
            return {}, {}
        if backend == "ring":
            spots = [
                [f"{address}:{port}" for address, port in zip(self.addresses(r), ports[r])]
                for r in range(self.size)
            ]
            return {"MLX_RANK": str(rank)}, {"MLX_HOSTFILE": json.dumps(spots)}
        if any(len(host.rdma) != self.size for host in self.hosts):
            raise LaunchFailed(
                f'The backend {backend} needs "rdma" with {self.size} devices for each host in the hostfile; '
                "'mlx.distributed_config --backend jaccl' writes one."
            )
        env = {"MLX_RANK": str(rank), "MLX_JACCL_COORDINATOR": f"{self.addresses(0)[0]}:{ports[0][0]}"}
        if backend == "jaccl-ring":
            env["MLX_JACCL_RING"] = "1"
        return env, {"MLX_IBV_DEVICES": json.dumps([host.rdma for host in self.hosts])}


def choose_backend(hostfile: Hostfile, asked: str | None) -> str:
    """What was asked for, else the hostfile's, else RDMA where all hosts have it, else the ring.

    Raises UsageError for a backend that is not ring, jaccl or jaccl-ring.
    """
    backend = asked or hostfile.backend
    if backend in ("", "any"):
        return "jaccl" if hostfile.link == "rdma" else "ring"
    if backend not in BACKENDS:
        raise UsageError(f"mlxserve connects ranks by {', '.join(BACKENDS)}, not {backend}.", param="backend")
    return backend


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise UsageError(f"envs in the hostfile are NAME=value, not {text!r}.", param="envs")
    return name, value
