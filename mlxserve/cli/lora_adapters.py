"""`mlxserve lora` on adapters that exist: evaluate, fuse, export, import, show.

Knows: the terminal. What adapters are and how they are melted is lora/'s.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlxserve.cli.common import say, table
from mlxserve.cli.lora_common import FOLDER, run_options
from mlxserve.errors import UsageError
from mlxserve.lora.config import RunConfig

if TYPE_CHECKING:
    from mlxserve.lora.base import Base
    from mlxserve.lora.rows import Row
    from mlxserve.models.adapters import Adapter


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
    """Compare base and adapter: loss, perplexity and exact match on data.test (or valid).

    Without a model in the settings, the base is the one that the adapter names, packed as it was in training.
    """
    from mlxserve.lora import adapters
    from mlxserve.lora.base import open_base
    from mlxserve.lora.data import encode_rows
    from mlxserve.lora.layers import base_only
    from mlxserve.lora.rows import find_split, read_rows
    from mlxserve.lora.train import Trainer

    pattern = _compiled(match)
    path = find_split(config.data, "test") or find_split(config.data, "valid")
    if path is None:
        raise UsageError("eval needs data.test (or data.valid) to name a file.", param="data.test")
    found = adapters.read(adapter)
    own = found.settings.get("mlxserve") or {}
    quantize = config.quantize if config.model or config.quantize else own.get("quantize")
    config = replace(config, model=config.model or _base_of(found), quantize=quantize)
    rows = read_rows(path, config.data)
    pairs = _questions(rows) if pattern else []
    full = found.kind == "full"
    base = open_base(config.model, quantize=config.quantize, floats=full)
    data = encode_rows(rows, config, base.tokenizer)
    facts: dict[str, dict[str, float]] = {}

    def judge() -> Trainer:
        """Knows what a preference training compares with: the model without what was trained."""
        return Trainer(base.model, config, data, vocabulary=base.vocabulary, architecture=base.config)

    def measure(name: str, trainer: Trainer) -> None:
        loss = trainer.evaluate(data, 0)
        facts[name] = {"loss": loss}
        if config.train.objective == "sft":
            facts[name]["perplexity"] = math.exp(min(loss, 700))
        if pattern:
            facts[name]["exact_match"] = _exact_match(base, pairs, pattern, max_tokens, config)

    if full:
        base.model.freeze()  # nothing is trained here, so no optimiser needs room
        trainer = judge()
        measure("base", trainer)
        adapters.attach(base.model, found)
    else:
        adapters.attach(base.model, found)
        trainer = judge()
        with base_only(base.model):
            measure("base", trainer)
    measure("adapter", trainer)
    if as_json:
        click.echo(json.dumps(facts, indent=1))
        return
    names = list(facts["base"])
    body = [[name, f"{facts['base'][name]:.4f}", f"{facts['adapter'][name]:.4f}"] for name in names]
    click.echo(table([["", "BASE", "ADAPTER"], *body]))


def _base_of(adapter: Adapter) -> str:
    """The model that an adapter names. Raises UsageError where it names none."""
    if not adapter.base:
        raise UsageError("The adapter names no base model; say which with --set model=NAME.", param="model")
    return adapter.base


def _compiled(match: str | None) -> re.Pattern[str] | None:
    try:
        return re.compile(match) if match else None
    except re.error as error:
        raise UsageError(f"--match is no regular expression: {error}.", param="--match") from error


def _questions(rows: Sequence[Row]) -> list[tuple[Row, str]]:
    """Each row with the answer it wants: its completion, or the last turn of its chat."""
    pairs = []
    for row in rows:
        last = (row.messages or [{}])[-1]
        if row.rejected is not None or last.get("role") != "assistant" or not last.get("content"):
            raise UsageError(
                f"{row.where}: --match needs rows that end in an answer (prompt and completion, or messages).",
                param="--match",
            )
        pairs.append((row, str(last["content"])))
    return pairs


def _exact_match(
    base: Base,
    pairs: Sequence[tuple[Row, str]],
    pattern: re.Pattern[str],
    max_tokens: int,
    config: RunConfig,
) -> float:
    """The share of rows whose answer has the same last hit of `pattern` as the row's own."""
    from mlxserve.lora.complete import answer, complete

    def last(text: str) -> str | None:
        hits = pattern.findall(text)
        return str(hits[-1]).strip().replace(",", "") if hits else None

    right = 0
    for row, wanted in pairs:
        if row.raw is not None:
            said = complete(base, row.raw[0], max_tokens)
        else:
            said = answer(base, (row.messages or [])[:-1], max_tokens, config.data.template_kwargs)
        right += last(wanted) is not None and last(said) == last(wanted)
    return right / len(pairs)


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
    _require_new(output)
    base = open_base(name, floats=True)
    adapters.attach(base.model, found)
    report = fusing.fuse(base.model, keep=keep, dtype=base.stored)
    write_model(output, base, base.model)
    if report:
        worst = max(report, key=lambda row: row.drift)
        lost = sum(row.drift > fusing.MAX_DRIFT for row in report)
        if lost:
            say(
                f"Warning: {lost} of {len(report)} layers keep less than half of what the adapter adds; the worst, "
                f"{worst.path} in {worst.form}, is off by {worst.drift:.0%} of it. The adapter is whole where it "
                "is served unfused (--adapter)."
            )
        forms = ", ".join(sorted({row.form for row in report}))
        say(f"{len(report)} layers fused ({forms}); largest drift {worst.drift:.1%} of the adapter.")
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
    _require_new(output)
    if model:
        from mlxserve.lora import adapters
        from mlxserve.lora.base import open_base

        found = adapters.read(adapter)
        adapters.attach(open_base(model, floats=found.kind == "full").model, found)
    _convert(adapter, output, "mlx-lm")


def _require_new(output: Path) -> None:
    """Raise UsageError unless a folder can be made there."""
    if output.exists():
        raise UsageError(f"{output} exists already.", param="--output")
    place = next(path for path in output.absolute().parents if path.exists())
    if not place.is_dir() or not os.access(place, os.W_OK):
        raise UsageError(f"{output} cannot be written: {place} is no folder to write to.", param="--output")


def _convert(adapter: Path, output: Path, form: str) -> None:
    from mlxserve.lora import adapters
    from mlxserve.lora.checkpoint import write_folder

    _require_new(output)
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
