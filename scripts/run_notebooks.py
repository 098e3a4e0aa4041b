"""Runs the notebooks anew and stores them small: outputs of this run, no widget state, no timings.

    python scripts/run_notebooks.py                         # all of them
    python scripts/run_notebooks.py notebooks/01-first-token.ipynb

Knows: nbclient and the notebooks' format. A notebook that fails is left as it was, and named.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "notebooks"
WIDGET = "application/vnd.jupyter.widget-view+json"
TEMPORARY = re.compile(rf"{re.escape(tempfile.gettempdir())}/\w+")
RICH = {"text/html", "image/svg+xml"}
MOST_PLAIN = 80
LANGUAGE = {"name": "python"}
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def execute(path: Path, timeout_s: int = 600) -> nbformat.NotebookNode:
    """The notebook with the outputs of a new run. Raises CellExecutionError where a cell fails."""
    notebook = nbformat.read(path, as_version=4)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    NotebookClient(notebook, timeout=timeout_s, resources={"metadata": {"path": str(FOLDER)}}).execute()
    return cleaned(notebook)


def cleaned(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Without what a second run would change for no reason: widgets, timings, versions, random cell ids."""
    notebook.metadata = nbformat.from_dict({"kernelspec": KERNEL, "language_info": LANGUAGE})
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number:02}"
        cell.metadata = nbformat.from_dict({})
        if cell.cell_type == "code":
            cell.outputs = _merged(output for output in cell.outputs if not _is_widget(output))
            for output in cell.outputs:
                _shorten(output)
    return notebook


def _shorten(output: Any) -> None:
    """Plain line breaks and no temporary folders; a drawing or a table needs no long description beside it."""
    if output.output_type == "stream":
        output.text = TEMPORARY.sub("…", output.text.replace("\r\n", "\n"))
    data = output.get("data") or {}
    for kind in {"text/html", "text/plain"} & set(data):
        data[kind] = TEMPORARY.sub("…", data[kind])
    if RICH & set(data) and len(data.get("text/plain", "")) > MOST_PLAIN:
        data["text/plain"] = data["text/plain"].partition("(")[0]


def _is_widget(output: Any) -> bool:
    """A live bar, or the empty text that stands where one was."""
    data = output.get("data") or {}
    return WIDGET in data or data.get("text/html", "").startswith(
        '<pre style="white-space:pre;overflow-x:auto'
    )


def _merged(outputs: Any) -> list[Any]:
    """Pieces of one stream joined: how they were cut is chance."""
    kept: list[Any] = []
    for output in outputs:
        if kept and output.output_type == "stream" and kept[-1].get("name") == output.name:
            kept[-1].text += output.text
        else:
            kept.append(output)
    return kept


def main() -> int:
    paths = [Path(name) for name in sys.argv[1:]] or sorted(FOLDER.glob("*.ipynb"))
    failed = []
    for path in paths:
        try:
            nbformat.write(execute(path), path)
            print(f"{path.name}: done", flush=True)
        except CellExecutionError as error:
            failed.append(path.name)
            print(f"{path.name}: {error}", file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
