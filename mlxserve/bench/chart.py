"""A report as an SVG: every request as a line, pale while it waits and full while it is answered.

Knows: places and colours. One drawing for light and dark: no background, a media query for the text.
"""

from __future__ import annotations

from typing import Any
from xml.sax.saxutils import escape, quoteattr

from mlxserve.bench.report import Report, show

WIDTH, LEFT, RIGHT = 840, 16, 16
TITLE, ROW, GAP, AXIS = 40, 7, 26, 18
MAX_ROWS = 40
STYLE = """
  text { font: 12px system-ui, sans-serif; fill: #333 } .title { font-weight: 600; font-size: 14px }
  .small { font-size: 11px; opacity: .8 } .wait { fill: #d08a3e; opacity: .45 } .answer { fill: #3f8fd0 }
  .failed { fill: #c8403a } .axis { stroke: #888; stroke-width: 1 }
  @media (prefers-color-scheme: dark) { text { fill: #ddd } }
"""


def svg(report: Report) -> str:
    """The drawing as text; a panel a load, time in seconds to the right, a request a line."""
    parts, y = [], 30
    head = f"{report['target']['name']} ({report['target']['kind']})"
    parts.append(_text(LEFT, 20, head, "title"))
    parts.append(_legend())
    for scenario in report["scenarios"]:
        panel, height = _panel(scenario, y)
        parts += panel
        y += height
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" width="{WIDTH}" height="{y}" '
        f'role="img" aria-label={quoteattr(head)}>\n<style>{STYLE}</style>\n{body}\n</svg>\n'
    )


def _panel(scenario: dict[str, Any], top: int) -> tuple[list[str], int]:
    """One load's title, headline figures, lines and axis; and its height."""
    requests = scenario["requests"][:MAX_ROWS]
    end_s = max((r["began_s"] + r["total_s"] for r in requests), default=0.0) or 1.0
    scale = (WIDTH - LEFT - RIGHT) / end_s
    left_out = len(scenario["requests"]) - len(requests)
    more = f", {left_out} more requests not drawn" if left_out else ""
    parts = [
        _text(LEFT, top + 16, scenario["name"] + more, "title"),
        _text(LEFT, top + 32, _headline(scenario), "small"),
    ]
    y = top + TITLE
    for request in requests:
        parts += _line(request, y, scale)
        y += ROW
    parts.append(f'<line class="axis" x1="{LEFT}" y1="{y + 2}" x2="{WIDTH - RIGHT}" y2="{y + 2}"/>')
    parts.append(_text(LEFT, y + 2 + 12, "0", "small"))
    parts.append(_text(WIDTH - RIGHT, y + 2 + 12, show(end_s, "s"), "small", "end"))
    return parts, y - top + AXIS + GAP


def _headline(scenario: dict[str, Any]) -> str:
    figures = list(scenario["figures"].values())[:3]
    return " · ".join(f"{figure['words']}: {show(figure['value'], figure['unit'])}" for figure in figures)


def _line(request: dict[str, Any], y: int, scale: float) -> list[str]:
    """A request: from its start to its first token, and on to its end."""
    start = LEFT + request["began_s"] * scale
    total = request["total_s"] * scale
    if request["failed"] or request["first_s"] is None:
        return [_bar("failed", start, y, total)]
    first = request["first_s"] * scale
    return [_bar("wait", start, y, first), _bar("answer", start + first, y, total - first)]


def _bar(kind: str, x: float, y: int, width: float) -> str:
    return f'<rect class="{kind}" x="{x:.1f}" y="{y}" width="{max(width, 0.8):.1f}" height="{ROW - 2}"/>'


def _text(x: int, y: int, words: str, kind: str, anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x}" y="{y}" text-anchor="{anchor}">{escape(words)}</text>'


def _legend() -> str:
    x = WIDTH - RIGHT - 230
    return (
        f'<rect class="wait" x="{x}" y="11" width="14" height="9"/>{_text(x + 19, 20, "waits", "small")}'
        f'<rect class="answer" x="{x + 68}" y="11" width="14" height="9"/>'
        f"{_text(x + 87, 20, 'is answered', 'small')}"
        f'<rect class="failed" x="{x + 168}" y="11" width="14" height="9"/>{_text(x + 187, 20, "failed", "small")}'
    )
