"""`mlxserve launch`: one command on several Macs, or on several processes of this one.

Knows: flags, and which commands run on every rank. Starting and watching them is `distributed`'s.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mlxserve.cli.common import say
from mlxserve.errors import UsageError

if TYPE_CHECKING:
    from mlxserve.distributed.hosts import Host, Hostfile


@click.command(context_settings={"allow_interspersed_args": False})
@click.option("--hosts", type=click.Path(path_type=Path), metavar="FILE", help="A hostfile, as mlx.launch's.")
@click.option("-n", "count", type=click.IntRange(1, 64), metavar="N", help="So many ranks on this machine.")
@click.option(
    "--backend", type=click.Choice(["ring", "jaccl", "jaccl-ring"]), help="[default: the hostfile's]"
)
@click.option("--verbose", is_flag=True, help="Show what every rank writes.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def launch(
    hosts: Path | None, count: int | None, backend: str | None, verbose: bool, command: tuple[str, ...]
) -> None:
    """Run a command on several Macs.

    For example: mlxserve launch --hosts FILE -- lora train …

    COMMAND is one of mlxserve's own, or a program, which then runs on every rank with MLX's distributed
    variables set. Rank 0's output is shown; the exit code is 0 only if every rank's is.
    """
    from mlxserve.distributed.launch import run_everywhere

    code = run_everywhere(
        ranks(hosts, count), lambda host: _argv(host, command), backend=backend, verbose=verbose, say=say
    )
    if code:
        sys.exit(code)


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
