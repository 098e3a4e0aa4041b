"""Keeps a Mac awake while it works, by the system's own `caffeinate`.

Knows: that work is going on. Does not know what work. Without caffeinate it does nothing.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator

log = logging.getLogger("mlxserve.server")


class Awake:
    """Runs caffeinate while anyone holds it. `-w` ends it with this process, however that ends."""

    def __init__(self, enabled: bool | None = None) -> None:
        wanted = sys.platform == "darwin" if enabled is None else enabled
        self._program = shutil.which("caffeinate") if wanted else None
        self._process: subprocess.Popen[bytes] | None = None
        self._holders = 0

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """The machine does not fall asleep by itself inside the block."""
        self._holders += 1
        if self._holders == 1:
            self._start()
        try:
            yield
        finally:
            self._holders -= 1
            if self._holders == 0:
                self._stop()

    def _start(self) -> None:
        if self._program is None:
            return
        command = [self._program, "-i", "-w", str(os.getpid())]
        try:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        except OSError as error:
            log.warning("cannot keep this machine awake: %s", error)
            self._program = None

    def _stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
            self._process = None
