"""The disk tier: what is read is what was written, or nothing; limits hold after every insert."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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


def held(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir() if path.name != ".lock")


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
    for place in range(len(sound)):
        path.write_bytes(sound[:place] + bytes([sound[place] ^ 1]) + sound[place + 1 :])
        assert disk.get(name) is None and not path.exists()
    for changed in [*(sound[:length] for length in range(len(sound))), sound + b"\0", sound + sound]:
        path.write_bytes(changed)
        assert disk.get(name) is None and not path.exists()
    path.write_bytes(sound)
    assert disk.get(name) == block(7)


def test_a_foreign_file_under_the_right_name_is_a_miss(tmp_path: Path) -> None:
    mine, other = tier(tmp_path / "a"), tier(tmp_path / "b", fingerprint="model-b")
    (name,), (foreign,) = mine.chain(range(4)), other.chain(range(4))
    other.put(foreign, block(1))
    os.rename(tmp_path / "b" / f"{foreign}.kv", tmp_path / "a" / f"{name}.kv")
    assert mine.get(name) is None


def test_a_sound_file_under_another_name_is_a_miss(tmp_path: Path) -> None:
    disk = tier(tmp_path)
    first, second = disk.chain(range(8))
    disk.put(first, block(1))
    os.rename(tmp_path / f"{first}.kv", tmp_path / f"{second}.kv")
    assert disk.get(second) is None


def test_the_limit_holds_after_every_insert_and_the_oldest_go(tmp_path: Path) -> None:
    disk = tier(tmp_path, limit=2000)
    names = disk.chain(range(80))
    for i, name in enumerate(names):
        removed = disk.put(name, block(i))
        assert held(tmp_path) == disk.nbytes <= 2000
        assert all(disk.present([gone]) == 0 for gone in removed)
    assert disk.get(names[-1]) == block(len(names) - 1) and disk.get(names[0]) is None
    there = [name for name in names if disk.present([name])]
    assert there == names[-len(there) :] and len(there) > 2


@settings(max_examples=20, deadline=None)
@given(limit=st.integers(400, 4000), sizes=st.lists(st.integers(0, 3000), min_size=1, max_size=12))
def test_case_36_bytes_stay_within_the_limit_after_every_insert(
    tmp_path_factory: pytest.TempPathFactory, limit: int, sizes: list[int]
) -> None:
    disk = tier(tmp_path_factory.mktemp("limit"), limit)
    for i, (name, size) in enumerate(zip(disk.chain(range(BLOCK * len(sizes))), sizes)):
        removed = disk.put(name, block(i, size))
        assert held(disk.folder) <= limit
        assert (disk.get(name) == block(i, size)) == (name not in removed)


def test_what_is_larger_than_the_limit_is_not_kept_and_removes_nothing(tmp_path: Path) -> None:
    disk = tier(tmp_path, limit=2000)
    small, large = disk.chain(range(8))
    disk.put(small, block(1))
    assert disk.put(large, block(0, size=4000)) == [large]
    assert disk.get(large) is None and disk.get(small) == block(1)


def test_a_lower_limit_holds_from_the_start(tmp_path: Path) -> None:
    disk = tier(tmp_path)
    names = disk.chain(range(40))
    for name in names:
        disk.put(name, block(1))
    again = tier(tmp_path, limit=disk.nbytes // 2)
    assert again.nbytes <= disk.nbytes <= again.limit_bytes
    assert [name for name in names if again.present([name])] == names[5:]


def test_use_keeps_a_chain_and_its_beginning_longest(tmp_path: Path) -> None:
    disk = tier(tmp_path / "probe")
    disk.put(disk.chain(range(4))[0], block(0))
    size = disk.nbytes
    disk = tier(tmp_path / "disk", limit=5 * size)
    used, other = disk.chain(range(8)), disk.chain(range(100, 108))
    for name in [*used, *other]:
        disk.put(name, block(0))
    disk.touch(used)
    fresh = [disk.chain(range(start, start + 4))[0] for start in range(1000, 1400, 100)]
    left = []
    for name in fresh:
        disk.put(name, block(0))
        left.append((disk.present(used), sum(disk.present([name]) for name in other)))
    assert left == [(2, 2), (2, 1), (2, 0), (1, 0)]


def test_a_growing_chain_keeps_its_beginning(tmp_path: Path) -> None:
    disk = tier(tmp_path / "probe")
    names = disk.chain(range(12))
    disk.put(names[0], block(0))
    disk = tier(tmp_path / "disk", limit=3 * disk.nbytes)
    alien = disk.chain(range(100, 104))[0]
    disk.put(names[0], block(0))
    disk.put(alien, block(1))
    disk.put(names[1], block(0), before=names[:1])
    assert disk.put(names[2], block(0), before=names[:2]) == [alien]
    assert disk.put(alien, block(1)) == [names[2]]
    assert disk.present(names) == 2


def test_models_share_a_folder_and_its_limit(tmp_path: Path) -> None:
    one, two = tier(tmp_path, 1500), tier(tmp_path, 1500, fingerprint="model-b")
    (mine,), theirs = one.chain(range(4)), two.chain(range(40))
    one.put(mine, block(1))
    for name in theirs:
        two.put(name, block(2))
        assert one.nbytes == two.nbytes == held(tmp_path) <= 1500
    assert one.get(mine) is None
    assert one.damaged == 0


def test_other_peoples_files_are_left_alone(tmp_path: Path) -> None:
    names = ["notes.txt", "model.kv", "a.tmp", "0" * 63 + ".kv", "0" * 64 + ".gguf"]
    for name in names:
        (tmp_path / name).write_bytes(b"mine" * 1000)
        os.utime(tmp_path / name, (1, 1))
    disk = tier(tmp_path, limit=1000)
    for name in disk.chain(range(80)):
        disk.put(name, block(1))
    assert all((tmp_path / name).read_bytes() == b"mine" * 1000 for name in names)


def test_what_a_killed_process_left_is_cleared_away(tmp_path: Path) -> None:
    disk = tier(tmp_path)
    (name,) = disk.chain(range(4))
    disk.put(name, block(1))
    os.rename(tmp_path / f"{name}.kv", tmp_path / f"{name}.kv.part")
    assert tier(tmp_path).get(name) is None
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = tier(tmp_path)
    (name,) = disk.chain(range(4))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        assert disk.put(name, block(1)) == [name]
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]
    assert disk.put(name, block(1)) == [] and disk.get(name) == block(1)


def test_a_folder_that_goes_away_is_a_miss(tmp_path: Path) -> None:
    disk = tier(tmp_path / "cache")
    (name,) = disk.chain(range(4))
    disk.put(name, block(1))
    (tmp_path / "cache").rename(tmp_path / "gone")
    assert disk.get(name) is None and disk.put(name, block(1)) == [name] and disk.present([name]) == 0
    (tmp_path / "gone").rename(tmp_path / "cache")
    assert disk.get(name) == block(1)


def test_conversations_are_private(tmp_path: Path) -> None:
    disk = tier(tmp_path / "cache")
    disk.put(disk.chain(range(4))[0], block(1))
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700
    assert all(path.stat().st_mode & 0o077 == 0 for path in (tmp_path / "cache").iterdir())


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
    assert not list(tmp_path.glob("*.part"))


WRITER = """
import sys
from pathlib import Path
from mlxserve.cache.disk import Buffer, DiskTier
folder, limit = Path(sys.argv[1]), int(sys.argv[2])
disk = DiskTier(folder, limit, "model-a", 4)
for i in range(80):
    (name,) = disk.chain([i % 9, 1, 2, 3])
    disk.put(name, {"k": Buffer("uint8", (40,), bytes([i % 9]) * 40)})
    (wanted,) = disk.chain([(i * 5) % 9, 1, 2, 3])
    found = disk.get(wanted)
    if found is not None and found["k"].data != bytes([(i * 5) % 9]) * 40:
        sys.exit("a wrong answer")
    if disk.nbytes > limit:
        sys.exit("over the limit")
sys.exit(disk.damaged)
"""


def test_two_processes_share_a_folder_and_its_limit(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITER, str(tmp_path), "2000"]
    running = [subprocess.Popen(command) for _ in range(2)]
    assert [process.wait(timeout=300) for process in running] == [0, 0]
    assert 0 < held(tmp_path) <= 2000
    assert not list(tmp_path.glob("*.part"))


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cache folder"):
        tier(tmp_path / "file" / "below")
