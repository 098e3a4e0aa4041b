"""A closed engine leaves nothing behind that could abort the process on its way out."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from mlxserve.engine.threads import join_fully
from tests.conftest import ROOT

PROGRAM = """
import sys
from mlxserve import LLM, SamplingParams
llm = LLM(sys.argv[1])
llm.generate("hi", SamplingParams(max_tokens=4))
llm.close()
"""


def test_a_thread_is_gone_for_the_system_too() -> None:
    thread = threading.Thread(target=lambda: None)
    thread.start()
    join_fully(thread)
    assert not thread.is_alive()
    if sys.platform.startswith("linux"):
        assert not Path(f"/proc/self/task/{thread.native_id}").exists()


@pytest.mark.parametrize("run", range(3))
def test_closing_and_leaving_at_once_is_no_abort(run: int, tiny_llama: Path) -> None:
    """It was one on a busy machine, nearly always: MLX's thread-local objects met a dying interpreter."""
    settings = {**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tiny_llama)],
        capture_output=True,
        text=True,
        env=settings,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
