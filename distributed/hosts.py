"""Which machines there are: a hostfile in mlx.launch's form with our extra keys, or words such as 192GB:m3-ultra.

Knows: the file's keys, memory sizes as Macs name them, and what Apple publishes of each chip. Does not know
models, and connects to nobody.

The form is mlx.launch's (https://ml-explore.github.io/mlx/build/html/usage/distributed.html): a list of hosts, or
an object {"backend", "envs", "hosts"}; a host has "ssh", "ips" and "rdma". Ours besides: "name", "memory"
("192GB"), "chip" ("m3-ultra") or "bandwidth" (GB/s), "python" and "folder".
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from mlxserve.config import GIB
from mlxserve.errors import UsageError

USABLE_SHARE = 0.75  # of a Mac's memory; about what Metal recommends as its working set
_MEMORY = re.compile(r"(\d+(?:\.\d+)?)\s*(?:g|gb|gib)?", re.IGNORECASE)
_SPEC = re.compile(r"(?:(?P<name>[\w.-]+)=)?(?:(?P<count>\d+)x)?(?P<memory>[^:x=]+)(?::(?P<chip>[^:=]+))?")
_KEYS = {"ssh", "ips", "rdma", "name", "memory", "chip", "bandwidth", "python", "folder"}
_FILE_KEYS = {"backend", "envs", "hosts"}
BACKENDS = ("", "any", "ring", "jaccl", "jaccl-ring", "mpi", "nccl")


@dataclass(frozen=True, slots=True)
class Chip:
    """bandwidth: bytes a second as Apple publishes them. flops: multiply-adds count two, half precision, peak."""

    bandwidth: float
    flops: float


# The largest GPU of each kind; a smaller one is written as its bandwidth in GB/s, e.g. 128GB:410.
CHIPS: dict[str, Chip] = {
    "m1": Chip(68.25e9, 2.6e12),
    "m1-pro": Chip(200e9, 5.3e12),
    "m1-max": Chip(400e9, 10.6e12),
    "m1-ultra": Chip(800e9, 21.2e12),
    "m2": Chip(100e9, 3.6e12),
    "m2-pro": Chip(200e9, 6.8e12),
    "m2-max": Chip(400e9, 13.6e12),
    "m2-ultra": Chip(800e9, 27.2e12),
    "m3": Chip(100e9, 3.5e12),
    "m3-pro": Chip(150e9, 6.4e12),
    "m3-max": Chip(400e9, 14.2e12),
    "m3-ultra": Chip(819e9, 28.4e12),
    "m4": Chip(120e9, 4.3e12),
    "m4-pro": Chip(273e9, 9.2e12),
    "m4-max": Chip(546e9, 18.4e12),
}
FLOPS_PER_BYTE = 34.0  # of a chip that is not in the table: the median of those that are


@dataclass(frozen=True, slots=True)
class Host:
    """One machine. memory_bytes and bandwidth (bytes a second) are None where nobody said.

    addresses: for data, the first is tried first. ssh: how to reach it, "" for this machine. rdma: the
    device towards each other rank, None to itself; empty where there is no RDMA. python: its interpreter,
    folder: where its models lie; None for the same as here.
    """

    name: str
    addresses: tuple[str, ...] = ()
    memory_bytes: int | None = None
    bandwidth: float | None = None
    flops: float | None = None
    chip: str | None = None
    ssh: str = ""
    rdma: tuple[Any, ...] = ()
    python: str | None = None
    folder: str | None = None

    @property
    def usable_bytes(self) -> int:
        """Bytes for weights, K/V and work. Raises UsageError where the memory is not known."""
        if self.memory_bytes is None:
            raise UsageError(
                f"The memory of {self.name} is not known; write it in the hostfile "
                f'("memory": "192GB") or give --host {self.name}=192GB:m3-ultra.',
                param="memory",
            )
        return int(USABLE_SHARE * self.memory_bytes)


@dataclass(frozen=True, slots=True)
class Hostfile:
    """hosts in the order of their ranks; backend "" leaves the choice to MLX; envs as NAME=value."""

    hosts: tuple[Host, ...]
    backend: str = ""
    envs: tuple[str, ...] = field(default=())

    @property
    def link(self) -> str:
        """ "rdma" where every host names its RDMA devices and no other backend is asked for, else "tcp"."""
        devices = len(self.hosts) > 1 and all(host.rdma for host in self.hosts)
        return "rdma" if devices and self.backend in ("", "any", "jaccl", "jaccl-ring") else "tcp"


def read_hostfile(path: Path | str) -> Hostfile:
    """A hostfile with every key checked. Raises UsageError, naming file, host and key."""
    path = Path(path).expanduser()
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"The hostfile {path} cannot be read: {error.strerror}.", param="hosts") from error
    except ValueError as error:
        raise UsageError(f"The hostfile {path} is no JSON: {error}.", param="hosts") from error
    if isinstance(data, list):
        data = {"hosts": data}
    if not isinstance(data, dict) or not isinstance(data.get("hosts"), list) or not data["hosts"]:
        raise UsageError(
            f"The hostfile {path} must be a list of hosts, or an object with one.", param="hosts"
        )
    _refuse_unknown(data, _FILE_KEYS, str(path))
    hosts = tuple(_host(entry, rank, f"{path}, host {rank}") for rank, entry in enumerate(data["hosts"]))
    _refuse_twins(hosts, str(path))
    return Hostfile(hosts, _backend(data, path), tuple(_strings(data.get("envs", []), "envs", str(path))))


def _backend(data: Mapping[str, Any], path: Path) -> str:
    backend = data.get("backend", "")
    if backend not in BACKENDS:
        known = ", ".join(BACKENDS[1:])
        raise UsageError(f"{path}: backend is one of {known}, not {backend!r}.", param="backend")
    return str(backend)


def _host(entry: Any, rank: int, where: str) -> Host:
    if not isinstance(entry, dict):
        raise UsageError(f"{where}: a host is an object with ssh and ips, not {entry!r}.", param="hosts")
    _refuse_unknown(entry, _KEYS, where)
    ssh = entry.get("ssh", "")
    addresses = tuple(_strings(entry.get("ips", []), "ips", where))
    texts = {key: entry.get(key) for key in ("name", "chip", "python", "folder")}
    if any(text is not None and not isinstance(text, str) for text in (ssh, *texts.values())):
        raise UsageError(f"{where}: ssh, name, chip, python and folder are words.", param="hosts")
    if not ssh and not addresses and not texts["name"]:
        raise UsageError(f"{where}: ssh, ips or name must say which machine it is.", param="ssh")
    host = Host(
        name=texts["name"] or ssh.rpartition("@")[2] or addresses[0],
        addresses=addresses,
        memory_bytes=None if entry.get("memory") is None else parse_memory(entry["memory"], where),
        ssh=ssh,
        rdma=_rdma(entry.get("rdma", []), rank, where),
        python=texts["python"],
        folder=texts["folder"],
    )
    host = with_chip(host, texts["chip"], where) if texts["chip"] else host
    if entry.get("bandwidth") is not None:
        host = with_chip(host, str(entry["bandwidth"]), where)
    return host


def _rdma(devices: Any, rank: int, where: str) -> tuple[Any, ...]:
    if not isinstance(devices, list):
        raise UsageError(f"{where}: rdma is a list with a device for each host.", param="rdma")
    if devices and (rank >= len(devices) or devices[rank] is not None):
        raise UsageError(
            f"{where}: rdma needs an entry for each host, and null for the host itself (entry {rank}).",
            param="rdma",
        )
    return tuple(tuple(device) if isinstance(device, list) else device for device in devices)


def _strings(value: Any, key: str, where: str) -> list[str]:
    if not isinstance(value, list) or any(not isinstance(item, str) or not item for item in value):
        raise UsageError(f"{where}: {key} is a list of words, not {value!r}.", param=key)
    return value


def _refuse_unknown(entry: Mapping[str, Any], known: set[str], where: str) -> None:
    for key in entry:
        if key not in known:
            near = get_close_matches(str(key), sorted(known), n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(sorted(known))}."
            raise UsageError(f"{where}: there is no key {key!r}; {hint}", param=str(key))


def _refuse_twins(hosts: tuple[Host, ...], where: str) -> None:
    names = [host.name for host in hosts]
    twin = next((name for name in names if names.count(name) > 1), None)
    if twin is not None and any(not host.addresses for host in hosts if host.name == twin):
        raise UsageError(
            f"{where}: {twin} stands there twice without ips; give each a name or an address.", param="hosts"
        )


def parse_memory(value: Any, where: str = "memory") -> int:
    """Bytes of a memory size as Macs have it: "192GB", "192 GiB" and 192 all mean 192 x 2**30."""
    match = _MEMORY.fullmatch(str(value).strip()) if isinstance(value, str | int | float) else None
    if match is None or isinstance(value, bool) or float(match[1]) <= 0:
        raise UsageError(f"{where}: {value!r} is no memory size; write 192GB.", param="memory")
    return int(float(match[1]) * GIB)


def with_chip(host: Host, word: str, where: str = "host") -> Host:
    """The host with the figures of a chip ("m3-ultra"), or of a bandwidth in GB/s ("410")."""
    key = word.strip().lower().removeprefix("apple").strip(" -").replace(" ", "-").replace("_", "-")
    if key in CHIPS:
        return replace(host, chip=key, bandwidth=CHIPS[key].bandwidth, flops=CHIPS[key].flops)
    try:
        bandwidth = float(key.removesuffix("gb/s")) * 1e9
    except ValueError:
        bandwidth = 0.0
    if not 1e9 <= bandwidth < 1e14:
        near = get_close_matches(key, CHIPS, n=1)
        hint = f"did you mean {near[0]}?" if near else "write m3-ultra, or its bandwidth in GB/s (819)."
        raise UsageError(f"{where}: {word!r} is no chip known here; {hint}", param="chip")
    flops = host.flops if host.flops is not None else bandwidth * FLOPS_PER_BYTE
    return replace(host, bandwidth=bandwidth, flops=flops)


def parse_host(text: str, first: int = 0) -> list[Host]:
    """`192GB:m3-ultra`, `192GB:819`, `studio=192GB:m3-ultra` or `4x96GB:m3-ultra`; named mac0, mac1, … else.

    first: the number of the first name. Raises UsageError for anything else.
    """
    match = _SPEC.fullmatch(text.strip())
    if match is None or (match["count"] is not None and not 1 <= int(match["count"]) <= 64):
        raise UsageError(
            f"{text!r} is no host; write 192GB:m3-ultra, studio=192GB:m3-ultra or 4x96GB:m3-ultra.",
            param="host",
        )
    host = Host(name="", memory_bytes=parse_memory(match["memory"], f"--host {text}"))
    if match["chip"]:
        host = with_chip(host, match["chip"], f"--host {text}")
    count = int(match["count"] or 1)
    if match["name"] and count == 1:
        return [replace(host, name=match["name"])]
    stem, start = (match["name"], 0) if match["name"] else ("mac", first)
    return [replace(host, name=f"{stem}{start + number}") for number in range(count)]


def parse_hosts(texts: list[str] | tuple[str, ...]) -> list[Host]:
    """All of several `--host` words, in the order of their ranks. Raises UsageError for two of one name."""
    hosts: list[Host] = []
    for text in texts:
        hosts += parse_host(text, len(hosts))
    names = [host.name for host in hosts]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"There are two hosts named {name}; give them different names.", param="host")
    return hosts


def local_hosts(count: int) -> list[Host]:
    """This machine as `count` ranks on the loopback address, each with its part of the memory."""
    if count < 1:
        raise UsageError(f"At least 1 local rank is needed, not {count}.", param="n")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return [
        Host(name=f"local{rank}", addresses=("127.0.0.1",), memory_bytes=memory // count)
        for rank in range(count)
    ]
