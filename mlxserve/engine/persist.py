"""Between the prefix tree in memory and the disk tier: what is stored, when, and how it comes back.

Knows: tokens, pages of every layer, blocks on disk. Does not know requests or steps. Runs on the worker's
thread, but for the writing of files, which has a thread of its own.

A block is stored when a prompt has been read and when an answer ends, as far as the tree can resume there.
Its pages are gathered on the device, become bytes after the next step was read, and a file after that:
no step waits for a disk. A block comes back when a request starts with it and the tree does not have it.

Recurrent state is kept where a prompt's last whole block ends, in a file beside that block's; a model that has
any resumes only there.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from mlxserve.cache.disk import Buffer, DiskTier
from mlxserve.cache.pages import HOLE, OutOfPages
from mlxserve.cache.prefix import Match
from mlxserve.config import EngineConfig
from mlxserve.engine.cache_manager import CacheManager
from mlxserve.models.load import LoadedModel
from mlxserve.models.paged import PagedModel

BLOCK_PAGES = 8
# Blocks gathered and not yet written; when the disk is slower than that, further ones are not kept.
MOST_PENDING = 64


def open_persistence(
    loaded: LoadedModel, way: str, config: EngineConfig, cache: CacheManager, model: object
) -> Persistence | None:
    """The disk tier of one engine, if its configuration has a folder and prefixes lie in pages or slots.

    A folder serves engines of many forms; only those that would write the same bytes share blocks.
    """
    if config.cache_dir is None or not cache.reuse:
        return None
    assert isinstance(model, PagedModel)
    form = f"{loaded.digest}:{way}:{config.kv_bits}:{config.kv_group_size}"
    fingerprint = f"{form}:{config.page_size}:{loaded.dtype}"
    disk = DiskTier(config.cache_dir, config.cache_dir_bytes, fingerprint, BLOCK_PAGES * config.page_size)
    cache.block_tokens = disk.block_tokens
    return Persistence(disk, cache, model)


class Persistence:
    """Saves and restores prefixes of one engine."""

    def __init__(self, disk: DiskTier, cache: CacheManager, model: PagedModel) -> None:
        self.disk = disk
        self.cache = cache
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
        names, match = self._resumable(names, tokens, adapter)
        if match is None:
            return
        paged = names if self.cache.pools else []
        state = [] if match.state is None else [self.disk.state_of(names[-1])]
        new = [name for name in (*paged, *state) if name not in self._known]
        if not new:
            self.disk.touch([*paged, *state])
            return
        for name in new:
            if len(self._gathered) + self._files.qsize() >= MOST_PENDING:
                break
            before = [*paged, *state][:-1] if name == new[-1] else []
            self._gathered.append((name, self._arrays_of(name, names, match), before))
            self._known.add(name)
        mx.async_eval([list(arrays.values()) for _, arrays, _ in self._gathered])

    def _resumable(
        self, names: list[str], tokens: Sequence[int], adapter: str | None
    ) -> tuple[list[str], Match | None]:
        """As many of the blocks as the tree can resume behind, with what it has of them.

        Without recurrent state that is all of them or nothing: what is missing is being computed.
        """
        size, tree = self.disk.block_tokens, self.cache.tree
        while names:
            match = tree.match(adapter, tokens, len(names) * size)
            if match.length == len(names) * size:
                return names, match
            if self.cache.states is None:
                break
            names = names[: min(match.length // size, len(names) - 1)]
        return [], None

    def _arrays_of(self, name: str, names: list[str], match: Match) -> dict[str, mx.array]:
        """What goes into one file: the pages of a block, or the state behind the last one."""
        if name not in names:
            assert match.state is not None
            return self.model.read_state(match.state)
        first = names.index(name) * BLOCK_PAGES
        return self._gather([table[first : first + BLOCK_PAGES] for table in match.shared])

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
        names = self._there(self.disk.chain(tokens[: len(tokens) - 1], adapter))
        if not names:
            return 0
        size = self.disk.block_tokens
        match = self.cache.tree.acquire(adapter, tokens, len(names) * size)
        have = match.length // size
        tables: list[list[int]] = [list(shared[: have * BLOCK_PAGES]) for shared in match.shared]
        surplus = [shared[have * BLOCK_PAGES :] for shared in match.shared]
        came, state = have, None
        if have < len(names):
            came += self._read_pages(names[have:], tables)
            state = self._read_state(names[-1]) if came == len(names) else None
        whole = self.cache.states is None or state is not None
        if came > have and whole:
            self._insert(tokens, adapter, tables, came * size, state)
            self.disk.touch(names[:came] if state is None else [*names, self.disk.state_of(names[-1])])
        self._known.update(names[:have] if self.cache.pools else [])
        self._give_back(match, tables, surplus)
        return (came - have) * size if whole else 0

    def _there(self, names: list[str]) -> list[str]:
        """The blocks that are on disk one behind the other, up to one that can be resumed behind."""
        if self.cache.pools:
            names = names[: self.disk.present(names)]
        while self.cache.states is not None and names:
            if self.disk.present([self.disk.state_of(names[-1])]):
                break
            names = names[:-1]
        return names

    def _insert(
        self,
        tokens: Sequence[int],
        adapter: str | None,
        tables: list[list[int]],
        length: int,
        state: int | None,
    ) -> None:
        tree = self.cache.tree
        cursor = tree.acquire(adapter, tokens, 0).cursor
        assert cursor is not None
        tree.insert(cursor, list(tokens), tables, length=length, state=state)
        tree.release(cursor)

    def close(self) -> None:
        """Write what is pending and end the thread."""
        self.flush()
        self._files.put(None)
        self._writer.join()

    def _give_back(self, match: Match, tables: list[list[int]], surplus: list[list[int]]) -> None:
        """The references taken here go; what the tree has inserted stays in the tree."""
        assert match.cursor is not None
        if match.state is not None and self.cache.states is not None:
            self.cache.states.release([match.state])
        for pool, table, rest, copy in zip(self.cache.pools, tables, surplus, match.copy):
            pool.release([page for page in (*table, *rest) if page != HOLE])
            pool.release([] if copy is None else [copy])
        self.cache.tree.release(match.cursor)

    def _read_pages(self, names: list[str], tables: list[list[int]]) -> int:
        """Blocks from disk into fresh pages at the end of `tables`; how many were to be had."""
        if not self.cache.pools:
            return len(names)
        return next((i for i, name in enumerate(names) if not self._read(name, tables)), len(names))

    def _read(self, name: str, tables: list[list[int]]) -> bool:
        """One block from disk into fresh pages at the end of `tables`; False if it is not to be had."""
        arrays = self._file(name)
        if arrays is None:
            return False
        taken: list[list[int]] = []
        try:
            for group in range(len(tables)):
                present = arrays.pop(f"pages.{group}").tolist()
                pages = self.cache.take_pages(group, sum(present))  # type: ignore[arg-type]
                taken.append(pages)
                fresh = iter(pages)
                tables[group].extend(next(fresh) if there else HOLE for there in present)  # type: ignore[union-attr]
        except OutOfPages:
            for group, pages in enumerate(taken):
                del tables[group][-BLOCK_PAGES:]
                self.cache.pools[group].release(pages)
            return False
        self.model.write_pages(taken, arrays)
        return True

    def _read_state(self, name: str) -> int | None:
        """The state behind a block from disk into a slot; None if it is not to be had, or there is none."""
        arrays = None if self.cache.states is None else self._file(self.disk.state_of(name))
        slot = None if arrays is None else self.cache.take_state()
        if arrays is not None and slot is not None:
            self.model.write_state(slot, arrays)
        return slot

    def _file(self, name: str) -> dict[str, mx.array] | None:
        """A file's arrays, if it is here and sound."""
        buffers = self.disk.get(name)
        if buffers is None:
            self._known.discard(name)
            return None
        self._known.add(name)
        return {key: _array(buffer) for key, buffer in buffers.items()}

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
