"""The command `mlxserve`: which sub-commands there are, and how an error leaves the process.

Knows: the table of sub-commands, exit codes, and what a person is told when something goes wrong.
Does not know: what a sub-command does. Its file is imported only when it is run, so that `--help`
loads neither MLX nor transformers nor rich.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple

import click

from mlxserve import __version__
from mlxserve.errors import MlxServeError

INTERRUPTED = 130


class Entry(NamedTuple):
    """Where a sub-command lives, and its line in `mlxserve --help`."""

    module: str
    attribute: str
    help: str


COMMANDS = {
    "generate": Entry("mlxserve.cli.generate", "generate", "Write text for one or many prompts."),
    "chat": Entry("mlxserve.cli.chat", "chat", "Hold a conversation in the terminal."),
    "lora": Entry(
        "mlxserve.cli.lora",
        "lora",
        "Fine-tune models: LoRA, QLoRA, DoRA and full; evaluate, fuse and exchange adapters.",
    ),
    "serve": Entry("mlxserve.cli.serve", "serve", "Serve models over HTTP."),
    "launch": Entry("mlxserve.cli.launch", "launch", "Run a command on several Macs."),
    "service": Entry(
        "mlxserve.cli.service", "service", "Run the server in the background of a Mac session (launchd)."
    ),
    "bench": Entry("mlxserve.cli.bench", "bench", "Measure a model here, or any OpenAI endpoint."),
    "doctor": Entry(
        "mlxserve.cli.doctor", "doctor", "Look at this machine, or at several, and say what would help."
    ),
    "kernels": Entry("mlxserve.cli.kernels", "kernels", "List and test this program's Metal kernels."),
    "plan": Entry("mlxserve.cli.plan", "plan", "Show how MODEL would be divided over several Macs."),
    "models": Entry("mlxserve.cli.models", "models", "List, fetch, show and remove models."),
    "completion": Entry(
        "mlxserve.cli.completion", "completion", "Print a script that lets Tab complete in a shell."
    ),
}


@dataclass
class State:
    """What the options before and after a sub-command set for the whole run."""

    debug: bool = bool(os.environ.get("MLXSERVE_DEBUG"))


class LazyGroup(click.Group):
    """A group whose sub-commands are named in a table and imported when they are run."""

    def __init__(self, *args: Any, entries: dict[str, Entry], **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.entries = entries

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.entries)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        entry = self.entries.get(name)
        if entry is None:
            return None
        command: click.Command = getattr(import_module(entry.module), entry.attribute)
        _accept_debug(command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and args[0] not in self.entries:
            ctx.fail(_no_such_command(args[0], list(self.entries)))
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = [(name, entry.help) for name, entry in self.entries.items()]
        if rows:
            with formatter.section("Commands"):
                formatter.write_dl(rows)


def _no_such_command(name: str, known: list[str]) -> str:
    from difflib import get_close_matches

    near = get_close_matches(name, known, n=1)
    return f"There is no command '{name}'" + (f"; did you mean '{near[0]}'?" if near else ".")


def _set_debug(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    if value:
        ctx.find_root().ensure_object(State).debug = True


def _debug_option() -> click.Option:
    return click.Option(
        ["--debug"],
        is_flag=True,
        expose_value=False,
        is_eager=True,
        callback=_set_debug,
        help="Show tracebacks.",
    )


def _accept_debug(command: click.Command) -> None:
    """Let `--debug` stand after the sub-command too."""
    if not any(parameter.name == "debug" for parameter in command.params):
        command.params.append(_debug_option())
    if isinstance(command, click.Group):
        for child in command.commands.values():
            _accept_debug(child)


@click.group(
    cls=LazyGroup,
    entries=COMMANDS,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, "-V", "--version", prog_name="mlxserve", message="%(prog)s %(version)s")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Run, serve and fine-tune language models on Apple Silicon."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


cli.params.append(_debug_option())


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code; errors become one sentence on standard error."""
    state = State()
    try:
        result = cli.main(args, prog_name="mlxserve", standalone_mode=False, obj=state)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else 1
    except BrokenPipeError:
        return _reader_gone()
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        return 0
    except click.ClickException as error:
        return _complain(_words(error), error.exit_code)
    except MlxServeError as error:
        return _complain(error.message, error.exit_code, state.debug)
    except Exception as error:  # the last line of defence: whatever it is, it is one sentence
        kind = type(error).__name__
        hint = "" if state.debug else " (run with --debug for the traceback)"
        return _complain(f"{kind}: {' '.join(str(error).split()) or 'no message'}{hint}", 1, state.debug)


def _complain(sentence: str, exit_code: int, debug: bool = False) -> int:
    if debug:
        traceback.print_exc()
    click.echo(f"mlxserve: {sentence}", err=True)
    return exit_code


def _words(error: click.ClickException) -> str:
    """Click's message, with the way to the command's help."""
    message = error.format_message()
    ctx = getattr(error, "ctx", None)
    return f"{message} See '{ctx.command_path} --help'." if ctx else message


def _reader_gone() -> int:
    """Whoever read our output has closed it, as `head` does: leave quietly."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    return 1


if __name__ == "__main__":
    sys.exit(main())
