"""Writes docs/commands/: a page a command, from what the commands say of themselves.

    python scripts/make_docs.py           # write
    python scripts/make_docs.py --check   # exit 1 if a page is missing, too many or out of date

Knows: click's commands and Markdown. Every word of a page stands in the command's own help.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import click

from mlxserve.cli.main import COMMANDS, cli

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "commands"
EVERYWHERE = {"--debug", "--help"}  # told once a page
NOTE = "<!-- Written by scripts/make_docs.py from `mlxserve{name} --help`; change it there. -->"


def pages() -> dict[str, str]:
    """File names and contents: README.md, the list, and NAME.md for each command."""
    root = cli.make_context("mlxserve", [], resilient_parsing=True)
    found = {"README.md": _index()}
    for name in COMMANDS:
        command = cli.get_command(root, name)
        assert command is not None
        lines = [NOTE.format(name=f" {name}"), "", *_section(command, root, name, 1)]
        found[f"{name}.md"] = "\n".join(lines).rstrip() + "\n"
    return found


def _index() -> str:
    lines = [NOTE.format(name=""), "", "# Commands", "", "| command | what it does |", "|---|---|"]
    lines += [f"| [`mlxserve {name}`]({name}.md) | {entry.help} |" for name, entry in COMMANDS.items()]
    return "\n".join([*lines, ""])


def _section(command: click.Command, parent: click.Context, name: str, level: int) -> Iterator[str]:
    """A command's heading, usage, words and options, and its sub-commands a level below."""
    ctx = command.make_context(name, [], parent, resilient_parsing=True)
    yield f"{'#' * level} {ctx.command_path}"
    yield ""
    yield from ("```text", _usage(command, ctx), "```", "")
    yield from _words(command.help or "")
    shown = [option for option in _options(command, ctx) if level == 1 or not EVERYWHERE & {*option.opts}]
    rows = [row for option in shown if (row := option.get_help_record(ctx))]
    if rows:
        yield from ("| option | |", "|---|---|")
        yield from (f"| `{_cell(names)}` | {_cell(words)} |" for names, words in rows)
        yield ""
    if isinstance(command, click.Group):
        for child in command.list_commands(ctx):
            found = command.get_command(ctx, child)
            if found is not None:
                yield from _section(found, ctx, child, level + 1)


def _options(command: click.Command, ctx: click.Context) -> list[click.Option]:
    return [parameter for parameter in command.get_params(ctx) if isinstance(parameter, click.Option)]


def _usage(command: click.Command, ctx: click.Context) -> str:
    return " ".join([ctx.command_path, *command.collect_usage_pieces(ctx)])


def _words(text: str) -> Iterator[str]:
    """A docstring's paragraphs; one after `\\b` keeps its lines."""
    for paragraph in text.replace("\r", "").split("\n\n"):
        lines = [line.strip() for line in paragraph.strip().split("\n")]
        if lines[0] == "\b":
            yield from ("```text", *lines[1:], "```", "")
        elif lines != [""]:
            yield from (*lines, "")


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def differences() -> list[str]:
    """Names of pages that are missing, too many, or not what the commands say now."""
    wanted = pages()
    present = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.md")}
    return sorted(name for name in {*wanted, *present} if wanted.get(name) != present.get(name))


def main() -> int:
    wrong = differences()
    if "--check" in sys.argv[1:]:
        for name in wrong:
            print(f"docs/commands/{name} is out of date; run 'make docs'", file=sys.stderr)
        return bool(wrong)
    FOLDER.mkdir(parents=True, exist_ok=True)
    wanted = pages()
    for name in wrong:
        if name in wanted:
            (FOLDER / name).write_text(wanted[name], encoding="utf-8")
        else:
            (FOLDER / name).unlink()
    print(f"{len(wrong)} of {len(wanted)} pages written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
