"""A kernel's failure in words: file, line, thread and what was wrong.

Knows the runtime's Failure record and how to find an instruction's line in a library's debug information.
"""

from __future__ import annotations

import bisect
import functools
import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Where:
    """One thread at one statement; `file` is None where only the launch as a whole is meant."""

    file: str | None
    line: int
    thread: int | None
    simdgroup: int
    lane: int
    threadgroup: tuple[int, int, int]

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.file else "(no single place)"
        if self.thread is None:
            return place
        return (
            f"{place}, thread {self.thread} of threadgroup {self.threadgroup}"
            f" (simdgroup {self.simdgroup}, lane {self.lane})"
        )


class KernelFailure(AssertionError):
    """A kernel did what it must not. `where` is the thread that did it, `other` the one it met, if any."""

    def __init__(
        self, kernel: str, message: str, where: Where | None, other: Where | None, order: str
    ) -> None:
        self.kernel, self.message, self.where, self.other, self.order = kernel, message, where, other, order
        lines = [f"kernel {kernel} (threads in {order} order): {message}"]
        if where:
            lines.append(f"  at {where}")
        if other:
            lines.append(f"  the other: {other}")
        super().__init__("\n".join(lines))


_SPACES = {"1": "device", "2": "constant", "3": "threadgroup"}


def tidy(message: str) -> str:
    """Clang's spelling of types, as a kernel's author wrote them."""
    message = re.sub(r"'[^']*' \(aka '([^']*)'\)", r"'\1'", message)
    return re.sub(r"__attribute__\(\(address_space\((\d)\)\)\)", lambda m: _SPACES[m.group(1)], message)


@functools.cache
def _line_table(library: Path) -> tuple[list[int], list[tuple[str, int]]]:
    """Addresses in rising order and the (file, line) that each begins."""
    from elftools.elf.elffile import ELFFile

    rows: list[tuple[int, str, int]] = []
    with library.open("rb") as stream:
        dwarf = ELFFile(stream).get_dwarf_info()
        for unit in dwarf.iter_CUs():
            program = dwarf.line_program_for_CU(unit)
            names = [entry.name.decode() for entry in program["file_entry"]]
            base = 0 if program["version"] >= 5 else 1
            for entry in program.get_entries():
                state = entry.state
                if state is not None:
                    rows.append((state.address, names[state.file - base], state.line))
    rows.sort(key=lambda row: row[0])
    return [row[0] for row in rows], [(row[1], row[2]) for row in rows]


def find_line(library: Path, offset: int) -> tuple[str | None, int]:
    """(file, line) of the instruction at `offset` in the library's image."""
    addresses, places = _line_table(library)
    index = bisect.bisect_right(addresses, offset) - 1
    return places[index] if index >= 0 else (None, 0)
