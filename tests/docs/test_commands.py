"""docs/commands/ says what the commands say now."""

from __future__ import annotations

import importlib.util
import re
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from mlxserve.cli.main import COMMANDS
from tests.conftest import ROOT

FOLDER = ROOT / "docs" / "commands"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_docs", ROOT / "scripts" / "make_docs.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pages_are_up_to_date(script: ModuleType) -> None:
    assert script.differences() == [], "run 'make docs'"


def test_a_change_is_noticed_and_written(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(script, "FOLDER", tmp_path)
    (tmp_path / "gone.md").write_text("a command that is no more")
    monkeypatch.setattr("sys.argv", ["make_docs.py", "--check"])
    assert script.main() == 1
    monkeypatch.setattr("sys.argv", ["make_docs.py"])
    assert script.main() == 0
    assert script.differences() == []
    assert {path.stem for path in tmp_path.iterdir()} == {*COMMANDS, "README"}


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_a_page_names_every_option_of_its_command(name: str) -> None:
    """Against click's own parameters, not the generator's reading of them."""
    command = getattr(import_module(COMMANDS[name].module), COMMANDS[name].attribute)
    page = (FOLDER / f"{name}.md").read_text()
    children = getattr(command, "commands", {}).values()
    for one in (command, *children):
        for parameter in one.params:
            for flag in (*parameter.opts, *parameter.secondary_opts):
                if flag.startswith("-") and flag != "--debug":
                    assert re.search(rf"[`, ]{re.escape(flag)}[`, ]", page), flag
