"""Runs the benchmarks one after another, each in a process of its own, and keeps BENCHMARKS.md up to date.

    python -m benchmarks.all                # all of them
    python -m benchmarks.all generate lora  # some
    python -m benchmarks.all --quick        # small loads, to see that everything works; writes nothing

Each benchmark prints tables; they go into its section of BENCHMARKS.md, between two comments, and the words
around them stay. A section that is not there yet is put at the end. A benchmark that fails leaves its section
as it was, and is named at the end.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "BENCHMARKS.md"


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A module of this folder, its heading in BENCHMARKS.md, and what it is run with."""

    module: str
    heading: str
    arguments: tuple[str, ...] = ()
    quick: tuple[str, ...] = ()


# In the order of the page; other modules of the folder follow, under their own names (see `present`).
BENCHMARKS = (
    Benchmark("generate", "Generate", ("--runs", "3"), ("--runs", "1")),
    Benchmark("overhead", "The engine's own cost", (), ("--sequences", "32", "--steps", "20")),
    Benchmark("serving", "Serving", ("--runs", "3"), ("--quick", "--runs", "1")),
    Benchmark("grammars", "Grammars", (), ("--streams", "2", "--tokens", "8", "--runs", "1")),
    Benchmark(
        "http_streams", "Over HTTP", ("--clients", "16"), ("--clients", "2", "--tokens", "8", "--turns", "1")
    ),
    Benchmark("lora", "Fine-tuning", (), ("--quick",)),
    Benchmark("sharded_loading", "Sharded loading", (), ("--layers", "2")),
    Benchmark("distributed_running", "Running on several ranks", (), ("--steps", "50", "--tokens", "8")),
    Benchmark(
        "simulate_macs",
        "Several Macs, simulated",
        ("--svg", "docs/plots/simulated-macs.svg"),
        ("--quick",),
    ),
)
SELF = Path(__file__).name


def present() -> list[Benchmark]:
    """The benchmarks that are in the folder: files that can be run."""
    paths = [path for path in (ROOT / "benchmarks").glob("*.py") if path.name != SELF]
    files = {path.stem for path in paths if '__name__ == "__main__"' in path.read_text(encoding="utf-8")}
    listed = [one for one in BENCHMARKS if one.module in files]
    more = sorted(files - {one.module for one in listed})
    return listed + [Benchmark(name, name.replace("_", " ").capitalize()) for name in more]


def main() -> int:
    known = {one.module: one for one in present()}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(known)}")
    parser.add_argument("--quick", action="store_true", help="small loads; nothing is written")
    args = parser.parse_args()
    if unknown := [name for name in args.names if name not in known]:
        parser.error(f"there is no benchmark {unknown[0]}; there are {', '.join(known)}")
    failed = []
    for name in args.names or known:
        tables = run(known[name], args.quick)
        if tables is None:
            failed.append(name)
        elif not args.quick:
            page = TARGET.read_text(encoding="utf-8")
            TARGET.write_text(put(page, known[name], tables), encoding="utf-8")
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return bool(failed)


def run(one: Benchmark, quick: bool) -> str | None:
    """What the benchmark printed, shown as it comes; None if it failed or printed no table."""
    command = [sys.executable, "-m", f"benchmarks.{one.module}", *(one.quick if quick else one.arguments)]
    print(f"$ {' '.join(command[1:])}", file=sys.stderr)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    child = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    lines = []
    for line in child.stdout:
        print(line, end="", flush=True)
        lines.append(line)
    return tables_of("".join(lines)) if child.wait() == 0 else None


def tables_of(printed: str) -> str | None:
    """From the first heading of a table to the end; None where there is none."""
    start = re.search(r"^(###|\|) ", printed, flags=re.M)
    return printed[start.start() :].strip() if start else None


def put(page: str, one: Benchmark, tables: str) -> str:
    """The page with these tables in the benchmark's section: over its last ones, else at the section's end."""
    opening, closing = f"<!-- from benchmarks/{one.module}.py -->", f"<!-- end of {one.module} -->"
    block = f"{opening}\n{tables}\n{closing}"
    kept = re.compile(f"{re.escape(opening)}.*?{re.escape(closing)}", flags=re.S)
    if kept.search(page):
        return kept.sub(lambda _: block, page)
    section = re.search(rf"^## {re.escape(one.heading)}\n.*?(?=^## |\Z)", page, flags=re.M | re.S)
    if section is None:
        return f"{page.rstrip()}\n\n## {one.heading}\n\n{block}\n"
    before, after = page[: section.end()].rstrip(), page[section.end() :]
    return f"{before}\n\n{block}\n" + (f"\n{after}" if after else "")


if __name__ == "__main__":
    sys.exit(main())
