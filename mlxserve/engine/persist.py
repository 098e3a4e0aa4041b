"""Between the prefix tree in memory and the disk tier: what is stored, when, and how it comes back.

Knows: tokens, pages of every layer, blocks on disk. Does not know requests or steps. Runs on the worker's
thread, but for the writing of files, which has a thread of its own.

A block is stored when a prompt has been read and when an answer ends, as far as the tree can resume there.
Its pages are gathered on the device, become bytes after the next step was read, and a file after that:
no step waits for a disk. A block comes back when a request starts with it and the tree does not have it.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from mlxserve.cache.disk import Buffer, DiskTier
from mlxserve.cache.pages import HOLE, OutOfPages
from mlxserve.engine.scheduler import Scheduler
from mlxserve.models.paged import PagedModel

BLOCK_PAGES = 8
# Blocks gathered and not yet written; when the disk is slower than that, further ones are not kept.
MOST_PENDING = 64


class Persistence:
    """Saves and restores prefixes of one engine."""

    def __init__(self, disk: DiskTier, scheduler: Scheduler, model: PagedModel) -> None:
        self.disk = disk
        self.scheduler = scheduler
        self.model = model
        # A block's name, its arrays, and with the last block of a chain the names of those before it.
        self._gathered: list[tuple[str, dict[str, mx.array], list[str]]] = []
        self._files: queue.Queue[tuple[str, dict[str, Buffer], list[str]] | None] = queue.Queue(MOST_PENDING)
        self._known: set[str] = set()  # on disk, or about to be
        self._writer = threading.Thread(target=self._write, name="mlxserve-disk", daemon=True)
        self._writer.start()

    def save(self, tokens: Sequence[int], adapter: str | None) -> None:
        """Gather the blocks of `tokens` that are not on disk yet; `flush` turns them into files."""
        names = self.disk.chain(tokens, adapter)
        if not names:
            return
        new = [i for i, name in enumerate(names) if name not in self._known]
        if not new:
            self.disk.touch(names)
            return
        length = len(names) * self.disk.block_tokens
        match = self.scheduler.tree.match(adapter, tokens, length)
        if match.length != length:
            return
        for i in new:
            if len(self._gathered) + self._files.qsize() >= MOST_PENDING:
                return
            part = [table[i * BLOCK_PAGES : (i + 1) * BLOCK_PAGES] for table in match.shared]
            before = names[:i] if i == new[-1] else []
            self._gathered.append((names[i], self._gather(part), before))
            self._known.add(names[i])
        mx.async_eval([list(arrays.values()) for _, arrays, _ in self._gathered])

    def flush(self) -> None:
        """Hand what was gathered before the last step to the writing thread."""
        gathered, self._gathered = self._gathered, []
        for name, arrays, before in gathered:
            buffers = {key: _buffer(value) for key, value in arrays.items()}
            try:
                self._files.put_nowait((name, buffers, before))
            except queue.Full:
                self._known.discard(name)

    def restore(self, tokens: Sequence[int], adapter: str | None) -> int:
        """Read blocks that `tokens` start with and the tree lacks into pages; how many tokens came back.

        Whole prompts are left one token to compute, as everywhere.
        """
        names = self.disk.chain(tokens[: len(tokens) - 1], adapter)
        there = self.disk.present(names)
        if not there:
            return 0
        tree, size = self.scheduler.tree, self.disk.block_tokens
        match = tree.acquire(adapter, tokens, there * size)
        have = match.length // size
        tables: list[list[int]] = [list(shared[: have * BLOCK_PAGES]) for shared in match.shared]
        surplus = [shared[have * BLOCK_PAGES :] for shared in match.shared]
        came = have
        for name in names[have:there]:
            if not self._read(name, tables):
                break
            came += 1
        if came > have:
            cursor = tree.acquire(adapter, tokens, 0).cursor
            assert cursor is not None
            tree.insert(cursor, list(tokens), tables, length=came * size)
            tree.release(cursor)
            self.disk.touch(names[:came])
        self._known.update(names[:came])
        self._give_back(match, tables, surplus)
        return (came - have) * size

    def close(self) -> None:
        """Write what is pending and end the thread."""
        self.flush()
        self._files.put(None)
        self._writer.join()

    def _give_back(self, match: Any, tables: list[list[int]], surplus: list[list[int]]) -> None:
        """The references taken here go; what the tree has inserted stays in the tree."""
        for pool, table, rest, copy in zip(self.scheduler.pools, tables, surplus, match.copy):
            pool.release([page for page in (*table, *rest) if page != HOLE])
            pool.release([] if copy is None else [copy])
        self.scheduler.tree.release(match.cursor)

    def _read(self, name: str, tables: list[list[int]]) -> bool:
        """One block from disk into fresh pages at the end of `tables`; False if it is not to be had."""
        buffers = self.disk.get(name)
        if buffers is None:
            self._known.discard(name)
            return False
        arrays = {key: _array(buffer) for key, buffer in buffers.items()}
        taken: list[list[int]] = []
        try:
            for group in range(len(tables)):
                present = arrays.pop(f"pages.{group}").tolist()
                pages = self.scheduler.take_pages(group, sum(present))  # type: ignore[arg-type]
                taken.append(pages)
                fresh = iter(pages)
                tables[group].extend(next(fresh) if there else HOLE for there in present)  # type: ignore[union-attr]
        except OutOfPages:
            for group, pages in enumerate(taken):
                del tables[group][-BLOCK_PAGES:]
                self.scheduler.pools[group].release(pages)
            return False
        self.model.write_pages(taken, arrays)
        return True

    def _gather(self, tables: list[list[int]]) -> dict[str, mx.array]:
        held = [[page for page in table if page != HOLE] for table in tables]
        arrays = self.model.read_pages(held)
        for group, table in enumerate(tables):
            arrays[f"pages.{group}"] = mx.array([int(page != HOLE) for page in table], mx.uint8)
        return arrays

    def _write(self) -> None:
        while (job := self._files.get()) is not None:
            self._known.difference_update(self.disk.put(*job))


def _buffer(value: mx.array) -> Buffer:
    """An array's bytes; NumPy has no bfloat16, so 16-bit floats travel as integers."""
    name = str(value.dtype).removeprefix("mlx.core.")
    plain = value.view(mx.uint16) if value.dtype in (mx.bfloat16, mx.float16) else value
    return Buffer(name, tuple(value.shape), np.array(plain).tobytes())


def _array(buffer: Buffer) -> mx.array:
    dtype = getattr(mx, buffer.dtype)
    if dtype in (mx.bfloat16, mx.float16):
        return mx.array(np.frombuffer(buffer.data, np.uint16).reshape(buffer.shape)).view(dtype)
    return mx.array(np.frombuffer(buffer.data, buffer.dtype).reshape(buffer.shape))
