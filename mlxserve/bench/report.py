"""A measurement as rows for a table, as JSON, and compared with an earlier one.

Knows: how a number is written, what the JSON holds. Does not know a terminal.

The JSON: {"format": 1, "target", "machine", "sizes", "counted_by", "peak_bytes", "scenarios": [{"name",
"figures": {key: {"words", "value", "unit", "more_is_better"}}, "failures", "requests": [{"role", "client",
"began_s", "first_s", "total_s", "prompt_tokens", "cached_tokens", "tokens"}]}]}; times in seconds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mlxserve.bench.figures import figures
from mlxserve.bench.measure import Seen
from mlxserve.bench.scenarios import Sizes
from mlxserve.bench.target import Target
from mlxserve.errors import UsageError

FORMAT = 1
Report = dict[str, Any]


def build(
    target: Target, sizes: Sizes, seen: Sequence[Seen], machine: Mapping[str, Any], peak_bytes: int | None
) -> Report:
    """Everything that was found, as plain values."""
    settings = {name: value for name, value in asdict(sizes).items() if name != "own"}
    return {
        "format": FORMAT,
        "target": {"kind": target.kind, "name": target.name, "url": getattr(target, "url", None)},
        "machine": dict(machine),
        "sizes": {**settings, "own_prompts": len(sizes.own)},
        "counted_by": counted_by(seen),
        "peak_bytes": peak_bytes,
        "scenarios": [_scenario(one) for one in seen],
    }


def counted_by(seen: Sequence[Seen]) -> str:
    """ "usage" if every answer came with its own count of tokens, "chunks" if none, else "usage or chunks"."""
    told = {trace.totals.completion_tokens is not None for one in seen for trace in one.answered}
    return {frozenset({True}): "usage", frozenset({True, False}): "usage or chunks"}.get(
        frozenset(told), "chunks"
    )


def _scenario(seen: Seen) -> dict[str, Any]:
    requests = [
        {
            "role": job.role,
            "client": job.client,
            "began_s": trace.began_s,
            "first_s": trace.first_s,
            "total_s": trace.total_s,
            "prompt_tokens": trace.totals.prompt_tokens,
            "cached_tokens": trace.totals.cached_tokens,
            "tokens": trace.tokens,
            "failed": trace.failed,
        }
        for job, trace in zip(seen.jobs, seen.traces)
    ]
    listed = {
        f.key: {"words": f.words, "value": f.value, "unit": f.unit, "more_is_better": f.more_is_better}
        for f in figures(seen)
    }
    failures = sorted(set(seen.failures))
    return {"name": seen.load.name, "figures": listed, "failures": failures, "requests": requests}


def rows(report: Report, earlier: Report | None = None) -> list[tuple[str, ...]]:
    """The table, its header first: load, measure, value, and the ratio to an earlier report if there is one."""
    header = ("load", "measure", "value") + (("ratio to the other",) if earlier else ())
    listed: list[tuple[str, ...]] = [header]
    for scenario in report["scenarios"]:
        for key, figure in scenario["figures"].items():
            cells = [scenario["name"], figure["words"], show(figure["value"], figure["unit"])]
            if earlier:
                cells.append(_against(figure["value"], _find(earlier, scenario["name"], key)))
            listed.append(tuple(cells))
    return listed


def show(value: float | None, unit: str) -> str:
    """A number for people: three digits that count, milliseconds below a second."""
    if value is None:
        return "—"
    if unit == "s":
        return f"{value * 1000:.3g} ms" if value < 1 else f"{value:.3g} s"
    if unit == "share":
        return f"{value:.0%}"
    if unit == "ratio":
        return f"{value:.2f}"
    if not unit:
        return f"{value:,.0f}"
    return f"{value:.3g} {unit}" if value < 1000 else f"{value:,.0f} {unit}"


def _against(value: float | None, other: float | None) -> str:
    return f"{value / other:.2f}" if value is not None and other else "—"


def _find(report: Report, scenario: str, key: str) -> float | None:
    for one in report["scenarios"]:
        if one["name"] == scenario and key in one["figures"]:
            value = one["figures"][key]["value"]
            return None if value is None else float(value)
    return None


def read(path: Path) -> Report:
    """A report from a file. Raises UsageError, naming the file, for anything else."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.", param="against") from error
    except ValueError as error:
        raise UsageError(f"{path} is not valid JSON: {error}.", param="against") from error
    if not isinstance(report, dict) or report.get("format") != FORMAT:
        raise UsageError(f"{path} is no report of mlxserve bench (format {FORMAT}).", param="against")
    return report
