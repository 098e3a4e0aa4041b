"""Shell completion: the scripts are the shells' own language, and Tab finds commands, options and values."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from mlxserve.cli.main import main
from tests.cli.conftest import Run


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_is_what_the_shell_reads(run: Run, shell: str) -> None:
    said = run("completion", shell)
    assert said.code == 0 and f"_MLXSERVE_COMPLETE={shell}_complete" in said.out
    if program := shutil.which(shell):
        done = subprocess.run([program, "-n"], input=said.out, text=True, capture_output=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("line", "word", "found"),
    [
        ("mlxserve ben", "1", {"bench"}),
        ("mlxserve models ", "2", {"list", "pull", "rm", "show"}),
        ("mlxserve generate --temp", "2", {"--temperature"}),
        ("mlxserve generate --kv-bits ", "3", {"16", "8", "4"}),
        ("mlxserve completion z", "2", {"zsh"}),
    ],
)
def test_tab(
    line: str,
    word: str,
    found: set[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("_MLXSERVE_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", word)
    main([])
    assert {row.split(",")[1] for row in capsys.readouterr().out.split()} == found


def test_a_shell_that_nobody_knows(run: Run) -> None:
    said = run("completion", "cmd")
    assert said.code == 2 and "'bash', 'zsh', 'fish'" in said.err
