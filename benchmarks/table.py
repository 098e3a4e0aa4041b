"""Tables in Markdown, with the machine and the date, as BENCHMARKS.md keeps them."""

from __future__ import annotations

import datetime
import os
import platform
from importlib.metadata import version
from typing import Any

import mlxserve  # noqa: F401  (first: it puts OpenBLAS in before MLX loads)


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
    processor = _processor()
    names = ", ".join(f"{name} {version(name)}" for name in ("mlx", "mlx-lm", "mlxserve"))
    from mlxserve import blas

    return (
        f"{processor}, {os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}, "
        f"{names}, BLAS {blas.in_use()}; {datetime.date.today().isoformat()}"
    )


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":")[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
