"""`mlxserve lora`: plan, check, train, resume, evaluate, fuse, export and import adapters.

Knows: the terminal, and what the trainer wants handed in (memory, samples). The work is lora/'s.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlxserve.cli.common import say, table
from mlxserve.errors import UsageError
from mlxserve.lora.config import RunConfig, read_config

if TYPE_CHECKING:
    from mlxserve.lora.api import Prepared
    from mlxserve.lora.base import Base
    from mlxserve.lora.data import Dataset
    from mlxserve.lora.plan import Plan

Command = Callable[..., Any]
FOLDER = click.Path(path_type=Path)


def _run_options(command: Command) -> Command:
    """`-c` and `--set`; passed on as `config`, a RunConfig."""

    @click.option("-c", "--config", "file", type=FOLDER, metavar="FILE", help="The run's YAML, or a recipe.")
    @click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Override; may be repeated.")
    def with_config(*args: Any, file: Path | None, settings: tuple[str, ...], **others: Any) -> Any:
        return command(*args, config=read_config(_recipe(file), settings), **others)

    with_config.__doc__ = command.__doc__
    with_config.__name__ = command.__name__
    with_config.__click_params__ = (  # type: ignore[attr-defined]
        getattr(command, "__click_params__", []) + with_config.__click_params__  # type: ignore[attr-defined]
    )
    return with_config


def _recipe(file: Path | None) -> Path | None:
    """The file itself, or the recipe of that name in lora/recipes."""
    if file is None or file.exists():
        return file
    from mlxserve import lora as package

    recipes = Path(str(package.__file__)).parent / "recipes"
    named = recipes / f"{file.name.removesuffix('.yaml')}.yaml"
    if named.is_file():
        return named
    known = ", ".join(sorted(path.stem for path in recipes.glob("*.yaml")))
    raise UsageError(
        f"There is no file {file} and no recipe of that name; there are {known}.", param="config"
    )


@click.group()
def lora() -> None:
    """Fine-tune models: LoRA, QLoRA, DoRA and full; evaluate, fuse and exchange adapters."""


@lora.command()
@_run_options
@click.option("--fits", is_flag=True, help="Show what lengths, ranks and batches fit this machine.")
@click.option("--tensors", is_flag=True, help="List every tensor that would train.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def plan(config: RunConfig, fits: bool, tensors: bool, as_json: bool) -> None:
    """Work out memory and time before anything runs."""
    import mlx.core as mx

    from mlxserve.lora.plan import plan_run, what_fits
    from mlxserve.models.describe import describe

    facts = describe(config.model)
    on_cpu = mx.default_device() == mx.cpu
    floats = 4 if on_cpu else facts.float_bytes
    weights = facts.weights.loaded_bytes(floats, on_cpu)
    if config.quantize:
        weights = int(facts.weights.parameters * (config.quantize + 0.5) / 8)
    sizes: dict[str, Any] = {"weight_bytes": weights, "float_bytes": floats}
    made = plan_run(config, dict(facts.config), **sizes)
    budget = _budget()
    shown = _plan_facts(made, budget)
    if fits:
        shown["fits"] = what_fits(config, dict(facts.config), budget, **sizes)
    if tensors:
        shown["tensors"] = [[name, list(shape)] for name, shape in made.tensors]
    click.echo(json.dumps(shown, indent=1) if as_json else _plan_text(shown))


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


def _plan_text(facts: dict[str, Any]) -> str:
    from mlxserve.models.memory import show_bytes, show_count

    rows = [[name, show_bytes(size)] for name, size in facts["bytes"].items()]
    verdict = "fits" if facts["fits_machine"] else "does not fit"
    lines = [
        table([*rows, ["together", show_bytes(facts["needed_bytes"])]]),
        f"{verdict} the {show_bytes(facts['budget_bytes'])} of this machine",
        f"{show_count(facts['trainable_parameters'])} parameters train; {facts['tokens_per_micro_batch']:,} "
        f"tokens a micro-batch; at most about {facts['tokens_per_s']:,.0f} tokens a second here",
    ]
    if "fits" in facts:
        head = ["LENGTH", "RANK", "CHECKPOINTING", "ROWS A BATCH"]
        body = [[str(row[k]) for k in ("length", "rank", "checkpointing", "rows")] for row in facts["fits"]]
        lines.append(table([head, *body]))
    if "tensors" in facts:
        lines.append(table([[name, "×".join(map(str, shape))] for name, shape in facts["tensors"]]))
    return "\n".join(lines)


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
@_run_options
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def check(config: RunConfig, as_json: bool) -> None:
    """Look at the data: formats, what is dropped, lengths, and one row's trained tokens."""
    from mlxserve.lora.data import load_all

    tokenizer = _tokenizer(config.model)
    train, valid = load_all(config, tokenizer)
    splits = {"train": train, **({"valid": valid} if valid else {})}
    facts = {name: _data_facts(data) for name, data in splits.items()}
    if as_json:
        click.echo(json.dumps(facts, indent=1))
        return
    for name, data in splits.items():
        click.echo(_data_text(name, facts[name], data))
    click.echo(f"\nOne row ({train.items[0].where}), its trained tokens highlighted:\n")
    click.echo(_highlighted(train.items[0], tokenizer))


