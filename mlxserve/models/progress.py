"""Bars on standard error: of a download, and of anything that is counted.

Knows: how to draw them on a terminal or in a notebook. Knows nothing of what is downloaded or counted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mlxserve.models.transfer import Progress


@contextmanager
def download_bar(title: str) -> Iterator[Progress]:
    """A callable for (bytes present, bytes in all) that moves a bar; plain lines where there is no terminal.

    Standard output stays untouched, so that a command's answer can be piped.
    """
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bars

    console = Console(stderr=True)
    if not (console.is_terminal or console.is_jupyter):
        print(f"Downloading {title} …", file=sys.stderr)
        yield lambda done, total: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Bars(*columns, TimeRemainingColumn(), console=console) as bars:
        task = bars.add_task(title, total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)


@contextmanager
def count_bar(title: str, total: int) -> Iterator[Callable[[int, int], None]]:
    """A callable for (done, all) that moves a bar; nothing is drawn where there is no terminal or notebook."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    console = Console(stderr=True)
    if not (console.is_terminal or console.is_jupyter):
        yield lambda done, total: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Bars(*columns, console=console) as bars:
        task = bars.add_task(title, total=total)
        yield lambda done, total: bars.update(task, completed=done, total=total)
