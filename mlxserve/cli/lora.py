"""`mlxserve lora`: plan, check, train and resume runs; the group of all its commands.

Knows: the terminal, and what the trainer wants handed in (memory, samples). The work is lora/'s.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlxserve.cli import lora_adapters, lora_show
from mlxserve.cli.common import say, table
from mlxserve.cli.lora_common import FOLDER, find_recipe, recipes, require_model, run_options
from mlxserve.errors import UsageError
from mlxserve.lora.config import RunConfig, described, read_config

if TYPE_CHECKING:
    from mlxserve.lora.api import Prepared
    from mlxserve.lora.plan import Plan

SPLIT_HELP = "Under 'mlxserve launch': divide the model over the processes, tensor:2 or pipeline:2."


@click.group()
def lora() -> None:
    """Fine-tune models: LoRA, QLoRA, DoRA and full; evaluate, fuse and exchange adapters."""


@lora.command()
@run_options
@click.option("--fits", is_flag=True, help="Show what lengths, ranks and batches fit this machine.")
@click.option("--tensors", is_flag=True, help="List every tensor that would train.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def plan(config: RunConfig, fits: bool, tensors: bool, as_json: bool) -> None:
    """Work out memory and time before anything runs; time where data.train is named."""
    import mlx.core as mx

    from mlxserve.lora.plan import plan_run, plan_within, sizes_of, what_fits
    from mlxserve.models.describe import describe

    require_model(config.model)
    facts = describe(config.model)
    sizes = sizes_of(config, facts, on_cpu=mx.default_device() == mx.cpu)
    budget = _budget()
    made = plan_within(
        budget, lambda on: plan_run(config, dict(facts.config), checkpointing=on, **sizes), config
    )
    shown = _plan_facts(made, budget)
    if config.data.train:
        shown |= _plan_time(config, made)
    if fits:
        shown["fits"] = what_fits(config, dict(facts.config), budget, **sizes)
    if tensors:
        shown["tensors"] = [[name, list(shape)] for name, shape in made.tensors]
    click.echo(json.dumps(shown, indent=1) if as_json else lora_show.plan_text(shown))


def _plan_time(config: RunConfig, made: Plan) -> dict[str, Any]:
    """Tokens, steps and seconds of a whole run on the data that is named."""
    from mlxserve.lora.data import load_all
    from mlxserve.lora.train import count_steps

    data, _ = load_all(config, _tokenizer(config.model))
    steps = count_steps(config, data)
    share = steps / count_steps(replace(config, train=replace(config.train, steps=None)), data)
    tokens = round(int(data.lengths.sum()) * config.train.epochs * share)
    return {"steps": steps, "tokens": tokens, "seconds": tokens * made.flops_per_token / _flops_per_s()}


def _plan_facts(made: Plan, budget: int) -> dict[str, Any]:
    speed = _flops_per_s()
    names = ("weight", "trainable", "gradient", "optimizer", "activation", "loss")
    return {
        "bytes": {name: getattr(made, f"{name}_bytes") for name in names},
        "needed_bytes": made.needed_bytes,
        "budget_bytes": budget,
        "fits_machine": made.needed_bytes <= budget,
        "trainable_parameters": made.trainable,
        "tokens_per_micro_batch": made.tokens,
        "checkpointing": made.checkpointing,
        "tokens_per_s": speed / made.flops_per_token,
    }


def _budget() -> int:
    from mlxserve.engine.memory import machine_budget

    return machine_budget()


def _flops_per_s() -> float:
    """What a matrix product of this machine does, measured in a moment."""
    import time

    import mlx.core as mx

    a = mx.random.normal((512, 512))
    mx.eval(a @ a)
    began = time.perf_counter()
    mx.eval([a @ (a + i) for i in range(4)])
    return 4 * 2 * 512**3 / (time.perf_counter() - began)


@lora.command()
@run_options
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def check(config: RunConfig, as_json: bool) -> None:
    """Look at the data: formats, what is dropped, lengths, and one row's trained tokens."""
    from mlxserve.lora.data import load_all

    tokenizer = _tokenizer(config.model)
    train, valid = load_all(config, tokenizer)
    splits = {"train": train, **({"valid": valid} if valid else {})}
    facts = {name: lora_show.data_facts(data) for name, data in splits.items()}
    if as_json:
        click.echo(json.dumps(facts, indent=1))
        return
    for name, data in splits.items():
        click.echo(lora_show.data_text(name, facts[name], data))
    click.echo(f"\n{lora_show.one_row(train, tokenizer, colours=sys.stdout.isatty())}")


