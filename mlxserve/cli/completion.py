"""`mlxserve completion`: what a shell needs so that Tab completes commands, options and their values.

Knows: click's own completion (https://click.palletsprojects.com/en/stable/shell-completion/).
"""

from __future__ import annotations

import click
from click.shell_completion import BashComplete, FishComplete, ZshComplete

SHELLS = {"bash": BashComplete, "zsh": ZshComplete, "fish": FishComplete}
VARIABLE = "_MLXSERVE_COMPLETE"


@click.command()
@click.argument("shell", type=click.Choice(list(SHELLS)))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print a script that lets Tab complete in a shell.

    \b
    bash:  mlxserve completion bash >> ~/.bashrc
    zsh:   mlxserve completion zsh >> ~/.zshrc
    fish:  mlxserve completion fish > ~/.config/fish/completions/mlxserve.fish
    """
    maker = SHELLS[shell](ctx.find_root().command, {}, "mlxserve", VARIABLE)
    click.echo(maker.source_template % maker.source_vars())
