"""Tables in Markdown, with the machine and the date, as BENCHMARKS.md keeps them."""

from __future__ import annotations

from typing import Any

import mlxserve  # noqa: F401  (first: it puts OpenBLAS in before MLX loads)
from mlxserve.bench.machine import describe
from mlxserve.bench.machine import machine as facts


class Table:
    """Rows of cells under fixed columns."""

    def __init__(self, *columns: str) -> None:
        self.columns = columns
        self.rows: list[tuple[str, ...]] = []

    def add(self, *cells: Any) -> None:
        assert len(cells) == len(self.columns)
        self.rows.append(tuple(str(cell) for cell in cells))

    def markdown(self) -> str:
        lines = [self.columns, tuple("---" for _ in self.columns), *self.rows]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines)

    def print(self, title: str) -> None:
        print(f"\n### {title}\n\n{self.markdown()}\n\n{machine()}\n")


def machine() -> str:
    """One line: processor, cores, system, versions, date."""
    return describe(facts())