def _tokenizer(name: str) -> Any:
    """A model's tokenizer without its weights."""
    from mlxserve.models.resolve import resolve

    if not name:
        raise UsageError("No model is named; set model in the YAML or with --set model=NAME.", param="model")
    files = resolve(name)
    if files.kind == "gguf":
        from mlxserve.models.gguf import open_gguf
        from mlxserve.text.gguf_vocab import tokenizer_from_gguf

        return tokenizer_from_gguf(open_gguf(files.path).metadata)
    from mlxserve.text.tokenizer import load_tokenizer

    return load_tokenizer(files.path)


def _data_facts(data: Dataset) -> dict[str, Any]:
    lengths = data.lengths
    return {
        "rows": data.rows,
        "used": len(data.items),
        "formats": data.formats,
        "dropped": data.dropped,
        "truncated": data.truncated,
        "tokens": int(lengths.sum()),
        "trained_tokens": data.target_count,
        "longest": int(lengths.max()),
        "median": int(sorted(lengths)[len(lengths) // 2]),
    }


def _data_text(name: str, facts: dict[str, Any], data: Dataset) -> str:
    formats = ", ".join(f"{count} {kind}" for kind, count in facts["formats"].items())
    lost = ", ".join(f"{count} {why}" for why, count in facts["dropped"].items()) or "none"
    lines = [
        f"{name}: {facts['used']} of {facts['rows']} rows ({formats}); dropped: {lost}; "
        f"truncated: {facts['truncated']}",
        f"  {facts['tokens']:,} tokens, {facts['trained_tokens']:,} trained; median {facts['median']}, "
        f"longest {facts['longest']}",
    ]
    return "\n".join([*lines, *_histogram(data)])


def _histogram(data: Dataset) -> list[str]:
    """Rows by length, in doublings."""
    counts: dict[int, int] = {}
    for length in data.lengths.tolist():
        top = 2 ** max(4, math.ceil(math.log2(length)))
        counts[top] = counts.get(top, 0) + 1
    most = max(counts.values())
    return [
        f"  ≤{top:>6}  {count:>6}  {'█' * max(1, 40 * count // most)}"
        for top, count in sorted(counts.items())
    ]


def _highlighted(item: Any, tokenizer: Any) -> str:
    sample = getattr(item, "chosen", item)
    pieces, current, trained = [], b"", False
    for token, target in [*zip(sample.tokens.tolist(), sample.targets.tolist()), (None, None)]:
        if target != trained and current:
            text = current.decode("utf-8", "replace")
            pieces.append(click.style(text, fg="green", bold=True) if trained else text)
            current = b""
        trained = target
        if token is not None:
            current += tokenizer.token_bytes(token)
    return "".join(pieces)


@lora.command()
@_run_options
@click.option("--dry-run", is_flag=True, help="Load, check and plan, and stop before training.")
@click.option("--force", is_flag=True, help="Train even if memory seems too small.")
def train(config: RunConfig, dry_run: bool, force: bool) -> None:
    """Train, and write adapters, checkpoints and figures into save.dir."""
    from mlxserve.lora.api import prepare

    prepared = prepare(config, budget_bytes=_budget(), force=force)
    say(_summary(prepared))
    if not dry_run:
        _train(prepared, resume=False)


@lora.command()
@click.argument("run", type=FOLDER)
@click.option("--force", is_flag=True, help="Train even if memory seems too small.")
def resume(run: Path, force: bool) -> None:
    """Take up a run where its newest checkpoint left it."""
    from dataclasses import replace

    from mlxserve.lora.api import prepare

    config = read_config(run / "config.yaml")
    config = replace(config, save=replace(config.save, dir=str(run)))
    _train(prepare(config, budget_bytes=_budget(), force=force), resume=True)


def _summary(prepared: Prepared) -> str:
    from mlxserve.models.memory import show_bytes, show_count

    train, plan_ = prepared.train, prepared.plan
    settings = prepared.config
    lost = ", ".join(f"{count} {why}" for why, count in train.dropped.items()) or "none dropped"
    held = f", {len(prepared.valid.items)} held out" if prepared.valid else ""
    return (
        f"{len(train.items)} rows{held} ({lost}); {train.target_count:,} trained tokens an epoch\n"
        f"{settings.lora.type} of rank {settings.lora.rank}, scale {settings.lora.scale:g}: "
        f"{show_count(plan_.trainable)} parameters train\n"
        f"about {show_bytes(plan_.needed_bytes)} of memory; checkpointing "
        f"{'on' if plan_.checkpointing else 'off'}"
    )


def _train(prepared: Prepared, *, resume: bool) -> None:
    from mlxserve.lora.api import run

    display = _Rich(prepared.config) if sys.stderr.isatty() else _Lines(prepared.config)
    try:
        result = run(prepared, resume=resume, watch=display, generate=complete, group=_group())
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


class _Lines:
    """Plain lines on standard error, one every log.every steps."""

    def __init__(self, config: RunConfig) -> None:
        self.every = config.log.every

    def __call__(self, event: dict[str, Any]) -> None:
        if event["kind"] == "step" and (event["step"] % self.every == 0 or event["step"] == event["steps"]):
            say(_step_line(event))
        elif event["kind"] == "eval":
            say(
                f"step {event['step']}: held-out loss {event['loss']:.4f}{' (best)' if event['best'] else ''}"
            )
        elif event["kind"] == "sample":
            say(f"{event['prompt']} → {event['text']}")

    def close(self) -> None:
        """Nothing is open."""


def _step_line(event: dict[str, Any]) -> str:
    from mlxserve.models.memory import show_bytes

    return (
        f"step {event['step']}/{event['steps']}: loss {event['loss']:.4f}, lr {event['lr']:.2e}, "
        f"gradient {event['grad_norm']:.3f}, {event['tokens_per_s']:.0f} tokens/s, "
        f"padding {event['padding']:.0%}, memory {show_bytes(event['active_bytes'])} "
        f"(peak {show_bytes(event['peak_bytes'])})"
    )


class _Rich:
    """A bar with the latest figures and the time left, on a terminal."""

    def __init__(self, config: RunConfig) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self.bar = Progress(
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
            console=Console(stderr=True),
        )
        self.task = self.bar.add_task("", total=None)
        self.lines = _Lines(config)
        self.bar.start()

    def __call__(self, event: dict[str, Any]) -> None:
        if event["kind"] != "step":
            self.lines(event)
            return
        words = _step_line(event).partition(": ")[2]
        self.bar.update(self.task, completed=event["step"], total=event["steps"], description=words)

    def close(self) -> None:
        self.bar.stop()


def complete(base: Base, prompt: str, max_tokens: int) -> str:
    """The model's greedy answer to a prompt, as a chat where it has a template."""
    import mlx.core as mx

    from mlxserve.models.layout import plain_caches

    tokenizer, cache = base.tokenizer, plain_caches(base.model)
    if tokenizer.chat_template is not None:
        ids = tokenizer.encode_chat([{"role": "user", "content": prompt}])
    else:
        ids = tokenizer.encode(prompt)
    written: list[int] = []
    base.model.eval()
    while len(written) < max_tokens:
        logits = base.model(mx.array([ids]), cache=cache)
        token = int(mx.argmax(logits[0, -1]))
        if token in tokenizer.eos_token_ids:
            break
        written.append(token)
        ids = [token]
    return tokenizer.decode(written)


@lora.command("eval")
@click.argument("adapter", type=FOLDER)
@_run_options
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


@lora.command()
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


@lora.command("export")
@click.argument("adapter", type=FOLDER)
@click.option("-o", "--output", type=FOLDER, required=True, help="The folder to write.")
@click.option("--format", "form", type=click.Choice(["peft", "mlx-lm"]), default="peft", show_default=True)
def export(adapter: Path, output: Path, form: str) -> None:
    """Write an adapter in PEFT's or mlx-lm's format."""
    _convert(adapter, output, form)


@lora.command("import")
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


@lora.command()
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
