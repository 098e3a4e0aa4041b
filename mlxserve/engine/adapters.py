"""The adapters of one engine by name: read, checked, put on the model, taken off when nobody uses them.

Knows: names, folders, contents (digests), memory. Does not know which requests run: the engine tells how many
use a digest. Everything here happens on the worker's thread.

Inside the engine an adapter is its *digest*, not its name: prefixes, on disk too, are found again only under
the same contents, and a name that comes to mean something else later finds nothing of what it meant before.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxserve.engine.memory import machine_budget
from mlxserve.errors import DoesNotFit, ModelNotFound, UsageError
from mlxserve.models.adapters import Adapter, digest_of, read
from mlxserve.models.layout import read_layout
from mlxserve.models.load import LoadedModel
from mlxserve.models.multilora import AdapterStack
from mlxserve.models.paged import PagedModel
from mlxserve.models.step import PAGED_WAYS, Step

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """An adapter as people see it. base: the model that its files name, empty where they name none.

    note: what a person should know, for example that it was made for a model of another name.
    """

    name: str
    path: str
    digest: str
    kind: str
    rank: int
    layers: int
    nbytes: int
    base: str = ""
    note: str = ""


class Adapters:
    """Adapters on one loaded model. users: how many requests of the engine have a digest.

    alone: False where other processes hold parts of the model, which therefore is not tuned here.
    """

    def __init__(
        self, loaded: LoadedModel, way: str, users: Callable[[str], int], *, alone: bool = True
    ) -> None:
        self.loaded, self.way, self._users, self.alone = loaded, way, users, alone
        self.stack = AdapterStack(loaded.model, loaded.dtype)
        self._named: dict[str, AdapterInfo] = {}
        self._ids: dict[str, int] = {}  # by digest; also of those whose last requests still run

    @property
    def listed(self) -> list[AdapterInfo]:
        return list(self._named.values())

    def load(self, name: str, folder: Path) -> AdapterInfo:
        """Read an adapter folder and put it on the model; at once if the same contents are there.

        Raises UsageError for a name that is taken or no name, ModelNotFound, ModelInvalid or Unsupported
        for files that do not fit, DoesNotFit where memory is short. Nothing is loaded in part.
        """
        if not NAME.fullmatch(name):
            raise UsageError(
                f"{name!r} is no name for an adapter: letters, digits, '.', '_' and '-' only.",
                param="adapter",
            )
        adapter = read(folder)
        digest = digest_of(folder)
        known = self._named.get(name)
        if known is not None and known.digest != digest:
            raise UsageError(f"An adapter '{name}' is already loaded; drop it first.", param="adapter")
        if digest not in self._ids:
            self._require_memory(adapter, name)
            self._ids[digest] = self._add(adapter, digest)
        info = known or self._describe(name, folder, adapter, digest)
        self._named[name] = info
        return info

    def drop(self, name: str) -> int:
        """Forget a name. Its factors go when the last request that uses them has ended; how many still do."""
        info = self._named.pop(self._known(name).name)
        self.tidy()
        return self._users(info.digest)

    def tidy(self) -> None:
        """Take off what has no name and no user any more."""
        named = {info.digest for info in self._named.values()}
        for digest in [d for d in self._ids if d not in named and not self._users(d)]:
            self._remove(self._ids.pop(digest), digest)

    def digest(self, name: str) -> str:
        """Raises ModelNotFound, naming what there is."""
        return self._known(name).digest

    def id_of(self, digest: str) -> int:
        """The model's number of an adapter that some request has."""
        return self._ids[digest]

    def _known(self, name: str) -> AdapterInfo:
        info = self._named.get(name)
        if info is None:
            there = f"there are {', '.join(sorted(self._named))}" if self._named else "none is loaded"
            raise ModelNotFound(
                f"{self.loaded.name} has no adapter '{name}'; {there}.",
                param="model",
                code="adapter_not_found",
            )
        return info

    def _require_memory(self, adapter: Adapter, name: str) -> None:
        require_memory(self.stack, adapter, f"The adapter '{name}'")

    def _add(self, adapter: Adapter, digest: str) -> int:
        """Put it on the model; its number there. Raises what is wrong with it, and then nothing changed."""
        member = self.stack.add(adapter)
        try:
            if self.way in PAGED_WAYS:
                self._try_mixed_rows(member)
        except BaseException:
            self.stack.remove(member)
            raise
        return member

    def _remove(self, member: int, digest: str) -> None:
        self.stack.remove(member)

    def _try_mixed_rows(self, member: int) -> None:
        """Build, without evaluating it, a step in which only some rows have the adapter.

        Raises ModelUnsupported where one of its layers sees other rows than the step has.
        """
        model: nn.Module = self.loaded.model
        groups = len(read_layout(model).windows)
        probe = PagedModel(
            model, self.way, page_size=4, group_pages=[2] * groups, state_slots=2, adapters=self.stack
        )
        ones = np.array([1, 1])
        tables = [np.array([[0], [1]], np.int32)] * groups
        slots, adapters = np.array([0, 1], np.int32), np.array([0, member])
        probe.forward(mx.array([0, 0, 0]), Step(ones, np.array([2, 1]), ones, tables, slots, adapters))

    def _describe(self, name: str, folder: Path, adapter: Adapter, digest: str) -> AdapterInfo:
        kind = "dora" if any(key.endswith(".m") for key in adapter.arrays) else "lora"
        return AdapterInfo(
            name,
            str(folder),
            digest,
            kind,
            adapter.rank,
            len(adapter.paths),
            self.stack.bytes_of(adapter),
            adapter.base,
            self._note(name, adapter.base),
        )

    def _note(self, name: str, base: str) -> str:
        """Bases are known by name only; quantised copies have other names, so a difference is no error."""
        mine = {self.loaded.name, self.loaded.path.name, str(self.loaded.path)}
        endings = {text.rstrip("/").rpartition("/")[2].lower() for text in mine}
        if not base or base.rstrip("/").rpartition("/")[2].lower() in endings:
            return ""
        return f"The adapter '{name}' names {base} as its base; it is served on {self.loaded.name}."


def require_memory(stack: AdapterStack, adapter: Adapter, what: str) -> None:
    """Raise DoesNotFit unless this machine has room for one more adapter; `what` begins the sentence."""
    needed, free = stack.bytes_of(adapter), machine_budget() - mx.get_active_memory()
    if needed > free:
        raise DoesNotFit(
            f"{what} takes {needed:,} bytes and {max(free, 0):,} are free.",
            needed_bytes=needed,
            available_bytes=max(free, 0),
        )
