"""Which file and line each line of a generated source came from.

Finds the bodies and headers of a kernel in the repository's `.metal` and `.h` files by their text, and
names them with `#line` directives, so that compiler errors, debug information and reports speak of those
files.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ROOT / "kernels_metal"
SUFFIXES = (".metal", ".h")


@dataclass(frozen=True)
class Piece:
    """A part of the generated source that a person wrote."""

    text: str
    label: str  # what to call it where no file holds it


def annotate(source: str, pieces: list[Piece], name: str, folder: Path | None = None) -> str:
    """`source` with a `#line` before and after each piece; all other lines belong to '<generated NAME>'."""
    files = {
        path: path.read_text() for path in sorted((folder or KERNELS).rglob("*")) if path.suffix in SUFFIXES
    }
    spans: list[tuple[int, int, str, int]] = []  # start, end, file, line
    for piece in pieces:
        spans += _spans(source, piece, files)
    return _with_directives(source, sorted(spans), f"<generated {name}>")


def locate(annotated: str, line: int) -> str:
    """FILE:LINE of a line, counted from 1, of what `annotate` made."""
    lines = annotated.split("\n")[:line]
    for back, text in enumerate(reversed(lines)):
        found = re.match(r'#line (\d+) "(.*)"', text)
        if found:
            return f"{found.group(2)}:{int(found.group(1)) + back - 1}"
    return f"line {line}"


def _spans(source: str, piece: Piece, files: dict[Path, str]) -> list[tuple[int, int, str, int]]:
    """Where `piece` lies in `source`, split by the files it was put together from."""
    start = source.find(piece.text)
    if start < 0 or not piece.text.strip():
        return []
    for path, text in files.items():  # the piece is a file, or a part of one
        at = text.find(piece.text)
        if at >= 0:
            return [(start, start + len(piece.text), _shown(path), 1 + text.count("\n", 0, at))]
    inside = []
    for path, text in files.items():  # files are parts of the piece
        at = piece.text.find(text) if text.strip() else -1
        if at >= 0:
            inside.append((start + at, start + at + len(text), _shown(path), 1))
    return _fill(source, start, start + len(piece.text), sorted(inside), piece.label)


def _fill(
    source: str, start: int, end: int, inside: list[tuple[int, int, str, int]], label: str
) -> list[tuple[int, int, str, int]]:
    """The parts of a piece that no file explains keep its label, with their line in the piece."""
    spans, at = [], start
    for span in [*inside, (end, end, "", 0)]:
        if span[0] > at:
            spans.append((at, span[0], label, 1 + source.count("\n", start, at)))
        if span[0] >= at and span[1] > span[0]:
            spans.append(span)
            at = span[1]
    return spans


def _shown(path: Path) -> str:
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


def _with_directives(source: str, spans: list[tuple[int, int, str, int]], rest: str) -> str:
    """A directive holds from the next line on, so a span that starts within a line begins on the next."""
    out, at = [f'#line 1 "{rest}"\n'], 0
    for start, end, file, line in spans:
        while start < end and start and source[start - 1] != "\n":
            line += source[start] == "\n"
            start += 1
        end = source.find("\n", end - 1) + 1 if end > start else end
        if end <= start or start < at:
            continue
        out += [source[at:start], f'#line {line} "{file}"\n', source[start:end]]
        out.append(f'#line {1 + source.count(chr(10), 0, end)} "{rest}"\n')
        at = end
    return "".join([*out, source[at:]])
