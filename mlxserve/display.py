"""How results look in a notebook: small HTML with colours that can be read on white and on black.

Knows: escaping, a table of facts, coloured boxes. Text takes the notebook's own colour; fills are
half-transparent. Plain Python: no MLX, no IPython.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

__all__ = ["box", "escape", "facts", "small", "text"]

BLUE, ORANGE, GREY = "rgba(63,143,208,.40)", "rgba(208,138,62,.50)", "rgba(128,128,128,.20)"
_CELL = "text-align:left;padding:1px 14px 1px 0"
_BOX = "display:inline-block;min-width:2.2em;margin:1px;padding:0 3px;text-align:center;border-radius:3px"


def facts(rows: Iterable[tuple[str, str]], title: str = "") -> str:
    """A table of names and values, everything escaped."""
    head = f"<b>{escape(title)}</b>" if title else ""
    lines = "".join(
        f'<tr style="background:none"><td style="{_CELL};opacity:.7">{escape(name)}</td>'
        f'<td style="{_CELL}">{escape(value)}</td></tr>'
        for name, value in rows
    )
    return f'<div>{head}<table style="border:none">{lines}</table></div>'


def text(words: str) -> str:
    """Words with their line breaks, beside a bar that sets them apart."""
    style = "white-space:pre-wrap;border-left:3px solid rgba(63,143,208,.6);padding-left:10px;margin:4px 0"
    return f'<div style="{style}">{escape(words)}</div>'


def small(parts: Sequence[str]) -> str:
    """A line of figures."""
    return f'<div style="opacity:.7;font-size:90%">{escape(" · ".join(parts))}</div>'


def box(words: str, colour: str) -> str:
    """A coloured box with a word in it."""
    return f'<span style="{_BOX};background:{colour}">{escape(words)}</span>'
