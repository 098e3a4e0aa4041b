"""The disk tier: what is read is what was written, or nothing; limits hold after every insert."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from mlxserve.cache.disk import Buffer, DiskTier
from mlxserve.errors import UsageError

BLOCK = 4


def tier(folder: Path, limit: int = 10**6, fingerprint: str = "model-a") -> DiskTier:
    return DiskTier(folder, limit, fingerprint, BLOCK)


def block(seed: int, size: int = 100) -> dict[str, Buffer]:
    data = bytes((seed + i) % 256 for i in range(size))
    return {
        "0.keys": Buffer("float32", (size // 4,), data),
        "0.values": Buffer("uint16", (size // 2,), data[::-1]),
    }


def test_chains_agree_exactly_as_far_as_tokens_do(tmp_path: Path) -> None:
    disk = tier(tmp_path)
    long, fork = list(range(14)), [*range(8), 99, 9, 10, 11]
    assert len(disk.chain(long)) == 3 and len(disk.chain(long[:3])) == 0
    assert disk.chain(long)[:2] == disk.chain(fork)[:2] and disk.chain(long)[2] != disk.chain(fork)[2]
    assert not set(disk.chain(long)) & set(disk.chain(long, adapter="x"))
    assert not set(disk.chain(long)) & set(tier(tmp_path, fingerprint="model-b").chain(long))


def test_it_survives_a_restart(tmp_path: Path) -> None:
    names = tier(tmp_path).chain(range(8))
    for seed, name in enumerate(names):
        tier(tmp_path).put(name, block(seed))
    again = tier(tmp_path)
    assert again.present(names) == 2
    assert [again.get(name) for name in names] == [block(0), block(1)]


def test_a_hole_ends_the_chain(tmp_path: Path) -> None:
    disk = tier(tmp_path)
    names = disk.chain(range(12))
    disk.put(names[0], block(0))
    disk.put(names[2], block(2))
    assert disk.present(names) == 1 and disk.get(names[1]) is None


def test_any_changed_byte_is_a_miss_and_the_file_goes(tmp_path: Path) -> None:
    disk = tier(tmp_path)
    (name,) = disk.chain(range(4))
    disk.put(name, block(7))
    path = next(tmp_path.glob("*.kv"))
    sound = path.read_bytes()
    for place in range(0, len(sound), 7):
        path.write_bytes(sound[:place] + bytes([sound[place] ^ 1]) + sound[place + 1 :])
        assert disk.get(name) is None and not path.exists()
    for length in range(0, len(sound), 11):
        path.write_bytes(sound[:length])
        assert disk.get(name) is None
    path.write_bytes(sound)
    assert disk.get(name) == block(7)


def test_a_foreign_file_under_the_right_name_is_a_miss(tmp_path: Path) -> None:
    mine, other = tier(tmp_path / "a"), tier(tmp_path / "b", fingerprint="model-b")
    (name,), (foreign,) = mine.chain(range(4)), other.chain(range(4))
    other.put(foreign, block(1))
    os.rename(tmp_path / "b" / f"{foreign}.kv", tmp_path / "a" / f"{name}.kv")
    assert mine.get(name) is None


def test_the_limit_holds_after_every_insert_and_the_oldest_go(tmp_path: Path) -> None:
    disk = tier(tmp_path, limit=2000)
    names = disk.chain(range(80))
    for i, name in enumerate(names):
        disk.put(name, block(i))
        os.utime(tmp_path / f"{name}.kv", (1000 + i, 1000 + i))
        assert disk.nbytes <= 2000
    assert disk.get(names[-1]) == block(len(names) - 1) and disk.get(names[0]) is None
    disk.put(names[0], block(0, size=4000))
    assert disk.get(names[0]) is None and disk.get(names[-1]) is not None


def test_use_keeps_a_chain_and_its_beginning_longest(tmp_path: Path) -> None:
    disk = tier(tmp_path, limit=2000)
    old = disk.chain(range(8))
    for i, name in enumerate(old):
        disk.put(name, block(i))
        os.utime(tmp_path / f"{name}.kv", (1000, 1000))
    other = disk.chain(range(100, 108))
    for i, name in enumerate(other):
        disk.put(name, block(i))
        os.utime(tmp_path / f"{name}.kv", (2000, 2000))
    disk.touch(old)
    while disk.present(old) == 2:
        fresh = disk.chain(range(500 + len(list(tmp_path.iterdir())), 600))[0]
        disk.put(fresh, block(9))
    assert disk.present(old) == 1 and disk.present(other) == 0


def test_two_writers_do_not_hurt_each_other(tmp_path: Path) -> None:
    names = tier(tmp_path).chain(range(40))

    def write() -> None:
        own = tier(tmp_path)
        for i, name in enumerate(names):
            own.put(name, block(i))

    threads = [threading.Thread(target=write) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    reader = tier(tmp_path)
    assert [reader.get(name) for name in names] == [block(i) for i in range(len(names))]
    assert not list(tmp_path.glob("*.tmp"))


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cache folder"):
        tier(tmp_path / "file" / "below")
