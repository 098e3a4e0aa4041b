"""The picture of a run: training loss, held-out loss and learning rate over steps, as SVG.

Knows: events as the trainer tells them. Drawn by hand; readable on light and dark pages, and in a notebook,
where it takes the page's own text colour. Does not know files.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

Event = dict[str, Any]
Points = list[tuple[float, float]]
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 360, 56, 64, 36, 36
STYLE = (
    ".mlxserve-loss text{font:12px system-ui,sans-serif;fill:currentColor}"
    ".mlxserve-loss path{fill:none;stroke-width:1.6}"
    ".mlxserve-loss .grid{stroke:currentColor;stroke-opacity:.18;stroke-width:1}"
    ".mlxserve-loss .train{stroke:#3b82f6}"
    ".mlxserve-loss .valid{stroke:#f97316}"
    ".mlxserve-loss .rate{stroke:#8b929a;stroke-dasharray:4 3}"
    ".mlxserve-loss circle{fill:#f97316}"
)
ALONE = "svg{color:#777}@media(prefers-color-scheme:dark){svg{color:#bbb}}"


def plot(events: Sequence[Event], *, inline: bool = False) -> str:
    """The SVG. inline: for a page whose text colour it takes over; else it brings a light and a dark one."""
    steps = [event for event in events if event["kind"] == "step" and math.isfinite(event["loss"])]
    evals = [event for event in events if event["kind"] == "eval" and math.isfinite(event["loss"])]
    losses = [event["loss"] for event in [*steps, *evals]] or [0.0]
    ticks = _ticks(min(losses), max(losses))
    last = max((event["step"] for event in [*steps, *evals]), default=1)
    top_rate = max((event["lr"] for event in steps), default=0.0) or 1.0

    def points(chosen: Sequence[Event], key: str, low: float, high: float) -> Points:
        return [(_x(e["step"] / last), _y((e[key] - low) / (high - low))) for e in chosen]

    valid = points(evals, "loss", ticks[0], ticks[-1])
    parts = [
        *(_grid(tick, (tick - ticks[0]) / (ticks[-1] - ticks[0])) for tick in ticks),
        _line("rate", points(steps, "lr", 0.0, top_rate)),
        _line("train", points(steps, "loss", ticks[0], ticks[-1])),
        _line("valid", valid),
        *(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in valid),
        *_words(last, top_rate, held_out=bool(evals)),
    ]
    style = STYLE if inline else ALONE + STYLE
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="mlxserve-loss" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'role="img" style="max-width:{WIDTH}px"><title>Loss and learning rate over steps</title>'
        f"<style>{style}</style>{''.join(parts)}</svg>"
    )


def _x(share: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * share


def _y(share: float) -> float:
    return TOP + (HEIGHT - TOP - BOTTOM) * (1 - share)


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers, 3 to 7 of them, that reach from below `low` to above `high`."""
    spread = (high - low) or max(abs(high), 1.0)
    size = 10.0 ** math.floor(math.log10(spread / 3))
    step = next(size * m for m in (1, 2, 5, 10) if spread / (size * m) <= 5)
    first = math.floor(low / step)
    count = max(1, math.ceil(high / step - 1e-9) - first)
    return [(first + i) * step for i in range(count + 1)]


def _grid(tick: float, share: float) -> str:
    y = _y(share)
    return f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>' + _text(
        LEFT - 8, y + 4, "end", f"{tick:g}"
    )


def _line(kind: str, points: Points) -> str:
    path = " ".join(f"{'L' if i else 'M'}{x:.1f} {y:.1f}" for i, (x, y) in enumerate(points))
    return f'<path class="{kind}" d="{path}"/>' if points else ""


def _text(x: float, y: float, anchor: str, words: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{words}</text>'


def _words(last: int, top_rate: float, held_out: bool) -> list[str]:
    """Labels of the axes and a legend above."""
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    legend = [("train", "training loss"), ("valid", "held-out loss"), ("rate", "learning rate (right)")]
    drawn = [entry for entry in legend if held_out or entry[0] != "valid"]
    parts = [
        _text(LEFT, bottom + 18, "start", "0"),
        _text(right, bottom + 18, "end", f"step {last:,}"),
        _text(right + 8, TOP + 4, "start", f"{top_rate:.2g}"),
        _text(right + 8, bottom + 4, "start", "0"),
    ]
    for place, (kind, words) in enumerate(drawn):
        x = LEFT + 150 * place
        parts += [f'<path class="{kind}" d="M{x} 16h22"/>', _text(x + 28, 20, "start", words)]
    return parts
