"""`mlxserve bench`: how fast a model is here, or how fast any OpenAI endpoint answers.

Knows: flags, the table on standard output, the files. What is measured, and how, is `mlxserve.bench`'s.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlxserve.bench.scenarios import NAMES, Sizes
from mlxserve.cli import common
from mlxserve.cli.options import load_options, parse_json_object
from mlxserve.config import DEFAULT_MODEL, EngineConfig, LoadConfig
from mlxserve.errors import MlxServeError, UsageError
from mlxserve.request import SamplingParams

if TYPE_CHECKING:
    from mlxserve.bench.report import Report
    from mlxserve.bench.target import Target

SIZES = Sizes()
SEED_LIMIT = 2**31
# Flags that say how a model is loaded here, and so mean nothing to somebody else's server.
LOADING = ("quantize", "context", "dtype", "rope_theta", "rope_scaling", "kv_bits", "check")


def _size(flag: str, words: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    default = getattr(SIZES, flag.lstrip("-").replace("-", "_"))
    return click.option(flag, type=click.IntRange(2), default=default, show_default=True, help=words)


@click.command()
@click.option(
    *("-m", "--model"),
    help=f"The model to load, or the endpoint's name for it.  [default: {DEFAULT_MODEL}, or its first]",
)
@click.option("--url", help="Measure this OpenAI endpoint, e.g. http://127.0.0.1:8080.")
@click.option("--api-key", envvar="MLXSERVE_API_KEY", help="For --url.")
@click.option("--body", metavar="JSON", help="For --url: fields to add to every request.")
@click.option("--timeout", type=float, default=600.0, show_default=True, help="For --url, in seconds.")
@click.option(
    *("-s", "--scenario", "names"),
    multiple=True,
    type=click.Choice(NAMES),
    help="May be repeated.  [default: all]",
)
@_size("--clients", "Requests at the same time.")
@_size("--requests", "Of the throughput load, in all.")
@_size("--tokens", "Of an answer.")
@_size("--prompt-tokens", "Of an ordinary prompt.")
@_size("--prefix-tokens", "Of the system prompt that requests share.")
@_size("--long-tokens", "Of the long prompt that arrives among streams.")
@click.option(
    "--prompts",
    type=click.Path(path_type=Path),
    metavar="FILE.jsonl",
    help="Latency and throughput with your own prompts: lines with 'prompt' or 'messages'.",
)
@click.option("--seed", type=int, help="Draw the same prompts again.  [default: new ones]")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write everything that was seen.")
@click.option("--svg", "svg_file", type=click.Path(path_type=Path), help="Draw every request as a line.")
@click.option("--against", type=click.Path(path_type=Path), help="Compare with an earlier --json FILE.")
@load_options
@click.pass_context
def bench(
    ctx: click.Context,
    model: str | None,
    url: str | None,
    api_key: str | None,
    body: str | None,
    timeout: float,
    names: tuple[str, ...],
    prompts: Path | None,
    seed: int | None,
    json_file: Path | None,
    svg_file: Path | None,
    against: Path | None,
    load: LoadConfig,
    engine: EngineConfig,
    **sizes: int,
) -> None:
    """Measure a model here, or any OpenAI endpoint.

    Prints a table: latency, throughput, shared prefixes, a long prompt among streams, structured output. A
    model here answers to the full length; an endpoint ends where it likes, unless --body tells it otherwise.
    """
    from mlxserve.bench.report import read

    _refuse_mixed(ctx, url, body)
    earlier = read(against) if against else None
    for file in (json_file, svg_file):
        _require_folder(file)
    drawn = random.SystemRandom().randrange(SEED_LIMIT) if seed is None else seed
    wanted = Sizes(**sizes, seed=drawn, own=_own_prompts(prompts))
    extra = parse_json_object("--body", body) if body else {}

    async def open_target() -> Target:
        if url is not None:
            from mlxserve.bench.endpoint import Endpoint

            return await Endpoint.open(url, model, api_key=api_key, extra=extra, timeout_s=timeout)
        return await _open_model(model or DEFAULT_MODEL, load, engine)

    report = asyncio.run(_measure(open_target, names or NAMES, wanted))
    _write_files(report, json_file, svg_file)
    _show(report, earlier)
    if all(not _answered(scenario) for scenario in report["scenarios"]):
        raise MlxServeError(f"No request was answered: {report['scenarios'][0]['failures'][0]}")


def _refuse_mixed(ctx: click.Context, url: str | None, body: str | None) -> None:
    """Raise UsageError for a flag that would be without effect."""
    said = [n for n in ctx.params if ctx.get_parameter_source(n) is click.core.ParameterSource.COMMANDLINE]
    if url is None and body is not None:
        raise UsageError("--body is for --url: a model here has its settings from flags.", param="body")
    mixed = [name for name in LOADING if name in said]
    if url is not None and mixed:
        flag = "--" + mixed[0].replace("_", "-")
        raise UsageError(f"{flag} says how a model is loaded here, and --url measures a server.", param=flag)


def _require_folder(file: Path | None) -> None:
    if file is not None and not file.parent.is_dir():
        raise UsageError(f"There is no folder {file.parent} for {file.name}.", param="json")


def _own_prompts(path: Path | None) -> list[list[dict[str, Any]]]:
    if path is None:
        return []
    from mlxserve.cli.batch import read_rows

    rows = read_rows(path, SamplingParams(), None, False)
    return [row.messages or [{"role": "user", "content": row.prompt or ""}] for row in rows]


async def _open_model(model: str, load: LoadConfig, engine: EngineConfig) -> Target:
    from mlxserve.models.backend import check_backend

    check_backend()
    from mlxserve.bench.inprocess import InProcess

    return await InProcess.start(model, load, engine)


async def _measure(open_target: Callable[[], Any], names: Sequence[str], sizes: Sizes) -> Report:
    from mlxserve.bench.machine import machine
    from mlxserve.bench.measure import calibrate, run
    from mlxserve.bench.report import build

    target = await open_target()
    try:
        with _progress(len(names)) as progress:
            sizes = await calibrate(target, sizes)
            seen = await run(target, names, sizes, progress=progress)
            return build(target, sizes, seen, machine(), await target.peak_bytes())
    finally:
        await target.close()


@contextmanager
def _progress(loads: int) -> Iterator[Callable[[str, int, int], None] | None]:
    """Moves a bar on standard error while a terminal or a notebook watches."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    if not (console.is_terminal or console.is_jupyter):
        yield None
        return
    with Progress(console=console, transient=True) as bars:
        task = bars.add_task("warming up", total=None)

        def moved(load: str, done: int, total: int) -> None:
            bars.update(task, description=load, completed=done, total=total)

        yield moved