def _tokenizer(name: str) -> Any:
    """A model's tokenizer without its weights."""
    from mlxserve.models.resolve import resolve

    require_model(name)
    files = resolve(name)
    if files.kind == "gguf":
        from mlxserve.models.gguf import open_gguf
        from mlxserve.text.gguf_vocab import tokenizer_from_gguf

        return tokenizer_from_gguf(open_gguf(files.path).metadata)
    from mlxserve.text.tokenizer import load_tokenizer

    return load_tokenizer(files.path)


@lora.command()
@run_options
@click.option("--dry-run", is_flag=True, help="Load, check and plan, and stop before training.")
@click.option("--force", is_flag=True, help="Train even if memory seems too small.")
@click.option("--split", metavar="SPLIT", help=SPLIT_HELP)
def train(config: RunConfig, dry_run: bool, force: bool, split: str | None) -> None:
    """Train, and write adapters, checkpoints and figures into save.dir."""
    from mlxserve.lora.train import count_steps

    prepared, several = _prepare(config, force, split, fresh=True)
    say(lora_show.summary(prepared, count_steps(config, prepared.train), _budget()))
    if not dry_run:
        _train(prepared, several, resume=False)


@lora.command()
@click.argument("run", type=FOLDER)
@click.option("--force", is_flag=True, help="Train even if memory seems too small.")
@click.option("--split", metavar="SPLIT", help=SPLIT_HELP)
def resume(run: Path, force: bool, split: str | None) -> None:
    """Take up a run where its newest checkpoint left it."""
    config = read_config(run / "config.yaml")
    config = replace(config, save=replace(config.save, dir=str(run)))
    prepared, several = _prepare(config, force, split, fresh=False)
    _train(prepared, several, resume=True)


def _prepare(
    config: RunConfig, force: bool, split: str | None, *, fresh: bool
) -> tuple[Prepared, dict[str, Any]]:
    """The run, and what it is told of the other processes: a group, or how the model is divided."""
    from mlxserve.lora.api import prepare

    require_model(config.model)
    group = _group()
    settings: dict[str, Any] = {
        "budget_bytes": _budget(),
        "force": force,
        "fresh": fresh and (group is None or group.rank() == 0),
    }
    if split is None:
        return prepare(config, **settings), {"group": group}
    from mlxserve.cli.lora_parts import open_part

    base, divide = open_part(config, split, group)
    return prepare(config, base=base, **settings), {"divide": divide}


def _train(prepared: Prepared, several: dict[str, Any], *, resume: bool) -> None:
    from mlxserve.lora.api import run

    display = lora_show.Bar() if sys.stderr.isatty() else lora_show.Lines(prepared.config)
    try:
        result = run(prepared, resume=resume, watch=display, **several)
    finally:
        display.close()
    best = result.outcome.best_loss
    say(
        f"{result.outcome.why} after {result.outcome.steps} steps"
        + (f", best loss {best:.4f}" if best else "")
    )
    click.echo(result.adapter)


def _group() -> Any:
    """The processes that `mlxserve launch` has started with this one, each on its part of the data; None alone."""
    if "MLX_RANK" not in os.environ:
        return None
    import mlx.core as mx

    return mx.distributed.init(strict=True)


@lora.command("recipes")
@click.argument("name", required=False)
def show_recipes(name: str | None) -> None:
    """List the recipes, or print one to start a file of your own from."""
    if name is not None:
        path = find_recipe(Path(name))
        assert path is not None
        click.echo(path.read_text(encoding="utf-8").rstrip())
        return
    known = recipes().items()
    click.echo(table([[name, path.read_text(encoding="utf-8").splitlines()[0][2:]] for name, path in known]))


@lora.command("settings")
@click.argument("section", required=False)
def show_settings(section: str | None) -> None:
    """List every setting of a run, what it takes and its default; of one section only, if named."""
    known = described()
    chosen = [part for part in known if section in (None, part.name)]
    if not chosen:
        names = ", ".join(part.name for part in known if part.name)
        raise UsageError(f"There is no section {section!r}; there are {names}.", param="section")
    for place, part in enumerate(chosen):
        head = f"{part.name}: {part.about}" if part.name else part.about
        click.echo(("\n" if place else "") + click.wrap_text(head, 100))
        click.echo(table([["", "TAKES", "DEFAULT"], *map(list, part.settings)]))


for _command in lora_adapters.COMMANDS:
    lora.add_command(_command)
