"""Line plots as SVG, drawn by hand, readable on light and dark pages. Knows panels, lines and axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 340, 280, 50, 14, 54, 44
STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#444}.title{font-weight:600}.axis{stroke:#999;stroke-width:1}"
    ".grid{stroke:#ddd;stroke-width:.6}path{fill:none;stroke-width:1.8}"
    ".a{stroke:#2a6fdb}.b{stroke:#d9480f}.c{stroke:#2b8a3e}"
    "circle.a{fill:#2a6fdb}circle.b{fill:#d9480f}circle.c{fill:#2b8a3e}"
    "path.band{stroke:none;opacity:.14}.band.a{fill:#2a6fdb}.band.b{fill:#d9480f}.band.c{fill:#2b8a3e}"
    "@media(prefers-color-scheme:dark){text{fill:#ccc}.axis{stroke:#666}.grid{stroke:#333}"
    ".a{stroke:#74a9ff}.b{stroke:#ff922b}.c{stroke:#69db7c}"
    "circle.a,.band.a{fill:#74a9ff}circle.b,.band.b{fill:#ff922b}circle.c,.band.c{fill:#69db7c}}"
)


@dataclass(frozen=True)
class Line:
    """`kind` is a colour of the style: a, b or c. error: a band of so much around it, as a share."""

    name: str
    kind: str
    points: Sequence[tuple[float, float]]
    error: float = 0.0


@dataclass(frozen=True)
class Panel:
    """One pair of axes; `log` stretches both by powers of ten."""

    title: str
    across: str
    up: str
    lines: Sequence[Line] = field(default=())
    log: bool = False


def draw(title: str, panels: Sequence[Panel]) -> str:
    """The panels side by side, a legend below them."""
    names = {line.name: line.kind for panel in panels for line in panel.lines}
    legend, x = [], float(LEFT)
    for name, kind in names.items():
        legend.append(
            f'<path class="{kind}" d="M{x:.0f} {HEIGHT + 10}h22"/>{_text(x + 28, HEIGHT + 14, name)}'
        )
        x += 50 + 7 * len(name)
    body = "".join(
        f'<g transform="translate({number * WIDTH} 0)">{_panel(panel)}</g>'
        for number, panel in enumerate(panels)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH * len(panels)} {HEIGHT + 26}" role="img">'
        f"<title>{escape(title)}</title><style>{STYLE}</style>{body}{''.join(legend)}</svg>\n"
    )


def _text(x: float, y: float, words: str, anchor: str = "start", kind: str = "") -> str:
    mark = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{mark}>{escape(words)}</text>'


def _panel(panel: Panel) -> str:
    points = [point for line in panel.lines for point in line.points]
    if not points:
        return _text(LEFT, TOP - 28, panel.title, kind="title")
    tops = [y * (1 + line.error) for line in panel.lines for _, y in line.points]
    across = _ticks(min(x for x, _ in points), max(x for x, _ in points), panel.log, whole=not panel.log)
    up = _ticks(min(y for _, y in points) if panel.log else 0.0, max(tops), panel.log)

    def place(x: float, y: float) -> tuple[float, float]:
        right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
        return (
            LEFT + (right - LEFT) * _share(x, across, panel.log),
            bottom - (bottom - TOP) * _share(y, up, panel.log),
        )

    return "".join([_axes(panel, across, up, place), *(_line(line, place) for line in panel.lines)])


def _share(value: float, ticks: Sequence[float], log: bool) -> float:
    low, high = ticks[0], ticks[-1]
    if log:
        value, low, high = math.log10(value), math.log10(low), math.log10(high)
    return (value - low) / (high - low or 1)


def _ticks(low: float, high: float, log: bool, whole: bool = False) -> list[float]:
    """Round values that enclose [low, high]."""
    if log:
        first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
        return [10.0**power for power in range(first, max(last, first + 1) + 1)]
    if whole:
        return [float(value) for value in range(math.floor(low), math.ceil(high) + 1)]
    step = 10 ** math.floor(math.log10(high - low or 1))
    step = next(s for s in (step / 5, step / 2, step, 2 * step) if (high - low) / s <= 6)
    return [low + step * n for n in range(math.ceil((high - low) / step) + 1)]


def _axes(panel: Panel, across: Sequence[float], up: Sequence[float], place) -> str:  # type: ignore[no-untyped-def]
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    parts = [_text(LEFT, TOP - 34, panel.title, kind="title"), _text(LEFT, TOP - 14, panel.up)]
    for value in up:
        y = place(across[0], value)[1]
        parts.append(
            f'<path class="grid" d="M{LEFT} {y:.1f}H{right}"/>{_text(LEFT - 6, y + 4, f"{value:g}", "end")}'
        )
    for value in across:
        parts.append(_text(place(value, up[0])[0], bottom + 17, f"{value:g}", "middle"))
    parts.append(_text((LEFT + right) / 2, bottom + 36, panel.across, "middle"))
    parts.append(f'<path class="axis" d="M{LEFT} {TOP}V{bottom}H{right}"/>')
    return "".join(parts)


def _line(line: Line, place) -> str:  # type: ignore[no-untyped-def]
    middle = [place(x, y) for x, y in line.points]
    band = ""
    if line.error and line.points:
        edge = [place(x, y * (1 + line.error)) for x, y in line.points]
        edge += [place(x, y * (1 - line.error)) for x, y in reversed(line.points)]
        band = f'<path class="band {line.kind}" d="{_path(edge)}Z"/>'
    dots = "".join(f'<circle class="{line.kind}" cx="{x:.1f}" cy="{y:.1f}" r="2.6"/>' for x, y in middle)
    return f'{band}<path class="{line.kind}" d="{_path(middle)}"/>{dots}'


def _path(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{'L' if n else 'M'}{x:.1f} {y:.1f}" for n, (x, y) in enumerate(points))