def _write_files(report: Report, json_file: Path | None, svg_file: Path | None) -> None:
    from mlxserve.bench.chart import svg

    if json_file is not None:
        json_file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if svg_file is not None:
        svg_file.write_text(svg(report), encoding="utf-8")


def _show(report: Report, earlier: Report | None) -> None:
    """The table on standard output: ruled on a terminal, plain columns in a pipe."""
    from mlxserve.bench.machine import describe
    from mlxserve.bench.report import rows

    listed = rows(report, earlier)
    if sys.stdout.isatty():
        _ruled(listed)
    else:
        click.echo(common.table(listed))
    target, sizes = report["target"], report["sizes"]
    where = f"{target['url']} ({target['name']})" if target["url"] else f"{target['name']}, in process"
    common.say(f"{where}; tokens counted by {report['counted_by']}")
    common.say(
        f"{sizes['clients']} clients, {sizes['requests']} requests, answers of {sizes['tokens']} tokens, "
        f"prompts of about {sizes['prompt_tokens']}, prefix {sizes['prefix_tokens']}, long prompt "
        f"{sizes['long_tokens']}; seed {sizes['seed']}"
    )
    if report["peak_bytes"] is not None:
        from mlxserve.models.memory import show_bytes

        common.say(f"peak memory {show_bytes(report['peak_bytes'])}")
    common.say(describe(report["machine"]))
    for scenario in report["scenarios"]:
        for failure in scenario["failures"]:
            common.say(f"{scenario['name']}: {failure}")


def _ruled(rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    ruled = Table(*rows[0])
    before = rows[1][0] if len(rows) > 1 else ""
    for row in rows[1:]:
        if row[0] != before:
            ruled.add_section()
        ruled.add_row(row[0], *row[1:])
        before = row[0]
    Console().print(ruled)


def _answered(scenario: dict[str, Any]) -> int:
    return sum(not request["failed"] for request in scenario["requests"])
