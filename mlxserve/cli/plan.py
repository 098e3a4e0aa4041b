"""`mlxserve plan`: which machine would hold what of a model, whether it fits, and how fast it might be.

Nothing is loaded and nobody is connected to; of a model on the Hub only configuration and headers are read.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mlxserve.cli.options import KV_BITS, QUANTIZE_BITS
from mlxserve.config import EngineConfig
from mlxserve.distributed.plan import DEFAULT_CONTEXT
from mlxserve.errors import DoesNotFit, UsageError

if TYPE_CHECKING:
    from mlxserve.distributed.facts import Facts
    from mlxserve.distributed.hosts import Host
    from mlxserve.distributed.plan import Plan
    from mlxserve.distributed.split import Mode

TRY_BITS = (8, 6, 4, 3)


@click.command()
@click.argument("model")
@click.option(
    "--hosts",
    "hostfile",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="A hostfile, as mlx.launch's.",
)
@click.option(
    "--host",
    "words",
    multiple=True,
    metavar="MEMORY:CHIP",
    help="Such as 192GB:m3-ultra or 4x96GB:m3-ultra; repeat it.",
)
@click.option(
    "--context",
    type=click.IntRange(min=1),
    default=DEFAULT_CONTEXT,
    show_default=True,
    metavar="TOKENS",
    help="Tokens that a sequence is to hold.",
)
@click.option(
    "--sequences",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    metavar="N",
    help="Sequences of that length at once.",
)
@click.option(
    "--quantize", type=click.Choice(QUANTIZE_BITS), help="Bits of the weights, quantised while loading."
)
@click.option("--kv-bits", type=click.Choice(KV_BITS), default=str(EngineConfig().kv_bits), show_default=True)
@click.option(
    "--split",
    metavar="SPLIT",
    help="tensor, pipeline, tensor:2, pipeline:2 or pipeline:76,50; the fastest that fits otherwise.",
)
@click.option(
    "--link", type=click.Choice(["rdma", "tcp"]), help="Between the hosts; as the hostfile says, else tcp."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.pass_context
def plan(
    ctx: click.Context,
    model: str,
    hostfile: Path | None,
    words: tuple[str, ...],
    context: int,
    sequences: int,
    quantize: str | None,
    kv_bits: str,
    split: str | None,
    link: str | None,
    as_json: bool,
) -> None:
    """Show how MODEL would be divided over several Macs.

    MODEL is a path, an alias, a Hub name, or a well-known name such as llama-3.1-405b. Ends with code 4
    where nothing fits.
    """
    from mlxserve.models.backend import check_backend

    check_backend()
    hosts, found_link = _hosts(hostfile, words)
    made = _plan(
        model,
        hosts,
        context,
        sequences,
        int(quantize) if quantize else None,
        int(kv_bits),
        split,
        link or found_link,
    )
    click.echo(made.to_json() if as_json else _shown(made), nl=as_json or not sys.stdout.isatty())
    if not made.fits:
        ctx.exit(DoesNotFit.exit_code)


def _hosts(hostfile: Path | None, words: tuple[str, ...]) -> tuple[list[Host], str]:
    """The machines and the link between them, from a file or from words."""
    from mlxserve.distributed.hosts import parse_hosts, read_hostfile

    if bool(hostfile) == bool(words):
        raise UsageError(
            "Give the machines, as --hosts FILE or as --host 192GB:m3-ultra for each.", param="hosts"
        )
    if hostfile is None:
        return parse_hosts(words), "tcp"
    file = read_hostfile(hostfile)
    return list(file.hosts), file.link


def _plan(
    model: str,
    hosts: list[Host],
    context: int,
    sequences: int,
    bits: int | None,
    kv_bits: int,
    split: str | None,
    link: str,
) -> Plan:
    from mlxserve.distributed.plan import make_plan
    from mlxserve.distributed.sources import facts_of

    facts = facts_of(model, bits, {len(hosts)})
    if Path(model).exists():
        facts = replace(facts, name=model)  # as launch takes it, too
    mode, bounds = _asked(split, facts, len(hosts))
    made = make_plan(facts, hosts, context, mode, bounds, sequences=sequences, kv_bits=kv_bits, link=link)
    return made if made.fits else _with_fewer_bits(made, model, bits)


def _asked(split: str | None, facts: Facts, size: int) -> tuple[Mode | None, tuple[int, ...] | None]:
    """The mode, and for a pipeline the bounds, that `--split` asks for."""
    from mlxserve.distributed.split import Split

    if split is None:
        return None, None
    if split == "tensor":
        return "tensor", None
    if split == "pipeline":
        return "pipeline", None  # cut by memory
    asked = Split.parse(split, facts.layers)
    if asked.size != size:
        raise UsageError(
            f"--split {split} names {_counted(asked.size, 'rank')} for {_counted(size, 'host')}.",
            param="split",
        )
    return asked.mode, asked.bounds or None


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _with_fewer_bits(made: Plan, model: str, bits: int | None) -> Plan:
    """The plan with the most bits that would fit as a further advice; packed weights stay as they are."""
    from mlxserve.distributed.plan import make_plan
    from mlxserve.distributed.sources import facts_of

    if bits is None and " bits in " in made.form:
        return made
    hosts = [share.host for share in made.shares]
    for fewer in (tried for tried in TRY_BITS if tried < (bits or 16)):
        facts = facts_of(model, fewer, {len(hosts)})
        other = make_plan(
            facts, hosts, made.context, sequences=made.sequences, kv_bits=made.kv_bits, link=made.link
        )
        if other.fits:
            return replace(made, advice=(f"--quantize {fewer}", *made.advice))
    return made


def _shown(made: Plan) -> str:
    """Tables with colour on a terminal, plain columns where the output is read by something else."""
    if not sys.stdout.isatty():
        return str(made)
    from rich.box import SIMPLE_HEAD
    from rich.console import Console, Group
    from rich.table import Table
    from rich.text import Text

    from mlxserve.distributed.show import LEGEND, closing, option_table, rank_table, title

    def table(rows: Sequence[Sequence[str]], styles: Sequence[str | None]) -> Table:
        head, *body = rows
        made = Table(*head, box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
        for row, style in zip(body, styles):
            made.add_row(*map(Text, row), style=style)
        return made

    ranks = table(rank_table(made), [None if share.fits else "red" for share in made.shares])
    chosen = str(made.split)
    options = table(
        option_table(made), ["bold" if option.split == chosen else None for option in made.options]
    )
    console = Console()
    with console.capture() as captured:
        words = [Text(line) for line in closing(made)]
        console.print(
            Group(Text(title(made), style="bold"), ranks, Text(LEGEND, style="dim"), options, *words)
        )
    return captured.get()
