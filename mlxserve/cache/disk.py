"""The disk tier: prefixes of conversations that survive a restart, in files that are checked when read.

Knows: blocks of tokens, bytes, files. Does not know pages, trees, models or MLX: a block's arrays come and
go as named buffers with a dtype's name and a shape.

A prefix is a chain of blocks of `block_tokens` tokens. A block's name is a hash of everything before it
and of its own tokens, beginning with a fingerprint of the model, the adapter and the form of K/V; so two
conversations share the files of their common beginning, and one that grows rewrites nothing.

    file   magic | length of header | header (JSON) | arrays | SHA-256 of all before it

A file that is cut short, changed, or was written for something else is a miss and is removed. The time of
last use is a file's modification time; a block is younger than those that follow it, so the oldest file ends
a chain. Only files with a block's name are ever removed, whatever else lies in the folder: blocks of other
models count towards the limit and go in their turn.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import struct
import threading
import time
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mlxserve.errors import UsageError

MAGIC = b"mlxserve-kv-1\n"
SUFFIX = ".kv"
UNFINISHED = ".kv.part"
_NAME = re.compile(r"[0-9a-f]{64}(\.kv|\.kv\.part)")


@dataclass(frozen=True, slots=True)
class Buffer:
    """An array as bytes: the dtype's name, the shape, and the data in row-major order."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


class DiskTier:
    """Blocks in `folder`, at most `limit_bytes` of them, the least recently used going first.

    fingerprint: what a block is only good for; part of every name and checked again in every file. Several
    processes may share a folder: the limit is one for all. Thread-safe. Conversations are private: folder
    and files are for their owner only. Raises UsageError if the folder cannot be made or written.
    """

    def __init__(self, folder: Path, limit_bytes: int, fingerprint: str, block_tokens: int) -> None:
        self.folder = folder
        self.limit_bytes = limit_bytes
        self.fingerprint = fingerprint
        self.block_tokens = block_tokens
        self.hits = self.damaged = 0
        self._lock = threading.Lock()
        self._last_use = 0
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self._alone():
                self._shrink(limit_bytes)
        except OSError as error:
            raise UsageError(
                f"The cache folder {folder} cannot be used: {error.strerror}.", param="cache_dir"
            ) from error

    def chain(self, tokens: Sequence[int], adapter: str | None = None) -> list[str]:
        """The names of the whole blocks of `tokens`, in order."""
        name = hashlib.sha256(f"{self.fingerprint}\0{adapter or ''}".encode()).hexdigest()
        names = []
        for start in range(0, len(tokens) - self.block_tokens + 1, self.block_tokens):
            block = array("i", tokens[start : start + self.block_tokens]).tobytes()
            name = hashlib.sha256(name.encode() + block).hexdigest()
            names.append(name)
        return names

    @staticmethod
    def state_of(name: str) -> str:
        """The name of the recurrent state at the end of a block, which is a file of its own."""
        return hashlib.sha256(f"{name}\0state".encode()).hexdigest()

    def present(self, names: Sequence[str]) -> int:
        """How many of a chain's blocks are here, counted from its beginning."""
        for count, name in enumerate(names):
            if not self._path(name).is_file():
                return count
        return len(names)

    def put(self, name: str, buffers: Mapping[str, Buffer], before: Sequence[str] = ()) -> list[str]:
        """Store a block, whole or not at all; the names of those that were removed to make room for it.

        before: blocks of the same chain, which must not be the ones that go. A full or read-only disk is
        no error: the block is simply not kept.
        """
        content = _encoded(self.fingerprint, name, buffers)
        if len(content) > self.limit_bytes:
            return [name]
        removed: list[str] = []
        try:
            with self._alone():
                self.touch(before)
                removed = self._shrink(self.limit_bytes - len(content))
                self._write(name, content)
                self.touch([*before, name])
        except OSError:
            return [*removed, name]
        return removed

    def _write(self, name: str, content: bytes) -> None:
        part = self.folder / f"{name}{UNFINISHED}"
        try:
            with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(content)
            os.replace(part, self._path(name))
        finally:
            part.unlink(missing_ok=True)

    def get(self, name: str) -> dict[str, Buffer] | None:
        """A block's arrays, or None if it is not here or not sound."""
        path = self._path(name)
        try:
            content = path.read_bytes()
        except OSError:
            return None
        buffers = _decoded(content, self.fingerprint, name)
        if buffers is None:
            self.damaged += 1
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        self.hits += 1
        return buffers

    def touch(self, names: Sequence[str]) -> None:
        """These blocks were used, the chain's beginning last: it must outlive what hangs on it."""
        for name in reversed(names):
            self._last_use = max(self._last_use + 1, time.time_ns())
            with contextlib.suppress(OSError):
                os.utime(self._path(name), ns=(self._last_use, self._last_use))

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks in the folder."""
        return sum(size for _, size, _ in self._files())

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}{SUFFIX}"

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """No other thread or process adds files meanwhile."""
        with self._lock, open(os.open(self.folder / ".lock", os.O_RDWR | os.O_CREAT, 0o600), "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _files(self) -> Iterator[tuple[int, int, Path]]:
        """(time of last use in ns, bytes, path) of every block, whoever wrote it."""
        with os.scandir(self.folder) as entries:
            for entry in entries:
                if _NAME.fullmatch(entry.name):
                    with contextlib.suppress(OSError):
                        facts = entry.stat(follow_symlinks=False)
                        yield facts.st_mtime_ns, facts.st_size, Path(entry.path)

    def _shrink(self, limit_bytes: int) -> list[str]:
        """Remove the least recently used blocks until the rest fits; their names. Only alone.

        What is unfinished then was left behind by a process that was killed, and goes first.
        """
        files = sorted(self._files(), key=lambda file: (not file[2].name.endswith(UNFINISHED), file))
        held = sum(size for _, size, _ in files)
        removed = []
        for _, size, path in files:
            if held <= limit_bytes and not path.name.endswith(UNFINISHED):
                break
            path.unlink(missing_ok=True)
            removed.append(path.name.partition(".")[0])
            held -= size
        return removed


def _encoded(fingerprint: str, name: str, buffers: Mapping[str, Buffer]) -> bytes:
    arrays = [[key, b.dtype, list(b.shape), len(b.data)] for key, b in buffers.items()]
    header = json.dumps({"fingerprint": fingerprint, "name": name, "arrays": arrays}).encode()
    parts = [MAGIC, struct.pack("<I", len(header)), header, *(b.data for b in buffers.values())]
    content = b"".join(parts)
    return content + hashlib.sha256(content).digest()


def _decoded(content: bytes, fingerprint: str, name: str) -> dict[str, Buffer] | None:
    """The arrays of a sound file of this fingerprint and name, else None. The checksum comes first."""
    body, digest = content[:-32], content[-32:]
    if not body.startswith(MAGIC) or hashlib.sha256(body).digest() != digest:
        return None
    (length,) = struct.unpack_from("<I", body, len(MAGIC))
    first = len(MAGIC) + 4
    header = json.loads(body[first : first + length])
    if header["fingerprint"] != fingerprint or header["name"] != name:
        return None
    position, buffers = first + length, {}
    for key, dtype, shape, nbytes in header["arrays"]:
        buffers[key] = Buffer(dtype, tuple(shape), body[position : position + nbytes])
        position += nbytes
    return buffers
