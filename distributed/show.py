"""A plan for people: as plain text, as HTML for Jupyter, and as rows for a table on a terminal.

Knows: words and columns. Does not know how a plan is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from mlxserve.config import GIB
from mlxserve.distributed.estimate import Speed
from mlxserve.distributed.shapes import find_shape
from mlxserve.models.aliases import is_alias
from mlxserve.models.memory import show_count

if TYPE_CHECKING:
    from mlxserve.distributed.plan import Plan
    from mlxserve.distributed.shares import Option, RankShare

RANK_COLUMNS = ("RANK", "HOST", "MEMORY", "LAYERS", "WEIGHTS", "K/V", "NEEDS", "OF", "SPARE", "FILES")
OPTION_COLUMNS = ("SPLIT", "LINK", "FITS", "TOKENS/S, EMPTY", "TOKENS/S, FULL CONTEXT")
LEGEND = (
    "(GB; needs = weights + K/V + 3.0 to work in, less for small models; of three quarters of the memory)"
)
LINKS = {"rdma": "RDMA", "tcp": "TCP"}


def title(plan: Plan) -> str:
    """What is divided over how much."""
    hosts = len(plan.shares)
    active = f", {show_count(int(plan.active))} active" if plan.active < 0.9 * plan.parameters else ""
    sequences = f"{plan.sequences} x " if plan.sequences > 1 else ""
    return (
        f"{plan.model}: {show_count(plan.parameters)} parameters{active}, {plan.form}, "
        f"{_gb(plan.total_bytes)} GB, for {sequences}{plan.context:,} tokens over {hosts} host"
        f"{'s' if hosts > 1 else ''}"
    )


def rank_table(plan: Plan) -> list[tuple[str, ...]]:
    """A heading and a row a rank; sizes in GB of 10^9 bytes. Files are left out where they are not known."""
    divided = plan.split.mode == "tensor" and len(plan.shares) > 1
    rows = [RANK_COLUMNS, *(_rank_row(share, divided) for share in plan.shares)]
    return [row[:-1] for row in rows] if all(share.files is None for share in plan.shares) else rows


def _rank_row(share: RankShare, divided: bool) -> tuple[str, ...]:
    first, behind = share.layers
    memory = share.host.memory_bytes or 0
    layers = f"all {behind}, divided" if divided else f"{behind - first} ({first}-{behind - 1})"
    return (
        str(share.rank),
        share.host.name + (f" ({share.host.chip})" if share.host.chip else ""),
        f"{memory / GIB:.0f}GB",
        layers,
        _gb(share.bytes),
        _gb(share.kv_bytes),
        _gb(share.needed_bytes),
        _gb(share.usable_bytes),
        f"{_gb(share.spare_bytes)}" if share.fits else f"short by {_gb(-share.spare_bytes)}",
        "unknown" if share.files is None else f"{len(share.files)}, {_gb(share.file_bytes or 0)}",
    )


def option_table(plan: Plan) -> list[tuple[str, ...]]:
    """A heading and a row for each split that was looked at."""
    return [OPTION_COLUMNS, *(_option_row(option) for option in plan.options)]


def _option_row(option: Option) -> tuple[str, ...]:
    link = "-" if option.split.endswith(":1") else LINKS[option.link]
    if option.refusal:
        return (option.split, link, f"no: {option.refusal}", "", "")
    fits = "yes" if option.fits else f"short by {_gb(-option.spare_bytes)}"
    return (option.split, link, fits, *(_range(value) for value in (option.empty, option.full)))


def _range(tokens_per_s: float | None) -> str:
    return "unknown" if tokens_per_s is None else str(Speed(tokens_per_s))


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:.1f}" if abs(nbytes) >= 50_000_000 or not nbytes else f"{nbytes / 1e9:.3f}"


def closing(plan: Plan) -> list[str]:
    """Sentences below the tables."""
    lines = [f"Chosen: {plan.split}: {plan.reason}."]
    if not plan.fits:
        lines.append(f"It does not fit. What would do: {'; '.join(plan.advice) or 'more memory'}.")
    lines += plan.notes
    if any(option.full is not None for option in plan.options):
        estimate = "Tokens a second are an estimate for one sequence, ±35 %, unverified on Macs."
        lines.append(f"{estimate} What it really does: {measuring(plan)}" if plan.fits else estimate)
    lines.append(f"Plan {plan.digest}.")
    return lines


def measuring(plan: Plan) -> str:
    """The command whose last line is the true speed. A built-in shape names no files, so a model stands open."""
    bits = f" --quantize {plan.bits}" if plan.bits else ""
    fetched = "/" in plan.model or is_alias(plan.model)
    model = "MODEL" if not fetched and find_shape(plan.model) else plan.model
    return (
        f"mlxserve launch --hosts FILE --split {plan.split} -- "
        f"generate --model {model}{bits} --prompt 'Tell me a story.'"
    )


def plan_text(plan: Plan) -> str:
    """Everything as plain columns."""
    return "\n".join(
        [
            title(plan),
            "",
            columns(rank_table(plan)),
            LEGEND,
            "",
            columns(option_table(plan)),
            "",
            *closing(plan),
        ]
    )


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Rows in aligned columns."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def plan_html(plan: Plan) -> str:
    """The same for a notebook: a bar of each host's memory, and both tables."""
    bars = "".join(_bar(share) for share in plan.shares)
    ranks, options = _html_table(rank_table(plan)), _html_table(option_table(plan))
    words = "".join(f"<p>{escape(line)}</p>" for line in closing(plan))
    return (
        f"<div><p><b>{escape(title(plan))}</b></p>{bars}{ranks}<p>{escape(LEGEND)}</p>{options}{words}</div>"
    )


def _bar(share: RankShare) -> str:
    """Weights, K/V and work as parts of the memory; red where it does not fit."""
    memory = share.host.memory_bytes or 1
    parts = (
        (share.bytes, "#4878a8"),
        (share.kv_bytes, "#7fb069"),
        (share.needed_bytes - share.bytes - share.kv_bytes, "#b8a04a"),
    )
    scale = 100 / max(memory, share.needed_bytes)
    cells = "".join(
        f'<span style="display:inline-block;height:100%;width:{nbytes * scale:.2f}%;background:{color}"></span>'
        for nbytes, color in parts
    )
    border = "#888" if share.fits else "#c0392b"
    return (
        f'<div style="display:flex;align-items:center;gap:8px;margin:2px 0">'
        f'<span style="width:9em">{escape(share.host.name)}</span>'
        f'<span style="width:320px;height:14px;border:1px solid {border};font-size:0;white-space:nowrap">{cells}'
        "</span></div>"
    )


def _html_table(rows: Sequence[Sequence[str]]) -> str:
    head, *body = ("".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in row) for tag, row in _tagged(rows))
    lines = "".join(f"<tr>{cells}</tr>" for cells in body)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>"


def _tagged(rows: Sequence[Sequence[str]]) -> list[tuple[str, Sequence[str]]]:
    return [("td" if number else "th", row) for number, row in enumerate(rows)]
