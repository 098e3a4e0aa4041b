"""The very end of a thread that used MLX.

Knows: how to see on Linux and macOS that a thread is gone. Knows nothing of engines.

Python's `join` returns when the thread's function has ended. After that, MLX's thread-local objects are
destroyed on it, and they need the interpreter; one that is already shutting down aborts the whole process there
("terminate called without an active exception", exit code 134).
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from pathlib import Path

STEP_S = 0.001


def join_fully(thread: threading.Thread, limit_s: float = 5.0) -> None:
    """Join a thread and wait, `limit_s` at most, until its thread-local objects are destroyed too."""
    thread.join()
    end = time.monotonic() + limit_s
    while _is_there(thread) and time.monotonic() < end:
        time.sleep(STEP_S)  # lets go of the interpreter, which the other thread waits for


def _is_there(thread: threading.Thread) -> bool:
    """True while the system still has the thread."""
    if sys.platform.startswith("linux"):
        return Path(f"/proc/self/task/{thread.native_id}").exists()
    if sys.platform == "darwin" and thread.ident is not None:
        try:
            signal.pthread_kill(thread.ident, 0)
        except ProcessLookupError:
            return False
        return True
    return False
