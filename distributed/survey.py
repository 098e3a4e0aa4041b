"""`mlxserve doctor --hosts`: every host of a hostfile asked at once, and what keeps them from working together.

Knows: reachability, versions, ports between hosts, memory, RDMA. Does not know models, nor MLX.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from mlxserve.distributed.fleet import Fleet
from mlxserve.distributed.handshake import same_versions
from mlxserve.distributed.hosts import Hostfile
from mlxserve.errors import MlxServeError

# A hostfile's memory may differ from what a host tells by so much before it is worth a word.
_MEMORY_SLACK = 0.02


@dataclass(slots=True)
class Survey:
    """facts: one mapping a host, in the order of ranks. problems keep ranks from starting; advice does not."""

    facts: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)


def survey(hostfile: Hostfile) -> Survey:
    """Ask every host. What cannot be asked is a problem in the answer, not an error."""
    return asyncio.run(_survey(hostfile))


async def _survey(hostfile: Hostfile) -> Survey:
    found = Survey()
    async with Fleet(hostfile) as fleet:
        ranks = await _reach(fleet, found)
        await _look(fleet, ranks, found)
        _compare(fleet, ranks, found)
        if len(ranks) == fleet.size > 1:
            await _ports(fleet, found)
    return found


async def _reach(fleet: Fleet, found: Survey) -> list[int]:
    """Ranks whose hosts answer."""
    errors = await fleet.connect()
    for rank, host in enumerate(fleet.hosts):
        error = errors.get(rank)
        addresses = ", ".join(host.addresses) or "none"
        found.facts.append({"host": host.name, "ssh": host.ssh or "here", "addresses": addresses})
        if error is not None and error.message not in found.problems:
            found.problems.append(error.message)
    return [rank for rank in range(fleet.size) if rank not in errors]


async def _look(fleet: Fleet, ranks: list[int], found: Survey) -> None:
    looks = await asyncio.gather(*(fleet.link(rank).call("look") for rank in ranks), return_exceptions=True)
    for rank, look in zip(ranks, looks):
        if isinstance(look, MlxServeError):
            found.problems.append(look.message)
        elif isinstance(look, BaseException):
            raise look
        else:
            versions = fleet.link(rank).versions
            found.facts[rank].update(versions.plain() if versions else {})
            found.facts[rank].update({key: value for key, value in look.items() if key != "rdma_hint"})
            _advise(fleet, rank, look, found)


def _advise(fleet: Fleet, rank: int, look: dict[str, Any], found: Survey) -> None:
    host, memory = fleet.hosts[rank], int(look["memory_bytes"])
    if look["rdma_hint"]:
        found.advice.append(f"{host.name}: {look['rdma_hint']}")
    if host.rdma and not look["rdma"]:
        found.problems.append(f"{host.name} has RDMA devices in the hostfile, and none in its system.")
    wanted = host.memory_bytes or memory
    if not fleet.local and abs(wanted - memory) > _MEMORY_SLACK * memory:
        found.advice.append(f"{host.name} has {memory} bytes of memory; the hostfile says {wanted}.")


def _compare(fleet: Fleet, ranks: list[int], found: Survey) -> None:
    versions = [(fleet.name(rank), fleet.link(rank).versions) for rank in ranks]
    known = [(name, version) for name, version in versions if version is not None]
    try:
        same_versions([name for name, _ in known], [version for _, version in known])
    except MlxServeError as error:
        found.problems.append(error.message)


async def _ports(fleet: Fleet, found: Survey) -> None:
    """Each host connects to each other one on a free port."""
    try:
        await fleet.free_ports()
    except MlxServeError as error:
        found.problems.append(error.message)
