"""How a run looks in a terminal: its plan, its data, its progress.

Knows: plain facts and events in, text out; rich for the bar. Does not know the trainer's insides.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

import click

from mlxserve.cli.common import say, table
from mlxserve.models.memory import show_bytes, show_count

if TYPE_CHECKING:
    from rich.console import Console

    from mlxserve.lora.api import Prepared
    from mlxserve.lora.config import RunConfig
    from mlxserve.lora.data import Dataset
    from mlxserve.text.tokenizer import Tokenizer

SHOWN_TOKENS = 400  # of the one row whose trained tokens are highlighted


def plan_text(facts: dict[str, Any]) -> str:
    """What a run needs, as tables and sentences."""
    rows = [[name, show_bytes(size)] for name, size in facts["bytes"].items()]
    verdict = "fits" if facts["fits_machine"] else "does not fit"
    lines = [
        table([*rows, ["together", show_bytes(facts["needed_bytes"])]]),
        f"{verdict} the {show_bytes(facts['budget_bytes'])} of this machine",
        f"{show_count(facts['trainable_parameters'])} parameters train; {facts['tokens_per_micro_batch']:,} "
        f"tokens a micro-batch; at most about {facts['tokens_per_s']:,.0f} tokens a second here",
    ]
    if "steps" in facts:
        lines.append(
            f"{facts['tokens']:,} tokens in {facts['steps']:,} steps: at least {_duration(facts['seconds'])}"
        )
    if "fits" in facts:
        head = ["LENGTH", "RANK", "CHECKPOINTING", "ROWS A BATCH"]
        body = [[str(row[k]) for k in ("length", "rank", "checkpointing", "rows")] for row in facts["fits"]]
        lines.append(table([head, *body]))
    if "tensors" in facts:
        lines.append(table([[name, "×".join(map(str, shape))] for name, shape in facts["tensors"]]))
    return "\n".join(lines)


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def data_facts(data: Dataset) -> dict[str, Any]:
    """Counts of a data set's rows and tokens, and what became of rows that do not train."""
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


def data_text(name: str, facts: dict[str, Any], data: Dataset) -> str:
    """The same for a person, with a histogram of lengths."""
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


def highlighted(item: Any, tokenizer: Tokenizer, *, colours: bool = True) -> str:
    """One row as text with its trained tokens in green, or between ⟦ and ⟧ where there are no colours; a
    preference row's chosen answer."""
    sample = getattr(item, "chosen", item)
    marked = [*zip(sample.tokens.tolist(), sample.targets.tolist())][:SHOWN_TOKENS]
    text = "".join(_pieces(marked, tokenizer, colours))
    return text if len(sample.tokens) <= SHOWN_TOKENS else f"{text} … ({len(sample.tokens)} tokens)"


def _pieces(marked: list[tuple[int, bool]], tokenizer: Tokenizer, colours: bool) -> Iterator[str]:
    for trained, run in groupby(marked, key=lambda pair: pair[1]):
        text = b"".join(tokenizer.token_bytes(token) for token, _ in run).decode("utf-8", "replace")
        shown = click.style(text, fg="green", bold=True) if colours else f"⟦{text}⟧"
        yield shown if trained else text


def one_row(data: Dataset, tokenizer: Tokenizer, *, colours: bool) -> str:
    """The first row of a data set, for a person to see what is trained."""
    item = data.items[0]
    row = highlighted(item, tokenizer, colours=colours)
    return f"One row ({item.where}), its trained tokens highlighted:\n\n{row}\n"


def summary(prepared: Prepared, steps: int, budget_bytes: int) -> str:
    """What a run is about to do: data, adapter, batches, memory."""
    from mlxserve.lora.train import count_steps

    config, plan = prepared.config, prepared.plan
    train, lora = config.train, config.lora
    splits = {"train": prepared.train, **({"valid": prepared.valid} if prepared.valid else {})}
    whole_model = lora.targets == "all-linear" and lora.layers == "all"
    full = "all parameters" if whole_model else "the chosen layers whole"
    kind = f"{lora.type} of rank {lora.rank}, scale {lora.scale:g}"
    whole = count_steps(replace(config, train=replace(train, steps=None)), prepared.train)
    mean = prepared.train.target_count * train.epochs / whole
    return "\n".join(
        [
            *(data_text(name, data_facts(data), data) for name, data in splits.items()),
            "",
            one_row(prepared.train, prepared.base.tokenizer, colours=sys.stderr.isatty()),
            f"{full if lora.type == 'full' else kind}: {show_count(plan.trainable)} parameters train",
            f"{steps:,} steps of {train.accumulate} × up to {plan.tokens:,} tokens, about {mean:,.0f} of them "
            f"trained; {train.optimizer}, learning rate {train.lr:g}, {train.schedule}",
            f"about {show_bytes(plan.needed_bytes)} of the machine's {show_bytes(budget_bytes)}; checkpointing "
            f"{'on' if plan.checkpointing else 'off'}",
        ]
    )


class Lines:
    """Plain lines on standard error, one every log.every steps."""

    def __init__(self, config: RunConfig) -> None:
        self.every = config.log.every

    def __call__(self, event: dict[str, Any]) -> None:
        if event["kind"] != "step":
            for line in event_lines(event):
                say(line)
        elif event["step"] % self.every == 0 or event["step"] == event["steps"]:
            say(f"step {event['step']}/{event['steps']}: {figures(event)}")

    def close(self) -> None:
        """Nothing is open."""


def event_lines(event: dict[str, Any]) -> list[str]:
    """What is said of an evaluation, a sample or a resumption; of other events nothing."""
    if event["kind"] == "eval":
        best = " (best)" if event["best"] else ""
        return [f"step {event['step']}: held-out loss {event['loss']:.4f}{best}"]
    if event["kind"] == "sample":
        return [f"  {event['prompt']} → {event['text'].strip()}"]
    return [f"resumed after step {event['step']}"] if event["kind"] == "resume" else []


def figures(event: dict[str, Any]) -> str:
    """A step's figures in a line."""
    return (
        f"loss {event['loss']:.4f}, lr {event['lr']:.2e}, gradient {event['grad_norm']:.3f}, "
        f"{event['tokens_per_s']:.0f} tokens/s, padding {event['padding']:.0%}, memory "
        f"{show_bytes(event['active_bytes'])} (peak {show_bytes(event['peak_bytes'])})"
    )


class Bar:
    """A bar with the time left, and the latest figures below it, on a terminal."""

    def __init__(self, console: Console | None = None) -> None:
        from rich.console import Console
        from rich.live import Live
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self.bar = Progress(
            TextColumn("step"), MofNCompleteColumn(), BarColumn(), TimeRemainingColumn(), TextColumn("left")
        )
        self.task = self.bar.add_task("", total=None)
        self.live = Live(self.bar, console=console or Console(stderr=True), refresh_per_second=4)
        self.live.start()

    def __call__(self, event: dict[str, Any]) -> None:
        from rich.console import Group
        from rich.text import Text

        if event["kind"] == "step":
            self.bar.update(self.task, completed=event["step"], total=event["steps"])
            self.live.update(Group(self.bar, Text(figures(event), style="dim")))
        for line in event_lines(event):
            self.live.console.print(Text(line))

    def close(self) -> None:
        self.live.stop()
