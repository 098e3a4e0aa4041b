"""Figures of a run: lines that survive a resume, an SVG that is well-formed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from mlxserve.errors import DependencyMissing
from mlxserve.lora.logs import Files, other_logger, plot


def _step(step: int) -> dict[str, Any]:
    return {"kind": "step", "step": step, "steps": 9, "loss": 5.0 / step, "lr": 0.1}


def test_lines_after_the_checkpoint_are_cut_on_resume(tmp_path: Path) -> None:
    files = Files(tmp_path)
    for step in range(1, 6):
        files(_step(step))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "st')  # killed in the middle of a line
    again = Files(tmp_path)
    again({"kind": "resume", "step": 3})
    again(_step(4))
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]


@pytest.mark.parametrize("evals", [0, 2])
def test_plot_is_an_image_for_light_and_dark(evals: int) -> None:
    events = [_step(step) for step in range(1, 6)]
    events += [{"kind": "eval", "step": 2 * i + 1, "loss": 3.0, "best": True} for i in range(evals)]
    root = ElementTree.fromstring(plot(events))
    assert len([node for node in root.iter() if node.tag.endswith("circle")]) == evals
    assert "prefers-color-scheme:dark" in plot(events)


def test_one_step_can_be_drawn() -> None:
    ElementTree.fromstring(plot([_step(1)]))


@pytest.mark.parametrize(("name", "package"), [("tensorboard", "tensorboardX"), ("wandb", "wandb")])
def test_absent_loggers_say_how_to_get_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, package: str
) -> None:
    monkeypatch.setitem(__import__("sys").modules, package, None)
    with pytest.raises(DependencyMissing, match=f"pip install {package}"):
        other_logger(name, tmp_path, {})
