"""Large models on 2 to 8 Macs, simulated: tables for BENCHMARKS.md and docs/plots/simulated-macs.svg.

    python benchmarks/simulate_macs.py [--svg docs/plots/simulated-macs.svg]

Nothing is measured here: distributed/simulate.py says what is assumed. The error of its formulas against
figures that others published is up to 35 %.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from benchmarks.plot import Line, Panel, draw
from benchmarks.table import Table
from mlxserve.distributed.estimate import ERROR
from mlxserve.distributed.facts import Facts
from mlxserve.distributed.hosts import Host, parse_hosts
from mlxserve.distributed.plan import make_plan
from mlxserve.distributed.simulate import Machine, Outcome, Work, simulate
from mlxserve.distributed.sources import facts_of
from mlxserve.errors import DoesNotFit, UsageError

MODELS = ("llama-3.1-405b", "qwen3-235b-a22b", "deepseek-v3")
SIZES = (2, 4, 8)
CONTEXTS = (4_096, 32_768, 131_072)
HOST = "256GB:m3-ultra"
STREAMS = 16
ANSWER = 64
WAYS = (("tensor", "rdma"), ("tensor", "tcp"), ("pipeline", "tcp"))
NAMES = ("TP RDMA", "TP TCP", "PP")  # the same in the tables
CHAT = Work(prompt=2_000, answer=300, count=200)
RATES = (0.02, 0.05, 0.1, 0.2, 0.4, 0.8)


@cache
def facts(name: str) -> Facts:
    return facts_of(name, 4, SIZES)


@cache
def machine(name: str, size: int, mode: str, link: str, tokens: int) -> Machine | None:
    """A model on `size` Macs, cut for sequences of so many tokens; None where it cannot be or does not fit."""
    hosts: list[Host] = parse_hosts([f"{size}x{HOST}"])
    try:
        plan = make_plan(facts(name), hosts, tokens, mode, link=link)  # type: ignore[arg-type]
    except UsageError:
        return None
    return Machine(facts(name), plan.split, tuple(hosts), link) if plan.fits else None


def run(made: Machine | None, work: Work, micro_batches: int | None = None) -> Outcome | None:
    try:
        return simulate(made, work, micro_batches) if made else None
    except DoesNotFit:
        return None


def decoding(name: str, size: int, way: tuple[str, str], context: int, streams: int) -> Outcome | None:
    """Streams that decode behind a context that was read before."""
    work = Work(prompt=context - ANSWER, answer=ANSWER, count=streams, cached=context)
    return run(machine(name, size, *way, context), work)


def decode_table(models: Sequence[str], sizes: Sequence[int]) -> Table:
    together = [f"{STREAMS} x {name}" for name in NAMES]
    table = Table("model", "Macs", "context", *NAMES, *together, "one micro-batch")
    for name in models:
        for size in sizes:
            for context in CONTEXTS:
                one = [decoding(name, size, way, context, 1) for way in WAYS]
                many = [decoding(name, size, way, context, STREAMS) for way in WAYS]
                work = Work(prompt=context - ANSWER, answer=ANSWER, count=STREAMS, cached=context)
                alone = run(machine(name, size, "pipeline", "tcp", context), work, 1)
                cells = [shown(outcome) for outcome in (*one, *many, alone)]
                table.add(name, size, f"{context // 1024}k", *cells)
    return table


def prompt_table(models: Sequence[str], sizes: Sequence[int]) -> Table:
    """Seconds until the first token of a prompt of which nothing is cached."""
    table = Table("model", "Macs", "prompt", *NAMES)
    for name in models:
        for size in sizes:
            for context in CONTEXTS:
                work = Work(prompt=context - 1, answer=1, count=1)
                seen = [run(machine(name, size, *way, context), work) for way in WAYS]
                table.add(
                    name, size, f"{context // 1024}k", *(f"{s.first_s[0]:.0f} s" if s else "-" for s in seen)
                )
    return table


def load_table(name: str, size: int, rates: Sequence[float]) -> Table:
    table = Table(
        "requests/s",
        *(f"{what} {way}" for way in NAMES for what in ("tokens/s", "p95 first")),
    )
    for rate in rates:
        cells: list[str] = []
        for way in WAYS:
            seen = loaded(name, size, way, rate)
            cells += [shown(seen), f"{seen.first_at(0.95):.0f} s" if seen else "-"]
        table.add(rate, *cells)
    return table


@cache
def loaded(name: str, size: int, way: tuple[str, str], rate: float) -> Outcome | None:
    return run(machine(name, size, *way, 32_768), replace(CHAT, rate=rate))


def shown(outcome: Outcome | None) -> str:
    if outcome is None:
        return "-"
    return f"{outcome.tokens_per_s:.0f}" if outcome.tokens_per_s >= 20 else f"{outcome.tokens_per_s:.1f}"


def picture() -> str:
    return draw(
        "Several Macs, simulated",
        [
            _by_size("Llama-3.1-405B, 32k context, one stream", 1, ERROR),
            _by_size(f"the same, {STREAMS} streams", STREAMS),
            _by_rate("Qwen3-235B-A22B on 4 Macs, chat"),
        ],
    )


def _by_size(title: str, streams: int, error: float = 0.0) -> Panel:
    lines = []
    for way, kind in zip(WAYS, ("a", "b", "c")):
        sizes: Iterable[int] = SIZES if way[0] == "tensor" else range(2, 9)
        points = [
            (size, seen.tokens_per_s)
            for size in sizes
            if (seen := decoding(MODELS[0], size, way, 32_768, streams))
        ]
        lines.append(Line(_name(way), kind, points, error))
    return Panel(title, "Macs", "tokens a second", lines)


def _by_rate(title: str) -> Panel:
    lines = []
    for way, kind in zip(WAYS, ("a", "b", "c")):
        seen = [(rate, loaded(MODELS[1], 4, way, rate)) for rate in RATES]
        lines.append(Line(_name(way), kind, [(rate, s.first_at(0.95)) for rate, s in seen if s]))
    return Panel(title, "requests a second", "95 % have their first token within, s", lines, log=True)


def _name(way: tuple[str, str]) -> str:
    return {"tensor": f"tensor, {way[1].upper()}", "pipeline": "pipeline"}[way[0]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--svg", type=Path, help="where the plot goes; none is drawn without")
    parser.add_argument("--quick", action="store_true", help="one model, two and four Macs")
    chosen = parser.parse_args()
    models, sizes = (MODELS[1:2], SIZES[:1]) if chosen.quick else (MODELS, SIZES)
    show(
        f"Decoding, tokens a second: one stream, then {STREAMS} together",
        decode_table(models, sizes),
        f"4 bits, contexts that were read before, each Mac {HOST.replace(':', ' ')}; a dash: cannot be divided so, or "
        f"does not fit. Of the {STREAMS} streams only those run at once whose K/V fits.",
    )
    show(
        "The first token of a cold prompt",
        prompt_table(models, sizes[:: len(sizes) - 1 or 1]),
        "One request; a pipeline's chunks of one prompt follow one another, so more stages do not help it.",
    )
    show(
        f"{MODELS[1]} on 4 Macs under load",
        load_table(MODELS[1], 4, RATES[:2] if chosen.quick else RATES),
        f"{CHAT.prompt:,} tokens in, {CHAT.answer} out, {CHAT.count} requests arriving at random.",
    )
    if chosen.svg:
        chosen.svg.parent.mkdir(parents=True, exist_ok=True)
        chosen.svg.write_text(picture(), encoding="utf-8")


def show(title: str, table: Table, words: str) -> None:
    print(
        f"\n### {title}\n\n{table.markdown()}\n\nSimulated, not measured, ±{ERROR:.0%}. {words}\n", flush=True
    )


if __name__ == "__main__":
    main()
