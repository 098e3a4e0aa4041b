"""What the commands of `mlxserve lora` share: a run's settings, and recipes.

Knows: the terminal, and the trainer's settings. Does not know what the commands do.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from mlxserve.errors import UsageError
from mlxserve.lora.config import read_config

Command = Callable[..., Any]
FOLDER = click.Path(path_type=Path)


def require_model(name: str) -> None:
    """Raise UsageError unless a model is named."""
    if not name:
        raise UsageError("No model is named; set model in the YAML or with --set model=NAME.", param="model")


def run_options(command: Command) -> Command:
    """`-c` and `--set`; passed on as `config`, a RunConfig."""

    @click.option(
        "-c", "--config", "file", type=FOLDER, metavar="FILE", help="A run's YAML, or a recipe's name."
    )
    @click.option(
        "--set",
        "settings",
        multiple=True,
        metavar="KEY=VALUE",
        help="Put a setting over the file's; repeatable.",
    )
    def with_config(*args: Any, file: Path | None, settings: tuple[str, ...], **others: Any) -> Any:
        return command(*args, config=read_config(find_recipe(file), settings), **others)

    with_config.__doc__ = command.__doc__
    with_config.__name__ = command.__name__
    with_config.__click_params__ = (  # type: ignore[attr-defined]
        getattr(command, "__click_params__", []) + with_config.__click_params__  # type: ignore[attr-defined]
    )
    return with_config


def find_recipe(file: Path | None) -> Path | None:
    """The file itself, or the recipe of that name in lora/recipes."""
    if file is None or file.exists():
        return file
    known = recipes()
    named = known.get(file.name.removesuffix(".yaml"))
    if named is None:
        raise UsageError(
            f"There is no file {file} and no recipe of that name; there are {', '.join(known)}.",
            param="config",
        )
    return named


def recipes() -> dict[str, Path]:
    """The settings files that come with the trainer, by name."""
    from mlxserve import lora as package

    found = sorted((Path(str(package.__file__)).parent / "recipes").glob("*.yaml"))
    return {path.stem: path for path in found}
