"""Page tables for people: which pages each running sequence has, and which of them it shares.

Knows: a scheduler's books, read once. Changes nothing.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from mlxserve import display
from mlxserve.cache.pages import HOLE
from mlxserve.engine.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class Row:
    """One running sequence: positions computed so far, and its page ids in order (HOLE where one slid out)."""

    name: str
    tokens: int
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PageTables:
    """The tables of one group of layers. A page holds page_size positions; `cached` pages belong to no
    running sequence, and only the prefix tree keeps them. In Jupyter, each page is a box."""

    page_size: int
    total: int
    free: int
    cached: int
    rows: tuple[Row, ...]

    @property
    def shared(self) -> frozenset[int]:
        """Pages that more than one running sequence reads."""
        counts = Counter(page for row in self.rows for page in row.pages if page != HOLE)
        return frozenset(page for page, count in counts.items() if count > 1)

    def __str__(self) -> str:
        lines = [f"{row.name}  {row.tokens:>5} tokens  {_plain(row, self.shared)}" for row in self.rows]
        return "\n".join([*lines, self._summary()])

    def _repr_html_(self) -> str:
        rows = "".join(
            f'<tr style="background:none"><td>{display.escape(row.name)}</td><td>{row.tokens} tokens</td>'
            f'<td style="text-align:left">{_boxes(row, self.shared)}</td></tr>'
            for row in self.rows
        )
        legend = f"{display.box('7', display.BLUE)} its own {display.box('7', display.ORANGE)} shared"
        return f"<div><table>{rows}</table>{legend}{display.small([self._summary()])}</div>"

    def _summary(self) -> str:
        used = self.total - self.free - self.cached
        return (
            f"{used} pages of {self.page_size} tokens in use, {self.cached} kept for prefixes, "
            f"{self.free} free of {self.total}"
        )


def page_tables(scheduler: Scheduler, group: int = 0) -> PageTables:
    """What the books say now of one group of layers; no rows for a model without pages."""
    if not scheduler.pools:
        return PageTables(scheduler.page_size, 0, 0, 0, ())
    pool = scheduler.pools[group]
    rows = tuple(
        Row(running.request.id, running.computed, tuple(running.tables[group]))
        for running in scheduler.running
    )
    return PageTables(scheduler.page_size, pool.total, pool.free, pool.idle, rows)


def _plain(row: Row, shared: frozenset[int]) -> str:
    return " ".join("·" if p == HOLE else f"[{p}]" if p in shared else str(p) for p in row.pages)


def _boxes(row: Row, shared: frozenset[int]) -> str:
    return "".join(
        display.box("·", display.GREY)
        if page == HOLE
        else display.box(str(page), display.ORANGE if page in shared else display.BLUE)
        for page in row.pages
    )
