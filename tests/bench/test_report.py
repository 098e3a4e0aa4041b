"""What comes out: rows, JSON that can be read back and compared, and a drawing for light and dark."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from mlxserve.bench.chart import MAX_ROWS, svg
from mlxserve.bench.machine import describe, machine
from mlxserve.bench.measure import run
from mlxserve.bench.report import Report, build, read, rows, show
from mlxserve.bench.scenarios import NAMES, Sizes
from mlxserve.errors import UsageError
from tests.bench.fakes import FakeTarget

SVG = "{http://www.w3.org/2000/svg}"


def report(**sizes: int) -> Report:
    wanted = Sizes(**{"clients": 3, "requests": 6, "tokens": 8, **sizes})
    target = FakeTarget()
    seen = asyncio.run(run(target, NAMES, wanted))
    return build(target, wanted, seen, machine(), 1)


def test_it_survives_json_and_is_compared_with_itself(tmp_path: Path) -> None:
    first = report()
    path = tmp_path / "a.json"
    path.write_text(json.dumps(first))
    listed = rows(first, read(path))
    assert {row[0] for row in listed[1:]} == set(NAMES)
    assert all(len(row) == 4 for row in listed)
    ratios = {row[3] for row in listed[1:]}
    assert ratios <= {"1.00", "—"} and "1.00" in ratios


def test_without_another_there_is_no_ratio() -> None:
    assert {len(row) for row in rows(report())} == {3}


@pytest.mark.parametrize(
    ("text", "words"), [("[1]", "no report"), ("{", "not valid JSON"), ('{"format": 9}', "no report")]
)
def test_a_file_that_is_no_report(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        read(path)
    assert words in caught.value.message and "a.json" in caught.value.message


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.0123, "s", "12.3 ms"),
        (2.345, "s", "2.35 s"),
        (0.5, "share", "50%"),
        (1234.5, "tokens/s", "1,234 tokens/s"),
        (12.345, "tokens/s", "12.3 tokens/s"),
        (0.126, "ratio", "0.13"),
        (2048, "", "2,048"),
        (None, "s", "—"),
    ],
)
def test_numbers_for_people(value: float | None, unit: str, text: str) -> None:
    assert show(value, unit) == text


def test_the_drawing_has_a_line_a_request_and_no_background() -> None:
    found = report(clients=4, requests=MAX_ROWS + 5)
    root = ElementTree.fromstring(svg(found))
    bars = [bar for bar in root.iter(f"{SVG}rect") if bar.get("y") != "11"]
    drawn = sum(min(len(one["requests"]), MAX_ROWS) for one in found["scenarios"])
    assert sum(bar.get("class") in ("wait", "failed") for bar in bars) == drawn
    assert "5 more requests not drawn" in svg(found)
    height, width = float(root.get("height", 0)), float(root.get("width", 0))
    for bar in bars:
        assert 0 <= float(bar.get("x", -1)) <= width and float(bar.get("y", -1)) < height
        assert float(bar.get("width", 0)) < width, "nothing is painted behind the lines"
    style = root.find(f"{SVG}style")
    assert style is not None and "prefers-color-scheme: dark" in (style.text or "")


def test_names_cannot_break_the_drawing() -> None:
    found = report()
    found["target"]["name"] = '<script>"&'
    assert ElementTree.fromstring(svg(found)).get("aria-label") == '<script>"& (fake)'


def test_the_machine_in_words() -> None:
    facts = machine()
    assert all(str(facts[name]) in describe(facts) for name in ("mlx", "mlx-lm", "date", "cores", "blas"))
