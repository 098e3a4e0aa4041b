"""The suite's runner: tables go into their section, and the words around them stay."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import all as suite
from benchmarks.all import Benchmark, put, tables_of

GENERATE, NEW = Benchmark("generate", "Generate"), Benchmark("fresh", "Something new")
PAGE = """# Benchmarks

Words.

## Generate

What is measured, and why.

| old | table |

## Serving

Other words.
"""
TABLE = "### Generate\n\n| a | b |\n| --- | --- |\n| 1 | 2 |\n\nA machine; 2026-01-01"


def test_tables_go_to_the_end_of_their_section_and_then_over_themselves() -> None:
    once = put(PAGE, GENERATE, TABLE)
    head, tail = once.split("<!-- from benchmarks/generate.py -->")
    assert head.startswith(PAGE[: PAGE.index("\n## Serving")].rstrip())
    assert tail.endswith("<!-- end of generate -->\n\n## Serving\n\nOther words.\n")
    assert put(once, GENERATE, TABLE) == once
    changed = put(once, GENERATE, TABLE.replace("| 1 |", "| \\1 |"))
    assert changed == once.replace("| 1 |", "| \\1 |")


def test_a_new_section_comes_last() -> None:
    page = put(PAGE, NEW, TABLE)
    assert page.startswith(PAGE.rstrip())
    assert page.split("## Something new\n\n")[1].startswith("<!-- from benchmarks/fresh.py -->\n### Generate")


@pytest.mark.parametrize(
    ("printed", "tables"),
    [
        ("loading…\n\n### A\n\n| x |\n\nmachine\n\n", "### A\n\n| x |\n\nmachine"),
        ("| x |\n| --- |\n", "| x |\n| --- |"),
        ("nothing to see", None),
    ],
)
def test_what_counts_as_tables(printed: str, tables: str | None) -> None:
    assert tables_of(printed) == tables


def test_a_failure_leaves_the_page_and_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "benchmarks"
    folder.mkdir()
    run = 'if __name__ == "__main__":\n    '
    (folder / "generate.py").write_text(run + "print('| a |\\n| --- |'); raise SystemExit(3)")
    (folder / "serving.py").write_text(run + "print('| fine |\\n| --- |')")
    page = tmp_path / "BENCHMARKS.md"
    page.write_text(PAGE)
    monkeypatch.setattr(suite, "ROOT", tmp_path)
    monkeypatch.setattr(suite, "TARGET", page)
    monkeypatch.setattr(sys, "argv", ["all.py"])
    assert suite.main() == 1
    assert "failed: generate" in capfd.readouterr().err
    assert page.read_text() == put(PAGE, Benchmark("serving", "Serving"), "| fine |\n| --- |")


def test_a_benchmark_nobody_listed_is_run_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "benchmarks").mkdir()
    for name in ("serving", "all", "two_words"):
        (tmp_path / "benchmarks" / f"{name}.py").write_text('if __name__ == "__main__":\n    main()\n')
    (tmp_path / "benchmarks" / "table.py").write_text("class Table: ...")
    monkeypatch.setattr(suite, "ROOT", tmp_path)
    assert [(one.module, one.heading) for one in suite.present()] == [
        ("serving", "Serving"),
        ("two_words", "Two words"),
    ]


def test_every_benchmark_has_a_section_of_its_own() -> None:
    assert len({one.heading for one in suite.BENCHMARKS}) == len(suite.BENCHMARKS)
    assert {"generate", "serving", "overhead"} <= {one.module for one in suite.present()}
