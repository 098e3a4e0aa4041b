"""Hostfiles: mlx.launch's own form is read, ours adds to it, and every mistake is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mlxserve.config import GIB
from mlxserve.distributed.hosts import (
    CHIPS,
    local_hosts,
    parse_host,
    parse_hosts,
    parse_memory,
    read_hostfile,
)
from mlxserve.errors import UsageError

PLAIN = [
    {"ssh": "mac-a.local", "ips": ["192.168.2.1"], "rdma": [None, "rdma_en5"]},
    {"ssh": "me@mac-b.local", "ips": ["192.168.2.2"], "rdma": ["rdma_en5", None]},
]


def write(folder: Path, data: Any) -> Path:
    path = folder / "hosts.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return path


def test_a_hostfile_of_mlx_launch_is_read_as_mlx_reads_it(tmp_path: Path) -> None:
    from mlx._distributed_utils.common import Hostfile as Theirs

    path = write(tmp_path, {"backend": "jaccl", "envs": ["MLX_METAL_FAST_SYNCH=1"], "hosts": PLAIN})
    ours, theirs = read_hostfile(path), Theirs.from_file(path)
    assert (ours.backend, list(ours.envs)) == (theirs.backend, theirs.envs)
    assert [(h.ssh, list(h.addresses), list(h.rdma)) for h in ours.hosts] == [
        (h.ssh_hostname, h.ips, h.rdma) for h in theirs.hosts
    ]
    assert [host.name for host in ours.hosts] == ["mac-a.local", "mac-b.local"]
    assert ours.link == "rdma"


def test_the_link_is_tcp_without_devices_or_with_the_ring(tmp_path: Path) -> None:
    assert read_hostfile(write(tmp_path, {"backend": "ring", "hosts": PLAIN})).link == "tcp"
    bare = [{"ssh": host["ssh"], "ips": host["ips"]} for host in PLAIN]
    assert read_hostfile(write(tmp_path, bare)).link == "tcp"


def test_our_own_keys(tmp_path: Path) -> None:
    ours = {
        "memory": "192GB",
        "chip": "M3 Ultra",
        "python": "/opt/python",
        "folder": "/models",
        "name": "studio",
    }
    path = write(tmp_path, [{**PLAIN[0], **ours}, {**PLAIN[1], "bandwidth": 410}])
    [first, second] = read_hostfile(path).hosts
    assert (first.name, first.chip, first.bandwidth) == ("studio", "m3-ultra", 819e9)
    assert (first.memory_bytes, first.usable_bytes) == (192 * GIB, 144 * GIB)
    assert (first.python, first.folder) == ("/opt/python", "/models")
    assert (second.bandwidth, second.memory_bytes) == (410e9, None)
    with pytest.raises(UsageError, match=r'memory of mac-b.local is not known.*"memory": "192GB"'):
        _ = second.usable_bytes


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("{", "is no JSON"),
        ([], "must be a list of hosts"),
        ({"hosts": PLAIN, "backnd": "ring"}, "no key 'backnd'; did you mean 'backend'"),
        ([{"ssh": "a", "ip": ["1.2.3.4"]}], "host 0: there is no key 'ip'; did you mean 'ips'"),
        ([{"ssh": "a", "ips": "1.2.3.4"}], "ips is a list of words"),
        ([{"rdma": []}], "ssh, ips or name"),
        ([{"ssh": "a", "memory": "lots"}], "'lots' is no memory size"),
        ([{"ssh": "a", "chip": "m3-ulta"}], "did you mean m3-ultra"),
        ([{"ssh": "a"}, {"ssh": "a"}], "stands there twice"),
        ([{**PLAIN[0], "rdma": ["rdma_en5", None]}], "null for the host itself"),
        ({"hosts": PLAIN, "backend": "gloo"}, "backend is one of any, ring"),
        ([3], "a host is an object"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, data: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        read_hostfile(write(tmp_path, data))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none.json cannot be read"):
        read_hostfile(tmp_path / "none.json")


def test_hosts_in_words() -> None:
    [host] = parse_host("192GB:m3-ultra")
    assert (host.name, host.memory_bytes, host.bandwidth) == ("mac0", 206_158_430_208, 819e9)
    assert [host.name for host in parse_hosts(["big=192GB:m3-ultra", "3x96GB:m3-ultra"])] == [
        "big",
        "mac1",
        "mac2",
        "mac3",
    ]
    assert parse_host("128:410")[0].bandwidth == 410e9
    assert parse_host("128GB")[0].bandwidth is None


@pytest.mark.parametrize(
    "text", ["", "m3-ultra", "192GB:m9-ultra", "0x96GB:m3-ultra", "192TB", "a=b=c", "0GB"]
)
def test_words_that_are_no_host(text: str) -> None:
    with pytest.raises(UsageError, match=r"m3-ultra|memory size"):
        parse_host(text)


def test_two_hosts_of_one_name() -> None:
    with pytest.raises(UsageError, match="two hosts named a"):
        parse_hosts(["a=64GB", "a=96GB"])


def test_memory_counts_as_macs_do() -> None:
    assert parse_memory("192GB") == parse_memory("192 GiB") == parse_memory(192) == 192 * 2**30


def test_local_ranks_share_this_machine() -> None:
    one, four = local_hosts(1), local_hosts(4)
    assert [host.addresses for host in four] == [("127.0.0.1",)] * 4
    assert sum(host.memory_bytes or 0 for host in four) <= (one[0].memory_bytes or 0)
    with pytest.raises(UsageError, match="At least 1"):
        local_hosts(0)


def test_ultra_chips_have_the_papers_bandwidths() -> None:
    published = {"m3-ultra": 819, "m2-ultra": 800, "m4-max": 546, "m4-pro": 273}
    assert {name: CHIPS[name].bandwidth / 1e9 for name in published} == published
