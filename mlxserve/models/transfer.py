"""One large file over HTTP, which goes on where it stopped, also in a later run.

Knows: HTTP ranges, the file `<target>.incomplete` that holds what has arrived, and its checksum. The
session, with its login and its offline switch, is huggingface_hub's.
Does not know: repositories or the cache's layout (`hub`, `cached`).
"""

from __future__ import annotations

import fcntl
import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from mlxserve.errors import ModelInvalid

Progress = Callable[[int, int], None]  # (bytes present, bytes in all)

CHUNK = 1 << 20
ATTEMPTS = 5  # in a row without a new byte
PAUSE_S = 1.0


class Stopped(Exception):
    """Another part of the download failed, so this one was given up; what has arrived is kept."""


class Meter:
    """Adds up what several threads receive and tells `progress`; `stop` asks them all to end."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self.total = total
        self.done = 0
        self._progress = progress
        self._lock = threading.Lock()
        self._stop = threading.Event()

    def add(self, nbytes: int) -> None:
        """Count `nbytes` more (or fewer, when an attempt starts over). Raises Stopped after `stop`."""
        if self._stop.is_set():
            raise Stopped
        with self._lock:
            self.done += nbytes
            if self._progress:
                self._progress(self.done, self.total)

    def stop(self) -> None:
        self._stop.set()


@dataclass(frozen=True, slots=True)
class Download:
    """A file to bring: its address, how long it is, its SHA-256 in hex, and where it goes."""

    url: str
    headers: dict[str, str]
    size: int
    sha256: str
    target: Path

    @property
    def partial(self) -> Path:
        return self.target.with_name(self.target.name + ".incomplete")

    @property
    def present(self) -> int:
        """Bytes that have already arrived."""
        if self.target.exists():
            return self.size
        return self.partial.stat().st_size if self.partial.exists() else 0


class _Partial:
    """What has arrived of a file: the bytes on disk and their checksum so far."""

    def __init__(self, file: BinaryIO, meter: Meter) -> None:
        self.file = file
        self.meter = meter
        self.size = 0
        self._digest = hashlib.sha256()
        self._read_on_disk()

    def _read_on_disk(self) -> None:
        self.file.seek(0)
        while piece := self.file.read(CHUNK):
            self._digest.update(piece)
            self.size += len(piece)

    def append(self, piece: bytes) -> None:
        self.meter.add(len(piece))
        self.file.write(piece)
        self._digest.update(piece)
        self.size += len(piece)

    def restart(self) -> None:
        self.meter.add(-self.size)
        self.file.truncate(0)
        self._digest = hashlib.sha256()
        self.size = 0

    def sha256(self) -> str:
        self.file.flush()
        return self._digest.hexdigest()


def bring(download: Download, meter: Meter) -> None:
    """Make `download.target` exist, resuming what an earlier run left.

    Nothing stands at the target before all bytes are there and their checksum is right. Raises
    ModelInvalid for a wrong checksum (and throws the bytes away), OSError when the disk is full, and
    the session's errors once several attempts in a row brought nothing.
    """
    download.target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(download.partial) as file:
        if download.target.exists():  # another process was faster
            meter.add(download.size)
            return
        partial = _Partial(file, meter)
        _receive_all(download, partial)
        if partial.sha256() != download.sha256:
            download.partial.unlink()
            raise ModelInvalid(f"{download.url} arrived damaged: its checksum differs; fetch it again.")
        download.partial.replace(download.target)


@contextmanager
def _locked(path: Path) -> Iterator[BinaryIO]:
    """The file opened for reading and appending, held against other processes."""
    with path.open("a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file


def _receive_all(download: Download, partial: _Partial) -> None:
    """Attempt after attempt until the file is whole; an attempt that brought bytes starts the count anew."""
    failures = 0
    while partial.size < download.size:
        before = partial.size
        error = _receive(download, partial)
        failures = 0 if partial.size > before else failures + 1
        if failures >= ATTEMPTS:
            raise error or ModelInvalid(f"{download.url} ended before its {download.size:,} bytes.")
        if error:
            time.sleep(PAUSE_S)


def _receive(download: Download, partial: _Partial) -> Exception | None:
    """One request for the bytes that are missing; the error that broke it off, if it may pass by itself."""
    from huggingface_hub.errors import HfHubHTTPError, HTTPError

    try:
        _request(download, partial)
    except HfHubHTTPError as error:
        if error.response.status_code < 500 and error.response.status_code != 429:
            raise
        return error
    except HTTPError as error:
        return error
    return None


def _request(download: Download, partial: _Partial) -> None:
    from huggingface_hub import constants, get_session
    from huggingface_hub.utils import hf_raise_for_status

    headers = {**download.headers, "Accept-Encoding": "identity"}
    if partial.size:
        headers["Range"] = f"bytes={partial.size}-"
    timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
    with get_session().stream("GET", download.url, headers=headers, timeout=timeout) as response:
        hf_raise_for_status(response)
        if partial.size and response.status_code != 206:  # a server without ranges sends all of it again
            partial.restart()
        for piece in response.iter_bytes(CHUNK):
            partial.append(piece)
