"""The README's commands, read out of it and run: `sh` blocks by bash, `python` blocks by Python.

They run unchanged in a folder where `smollm2` is a tiny random model, except that the port is a free one.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests import tiny
from tests.conftest import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(sh|python)\n(.*?)^```$", README, flags=re.M | re.S)
PORT = "8080"


def title(block: tuple[str, str]) -> str:
    """The heading it stands under."""
    before = README[: README.index(block[1])]
    return re.findall(r"^## (.+)$", before, flags=re.M)[-1].lower().replace(" ", "-")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a reader would stand: a model, questions, chats to train on, and `mlxserve` on the path."""
    home = tmp_path_factory.mktemp("reader")
    tiny.write(home / "smollm2", "llama", num_hidden_layers=2)
    rows = [{"prompt": "Name a colour."}, {"id": "b", "prompt": "Name a fruit.", "max_tokens": 3}]
    (home / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (home / "data").mkdir()
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]
    chats = ({"messages": [{"role": "user", "content": f"Hi {n}"}, talk[1]]} for n in range(40))
    lines = [json.dumps(chat) + "\n" for chat in chats]
    (home / "data" / "train.jsonl").write_text("".join(lines))
    (home / "data" / "test.jsonl").write_text("".join(lines[:2]))
    program = home / "bin" / "mlxserve"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m mlxserve "$@"\n')
    program.chmod(0o755)
    return home


def free_port() -> str:
    with socket.socket() as line:
        line.bind(("127.0.0.1", 0))
        return str(line.getsockname()[1])


@pytest.mark.parametrize("block", BLOCKS, ids=title)
def test_it_runs_as_it_stands(block: tuple[str, str], folder: Path) -> None:
    language, text = block
    program = ["bash", "-euo", "pipefail", "-c"] if language == "sh" else [sys.executable, "-c"]
    port = free_port()
    settings = {
        **os.environ,
        "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "HOME": str(folder),
        "HF_HUB_OFFLINE": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    if "serve" in text:
        text = text.replace("mlxserve serve ", f"mlxserve serve --port {port} ").replace(
            f":{PORT}", f":{port}"
        )
    done = subprocess.run(
        [*program, text], cwd=folder, env=settings, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-2000:]


def test_every_part_of_the_tour_has_a_block() -> None:
    assert {title(block) for block in BLOCKS} >= {
        "generate",
        "serve",
        "models",
        "fine-tune",
        "measure",
        "python",
    }


def test_files_that_are_named_exist() -> None:
    for target in re.findall(r"\]\(([^)#]+)", README):
        if "://" not in target:
            assert (ROOT / target).exists(), target


def test_the_comparison_gives_a_source_for_every_claim() -> None:
    """A cell about somebody else's program has a source in its own list, or says that nobody looked."""
    table = re.search(r"^\| \| mlxserve \|.*?\n\n", README, flags=re.M | re.S)
    assert table is not None
    header, _, *rows = (line.strip("|").split("|") for line in table[0].strip().split("\n"))
    listed = set(re.findall(r"^(\d+)\. ", README, flags=re.M))
    cited = set(re.findall(r"\[(\d+)\]", table[0]))
    assert cited == listed
    assert all(len(row) == len(header) for row in rows)
    for row in rows:
        for cell in row[2:]:
            assert "[" in cell or cell.strip() == "not checked", f"{row[0].strip()}: {cell}"
