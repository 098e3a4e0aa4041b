"""The command itself: fast to start, lazy, and one sentence for every error."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from types import ModuleType

import click
import pytest

from mlxserve import __version__, errors
from mlxserve.cli.main import COMMANDS, Entry, cli, main
from tests.conftest import ROOT

HEAVY = {"mlx", "mlx_lm", "transformers", "tokenizers", "rich", "huggingface_hub", "numpy", "jinja2"}


def _python(code: str, **settings: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    arguments = [sys.executable, "-c", code]
    return subprocess.run(arguments, capture_output=True, text=True, env=environment, check=False, **settings)


def _command(monkeypatch: pytest.MonkeyPatch, body: Callable[[], None]) -> None:
    """Put a sub-command `probe` that runs `body` into the table."""
    module = ModuleType("probe_command")
    module.probe = click.command("probe")(body)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "probe_command", module)
    monkeypatch.setitem(COMMANDS, "probe", Entry("probe_command", "probe", "Try something."))


@pytest.mark.parametrize("argument", ["--help", "--version"])
def test_start_loads_nothing_heavy(argument: str) -> None:
    code = (
        "import sys; from mlxserve.cli.main import main; code = main([sys.argv[1]]);"
        f"print(sorted({HEAVY!r} & {{name.split('.')[0] for name in sys.modules}}), file=sys.stderr);"
        "sys.exit(code)"
    )
    done = _python(code.replace("sys.argv[1]", repr(argument)))
    assert (done.returncode, done.stderr.strip()) == (0, "[]")
    assert "mlxserve" in done.stdout


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_help_table_says_what_the_command_says(name: str) -> None:
    entry = COMMANDS[name]
    command = getattr(import_module(entry.module), entry.attribute)
    assert command.get_short_help_str(limit=200) == entry.help


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"mlxserve {__version__}\n"


def test_no_arguments_is_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert capsys.readouterr().out.startswith("Usage: mlxserve")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.UsageError("The seed is wrong."), 2),
        (errors.ModelNotFound("There is no model 'x'."), 3),
        (errors.DoesNotFit("9 GiB of 8 GiB.", needed_bytes=9, available_bytes=8), 4),
        (errors.DependencyMissing("MLX is absent."), 69),
    ],
)
def test_an_error_is_one_sentence_and_its_exit_code(
    error: errors.MlxServeError,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def body() -> None:
        raise error

    _command(monkeypatch, body)
    assert main(["probe"]) == code
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", f"mlxserve: {error.message}\n")


def test_an_unforeseen_error_names_debug(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def body() -> None:
        raise ValueError("two\nlines")

    _command(monkeypatch, body)
    assert main(["probe"]) == 1
    assert capsys.readouterr().err == (
        "mlxserve: ValueError: two lines (run with --debug for the traceback)\n"
    )


@pytest.mark.parametrize("arguments", [["--debug", "probe"], ["probe", "--debug"]])
def test_debug_shows_the_traceback(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def body() -> None:
        raise errors.ModelInvalid("Broken.")

    _command(monkeypatch, body)
    assert main(arguments) == 3
    said = capsys.readouterr().err
    assert "Traceback" in said and said.endswith("mlxserve: Broken.\n")


def test_ctrl_c_is_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def body() -> None:
        raise KeyboardInterrupt

    _command(monkeypatch, body)
    assert main(["probe"]) == 130
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["prboe"], "There is no command 'prboe'; did you mean 'probe'? See 'mlxserve --help'."),
        (["probe", "--what"], "No such option"),
    ],
)
def test_wrong_usage_is_one_line(
    arguments: list[str],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _command(monkeypatch, lambda: None)
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1 and said.startswith("mlxserve: ")


def test_a_reader_that_leaves_is_no_error() -> None:
    code = (
        "import sys, click; from mlxserve.cli.main import main, cli\n"
        "@cli.command('flood')\n"
        "def flood():\n"
        "    for _ in range(100_000): click.echo('text ' * 20)\n"
        "from mlxserve.cli.main import COMMANDS, Entry\n"
        "COMMANDS['flood'] = Entry('__main__', 'flood', '')\n"
        "sys.exit(main(['flood']))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() == 1


def test_the_entry_point_is_the_function() -> None:
    assert callable(main) and isinstance(cli, click.Group)
    done = subprocess.run(
        [sys.executable, "-m", "mlxserve", "--version"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.stdout == f"mlxserve {__version__}\n"
