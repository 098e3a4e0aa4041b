"""Adapters on their way from a front to its ranks: files here, the same files there, factors on every rank.

The front may be on another machine than rank 0, so an adapter's files travel. The front remembers which
adapters it has sent, and sends them again to ranks that are started anew, if the files are still the same.

Knows: adapter folders, names, contents. Does not know requests, or what an adapter computes.
"""

from __future__ import annotations

import itertools
import logging
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import msgspec

from mlxserve.distributed.calls import Call, pack
from mlxserve.distributed.channel import MIB
from mlxserve.engine.adapters import AdapterInfo
from mlxserve.errors import EngineStopped, MlxServeError, ModelInvalid, ModelNotFound
from mlxserve.models.adapters import CONFIG, MLX_FILE, PEFT_FILE, digest_of, read

log = logging.getLogger(__name__)
PIECE_BYTES = 16 * MIB


class Line(Protocol):
    """The front's connection with rank 0."""

    def tell(self, call: Call, body: bytes) -> None:
        """Send something that needs no answer."""

    def ask(self, call: Call, *values: Any) -> Future[Any]:
        """Send a question; its answer, or RankFailed when the ranks fail before. Raises it where none is up."""


class FrontAdapters:
    """The adapters of a front's model, as engine/adapters.Adapters shows them to callers. Any thread may call.

    alone: False, since a model on several ranks is not tuned.
    """

    alone = False

    def __init__(self, line: Line) -> None:
        self._line = line
        self._named: dict[str, AdapterInfo] = {}
        self._parcels = itertools.count(1)

    @property
    def listed(self) -> list[AdapterInfo]:
        return list(self._named.values())

    def digest(self, name: str | None) -> str | None:
        """What an adapter's name means now; None for none, and for one that is not here."""
        info = self._named.get(name or "")
        return None if info is None else info.digest

    def load(self, name: str, folder: Path) -> AdapterInfo:
        """Put an adapter on every rank. Raises as engine/adapters.Adapters.load, and RankFailed."""
        read(folder)  # what is wrong with its files is said of this folder, not of a copy
        info = msgspec.convert(self._send(name, folder).result(), AdapterInfo)
        made = replace(info, path=str(folder))
        self._named[name] = made
        return made

    def drop(self, name: str) -> int:
        """Forget a name; how many requests still use it. While no rank is up, none does."""
        if self._named.pop(name, None) is None:
            raise ModelNotFound(
                f"There is no adapter '{name}' here.", param="model", code="adapter_not_found"
            )
        with suppress(MlxServeError):  # ranks that are gone have no adapters
            return int(self._line.ask(Call.DROP, name).result())
        return 0

    def send_again(self) -> None:
        """To ranks that were started anew: all adapters, in front of the requests that name them."""
        for name, info in list(self._named.items()):
            try:
                if digest_of(Path(info.path)) != info.digest:
                    raise ModelInvalid(f"{info.path} has changed or is gone.")
                answer = self._send(name, Path(info.path))
            except (OSError, MlxServeError) as error:
                self._give_up(name, error)
            else:
                answer.add_done_callback(partial(self._hear, name))

    def _send(self, name: str, folder: Path) -> Future[Any]:
        parcel = next(self._parcels)
        for file in (CONFIG, PEFT_FILE, MLX_FILE):
            if (folder / file).is_file():
                with (folder / file).open("rb") as source:
                    while piece := source.read(PIECE_BYTES):
                        self._line.tell(Call.FILE, pack((parcel, file, piece)))
        return self._line.ask(Call.LOAD, parcel, name)

    def _hear(self, name: str, answer: Future[Any]) -> None:
        """How the sending again went. Ranks that have failed meanwhile are sent it once more."""
        error = answer.exception()
        if error is not None and not isinstance(error, EngineStopped):
            self._give_up(name, error)

    def _give_up(self, name: str, error: BaseException) -> None:
        self._named.pop(name, None)
        log.warning("The adapter '%s' is not on the ranks that were started anew: %s", name, error)


class Luggage:
    """Rank 0's side: files that have come, by parcel, until they are read."""

    def __init__(self) -> None:
        self._folders: dict[int, Path] = {}

    def store(self, parcel: int, name: str, piece: bytes) -> None:
        """Put a piece behind those of the file that have come before."""
        if parcel not in self._folders:
            self._folders[parcel] = Path(tempfile.mkdtemp(prefix="mlxserve-adapter-"))
        with (self._folders[parcel] / name).open("ab") as file:
            file.write(piece)

    @contextmanager
    def unpacked(self, parcel: int) -> Iterator[Path]:
        """The folder of a parcel's files; gone afterwards."""
        folder = self._folders.pop(parcel)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
