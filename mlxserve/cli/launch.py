"""`mlxserve launch`: one command on several Macs, or on several processes of this one.

Knows: flags, and which commands run on every rank. Starting and watching them is `distributed`'s.
"""

from __future__ import annotations

import shutil
import sys
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from mlxserve.cli.common import say
from mlxserve.distributed.supervise import Rules
from mlxserve.errors import UsageError

# Commands that run once, in front of ranks that have their model.
FRONTS = ("serve", "generate", "chat")
# What only ranks that serve a model heed.
FRONT_OPTIONS = ("split", "deadline", "sweep", "restarts")

if TYPE_CHECKING:
    from mlxserve.distributed.hosts import Host, Hostfile


@click.command(context_settings={"allow_interspersed_args": False})
@click.option("--hosts", type=click.Path(path_type=Path), metavar="FILE", help="A hostfile, as mlx.launch's.")
@click.option("-n", "count", type=click.IntRange(1, 64), metavar="N", help="So many ranks on this machine.")
@click.option(
    "--backend", type=click.Choice(["ring", "jaccl", "jaccl-ring"]), help="[default: the hostfile's]"
)
@click.option(
    "--split",
    metavar="tensor:2|pipeline:76,50",
    help="How serve, generate and chat divide the model.  [default: the plan's]",
)
@click.option(
    "--deadline",
    type=click.FloatRange(0.2),
    default=Rules().deadline_s,
    show_default=True,
    metavar="SECONDS",
    help="Silence or standstill of a rank that is a fault.",
)
@click.option(
    "--sweep",
    type=click.FloatRange(0.1),
    default=Rules().sweep_s,
    show_default=True,
    metavar="SECONDS",
    help="Look at every weight again within this time.",
)
@click.option(
    "--restarts",
    type=click.IntRange(0),
    default=Rules().restarts,
    show_default=True,
    help="Start ranks anew so often within ten minutes.",
)
@click.option("--verbose", is_flag=True, help="Show what every rank writes.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.pass_context
def launch(
    ctx: click.Context,
    hosts: Path | None,
    count: int | None,
    backend: str | None,
    split: str | None,
    deadline: float,
    sweep: float,
    restarts: int,
    verbose: bool,
    command: tuple[str, ...],
) -> None:
    """Run a command on several Macs.

    For example: mlxserve launch --hosts FILE -- serve --model MODEL

    COMMAND is serve, generate or chat, which run here with their model divided over the ranks; or any other of
    mlxserve's commands or a program, which run on every rank with MLX's distributed variables set, rank 0's
    output being shown. The exit code is 0 only if no rank failed for good.
    """
    from mlxserve.distributed.fleet import choose_backend
    from mlxserve.distributed.launch import run_everywhere, run_front

    _refuse_unheeded(ctx, command)
    hostfile = ranks(hosts, count)
    backend = choose_backend(hostfile, backend)
    if command[0] in FRONTS:
        rules = Rules(split, backend, deadline, sweep, restarts)
        argv = [sys.executable, "-m", "mlxserve", *command]
        code = run_front(hostfile, argv, rules, verbose=verbose, say=say)
    else:
        argv_on = lambda host: _argv(host, command)
        code = run_everywhere(hostfile, argv_on, backend=backend, verbose=verbose, say=say)
    if code:
        sys.exit(code)


def _refuse_unheeded(ctx: click.Context, command: tuple[str, ...]) -> None:
    """Raise UsageError for a command that is none, and for an option that this one would not heed."""
    from mlxserve.cli.main import COMMANDS

    name = command[0]
    near = get_close_matches(name, COMMANDS, n=1)
    if near and name not in COMMANDS and shutil.which(name) is None:
        raise UsageError(f"{name} is no command of mlxserve and no program here; did you mean {near[0]}?")
    said = [o for o in FRONT_OPTIONS if ctx.get_parameter_source(o) is ParameterSource.COMMANDLINE]
    if said and name not in FRONTS:
        own = "; give lora train its own --split behind it" if said[0] == "split" and name == "lora" else ""
        raise UsageError(
            f"--{said[0]} is for {', '.join(FRONTS[:-1])} and {FRONTS[-1]}; {name} runs on every rank as it is{own}.",
            param=said[0],
        )


def ranks(hosts: Path | None, count: int | None) -> Hostfile:
    """The machines to use: a hostfile's, or this one several times. Raises UsageError for none or both."""
    from mlxserve.distributed.hosts import Hostfile, local_hosts, read_hostfile

    if (hosts is None) == (count is None):
        raise UsageError("Give either --hosts FILE, or -n N for ranks on this machine.", param="hosts")
    return Hostfile(tuple(local_hosts(count))) if count is not None else read_hostfile(hosts or "")


def _argv(host: Host, command: tuple[str, ...]) -> list[str]:
    """The command line on a host: its own interpreter for our sub-commands and for Python files."""
    from mlxserve.cli.main import COMMANDS

    python = host.python or sys.executable
    if command[0] in COMMANDS:
        return [python, "-m", "mlxserve", *command]
    return [python, *command] if command[0].endswith(".py") else list(command)
