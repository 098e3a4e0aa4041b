"""For tests that start real processes: the command line, a stand-in for ssh, and who is still alive.

Knows: /proc and ps. Every started process carries a mark in its environment, by which orphans are found.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.conftest import ROOT

WAIT_S = 120.0  # a bound for hanging only: no test asserts how long something takes
MARK = "MLXSERVE_TEST_MARK"

FAKE_SSH = """#!/bin/sh
# ssh without a network: 'mac*' is this machine, 'old*' runs another mlxserve, 'bare*' has none.
while [ "$1" != "--" ]; do shift; done
host=$2
shift 2
case "$host" in
  mac*) echo "Welcome to $host"; exec sh -c "$*" ;;
  old*) exec {python} -c "import mlxserve, runpy; mlxserve.__version__ = '0.0.1'
runpy.run_module('mlxserve.distributed.agent', run_name='__main__')" ;;
  bare*) echo "{python}: No module named mlxserve" >&2; exit 1 ;;
  *) echo "ssh: connect to host $host port 22: No route to host" >&2; exit 255 ;;
esac
"""


class Marked:
    """A launch whose processes, all of them, can be found again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mark = uuid.uuid4().hex
        ssh = folder / "bin" / "ssh"
        ssh.parent.mkdir(exist_ok=True)
        ssh.write_text(FAKE_SSH.format(python=sys.executable))
        ssh.chmod(ssh.stat().st_mode | stat.S_IXUSR)
        self.env = {
            **os.environ,
            MARK: self.mark,
            "PATH": f"{ssh.parent}:{os.environ['PATH']}",
            "PYTHONPATH": f"{folder}:{ROOT}",
            "OPENBLAS_NUM_THREADS": "1",
        }

    def command(self, *args: str) -> list[str]:
        return [sys.executable, "-m", "mlxserve", *args]

    def run(self, *args: str, **more: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*args),
            env=self.env,
            capture_output=True,
            text=True,
            timeout=WAIT_S,
            check=False,
            cwd=self.folder,
            **more,
        )

    def start(self, *args: str, **more: Any) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command(*args),
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.folder,
            **more,
        )

    def hostfile(self, *names: str, **extra: Any) -> str:
        path = self.folder / "hosts.json"
        path.write_text(
            json.dumps([{"ssh": name, "ips": ["127.0.0.1"], "name": name, **extra} for name in names])
        )
        return str(path)

    def alive(self) -> list[int]:
        """Process ids that carry the mark and have not ended."""
        return [pid for pid in _all_pids() if self.mark in _environment(pid) and _state(pid) != "Z"]

    def nobody_is_left(self) -> None:
        """Every marked process ends by itself."""
        until(lambda: not self.alive())

    def clean(self) -> None:
        for pid in self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)


def until(true: Callable[[], Any], what: str = "it") -> Any:
    """Wait until something holds, and return it."""
    end = time.monotonic() + WAIT_S
    while not (found := true()):
        assert time.monotonic() < end, f"{what} did not happen"
        time.sleep(0.02)
    return found


def _all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _environment(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/environ").read_text(errors="replace")
    except OSError:
        return ""


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"
