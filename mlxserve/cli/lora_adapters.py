"""`mlxserve lora` on adapters that exist: evaluate, fuse, export, import, show.

Knows: the terminal. What adapters are and how they are melted is lora/'s.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlxserve.cli.common import say, table
from mlxserve.cli.lora_common import FOLDER, complete, run_options
from mlxserve.errors import UsageError
from mlxserve.lora.config import RunConfig

if TYPE_CHECKING:
    from mlxserve.lora.base import Base


@click.command("eval")
@click.argument("adapter", type=FOLDER)
@run_options
@click.option(
    "--match", metavar="REGEX", help="Also compare this expression's last hit in answers, as #### (.*)."
)
@click.option(
    "--max-tokens", type=click.IntRange(min=1), default=256, show_default=True, help="Of an answer."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def evaluate(adapter: Path, config: RunConfig, match: str | None, max_tokens: int, as_json: bool) -> None:
    """Compare base and adapter: loss, perplexity and exact match on data.test (or valid)."""
    from mlxserve.lora import adapters
    from mlxserve.lora.base import open_base
    from mlxserve.lora.data import encode_rows
    from mlxserve.lora.layers import base_only
    from mlxserve.lora.rows import find_split, read_rows
    from mlxserve.lora.train import Trainer

    path = find_split(config.data, "test") or find_split(config.data, "valid")
    if path is None:
        raise UsageError("eval needs data.test (or data.valid) to name a file.", param="data.test")
    base = open_base(config.model, quantize=config.quantize)
    rows = read_rows(path, config.data)
    data = encode_rows(rows, config, base.tokenizer)
    found = adapters.read(adapter)
    full = found.kind == "full"
    facts: dict[str, dict[str, float]] = {}

    def measure(name: str) -> None:
        trainer = Trainer(base.model, config, data, vocabulary=base.vocabulary, architecture=base.config)
        loss = trainer.evaluate(data, 0)
        facts[name] = {"loss": loss, "perplexity": math.exp(min(loss, 700))}
        if match:
            facts[name]["exact_match"] = _exact_match(base, rows, match, max_tokens)

    if full:
        measure("base")
    adapters.attach(base.model, found)
    if not full:
        with base_only(base.model):
            measure("base")
    measure("adapter")
    if as_json:
        click.echo(json.dumps(facts, indent=1))
        return
    names = list(facts["base"])
    body = [[name, f"{facts['base'][name]:.4f}", f"{facts['adapter'][name]:.4f}"] for name in names]
    click.echo(table([["", "BASE", "ADAPTER"], *body]))


def _exact_match(base: Base, rows: list[Any], pattern: str, max_tokens: int) -> float:
    """The share of rows whose answer has the same last hit of `pattern` as the row's own."""
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise UsageError(f"--match is no regular expression: {error}.", param="--match") from error

    def last(text: str) -> str | None:
        hits = compiled.findall(text)
        return str(hits[-1]).strip().replace(",", "") if hits else None

    right = 0
    for row in rows:
        if row.raw is None:
            raise UsageError(f"{row.where}: --match needs rows of prompt and completion.", param="--match")
        wanted = last(row.raw[1])
        right += wanted is not None and last(complete(base, row.raw[0], max_tokens)) == wanted
    return right / len(rows)


@click.command()
@click.argument("adapter", type=FOLDER)
@click.option("-m", "--model", help="The base model.  [default: the one that the adapter names]")
@click.option("-o", "--output", type=FOLDER, required=True, help="The folder to write.")
@click.option(
    "--keep",
    type=click.Choice(["auto", "packed", "float"]),
    default="auto",
    show_default=True,
    help="Quantised layers: pack again, keep 16 bits, or decide by the drift.",
)
def fuse(adapter: Path, model: str | None, output: Path, keep: Any) -> None:
    """Melt an adapter into its base; the folder reloads here and in mlx-lm."""
    from mlxserve.lora import adapters
    from mlxserve.lora import fuse as fusing
    from mlxserve.lora.base import open_base, write_model

    found = adapters.read(adapter)
    name = model or found.base
    if not name:
        raise UsageError("The adapter names no base model; say --model.", param="--model")
    if output.exists():
        raise UsageError(f"{output} exists already.", param="--output")
    base = open_base(name)
    adapters.attach(base.model, found)
    report = fusing.fuse(base.model, keep=keep)
    write_model(output, base, base.model)
    for row in report:
        if row.drift > fusing.MAX_DRIFT:
            say(f"Warning: {row.path} in {row.form} is off by {row.drift:.0%} of what the adapter adds.")
    if report:
        worst = max(row.drift for row in report)
        forms = ", ".join(sorted({row.form for row in report}))
        say(f"{len(report)} layers fused ({forms}); largest drift {worst:.1%} of the adapter.")
    click.echo(output)


@click.command("export")
@click.argument("adapter", type=FOLDER)
@click.option("-o", "--output", type=FOLDER, required=True, help="The folder to write.")
@click.option("--format", "form", type=click.Choice(["peft", "mlx-lm"]), default="peft", show_default=True)
def export(adapter: Path, output: Path, form: str) -> None:
    """Write an adapter in PEFT's or mlx-lm's format."""
    _convert(adapter, output, form)


@click.command("import")
@click.argument("adapter", type=FOLDER)
@click.option("-o", "--output", type=FOLDER, required=True, help="The folder to write.")
@click.option("-m", "--model", help="Check it against this base model.")
def import_(adapter: Path, output: Path, model: str | None) -> None:
    """Read an adapter in PEFT's or mlx-lm's format and write ours."""
    if model:
        from mlxserve.lora import adapters
        from mlxserve.lora.base import open_base

        adapters.attach(open_base(model).model, adapters.read(adapter))
    _convert(adapter, output, "mlx-lm")


def _convert(adapter: Path, output: Path, form: str) -> None:
    from mlxserve.lora import adapters
    from mlxserve.lora.checkpoint import write_folder

    if output.exists():
        raise UsageError(f"{output} exists already.", param="--output")
    found = adapters.read(adapter)
    write = adapters.export_peft if form == "peft" else adapters.save
    write_folder(output, lambda folder: write(folder, found))
    click.echo(output)


@click.command()
@click.argument("adapter", type=FOLDER)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def info(adapter: Path, as_json: bool) -> None:
    """Show what an adapter is: base, kind, rank, scale, layers."""
    from mlxserve.lora import adapters

    found = adapters.read(adapter)
    facts = {
        "format": found.format,
        "kind": found.kind,
        "base": found.base,
        "rank": found.rank,
        "scales": sorted(set(found.scales.values())),
        "layers": len(found.scales),
        "parameters": sum(value.size for value in found.arrays.values()),
        "targets": sorted({path.rpartition(".")[2] for path in found.paths}),
    }
    click.echo(json.dumps(facts, indent=1) if as_json else table([[k, str(v)] for k, v in facts.items()]))


COMMANDS = (evaluate, fuse, export, import_, info)
