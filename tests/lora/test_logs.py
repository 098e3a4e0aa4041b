"""Figures of a run: lines that survive a resume, an SVG that is well-formed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest

from mlxserve.errors import DependencyMissing, UsageError
from mlxserve.lora.logs import Files, other_logger
from mlxserve.lora.plot import plot


def _step(step: int) -> dict[str, Any]:
    return {"kind": "step", "step": step, "steps": 9, "loss": 5.0 / step, "lr": 0.1}


def test_lines_after_the_checkpoint_are_cut_on_resume(tmp_path: Path) -> None:
    files = Files(tmp_path)
    for step in range(1, 6):
        files(_step(step))
    for step in (2, 3):
        files({"kind": "eval", "step": step, "loss": 1.0})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "st')  # killed in the middle of a line
    again = Files(tmp_path)
    again({"kind": "resume", "step": 3, "evaluated": 2})  # what was not saved is evaluated again
    again(_step(4))
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "step"] == [1, 2, 3, 4]
    assert [line["step"] for line in lines if line["kind"] == "eval"] == [2]


@pytest.mark.parametrize("evals", [0, 2])
def test_plot_is_an_image_for_light_and_dark(evals: int) -> None:
    events = [_step(step) for step in range(1, 6)]
    events += [{"kind": "eval", "step": 2 * i + 1, "loss": 3.0, "best": True} for i in range(evals)]
    root = ElementTree.fromstring(plot(events))
    assert len([node for node in root.iter() if node.tag.endswith("circle")]) == evals
    assert "prefers-color-scheme:dark" in plot(events)


def test_what_is_drawn_stays_inside_and_labels_are_round() -> None:
    events = [_step(step) for step in range(1, 6)]
    root = ElementTree.fromstring(plot(events))
    path = next(node.get("d") for node in root.iter() if node.get("class") == "train")
    assert path is not None
    drawn = [float(x) for x in path.replace("M", "").replace("L", "").split()]
    assert all(56 <= x <= 656 for x in drawn[::2]) and all(36 <= y <= 324 for y in drawn[1::2])
    assert drawn[1::2] == sorted(drawn[1::2])  # a falling loss goes down the page
    words = [node.text for node in root.iter() if node.tag.endswith("text")]
    assert {"1", "2", "3", "4", "5", "step 5"} <= set(words)


@pytest.mark.parametrize("losses", [[3.0], [2.0, 2.0], [0.0], [float("nan")], [1e-9, 1e9], []])
def test_any_losses_can_be_drawn(losses: list[float]) -> None:
    for inline in (False, True):
        ElementTree.fromstring(
            plot([{**_step(i + 1), "loss": loss} for i, loss in enumerate(losses)], inline=inline)
        )


def test_inside_a_page_it_leaves_the_pages_style_alone() -> None:
    """Every rule is bound to its own class, and no colour scheme is guessed."""
    root = ElementTree.fromstring(plot([_step(1)], inline=True))
    style = next(node.text for node in root.iter() if node.tag.endswith("style"))
    assert style is not None and "@media" not in style
    assert all(rule.startswith(".mlxserve-loss ") for rule in style.split("}") if rule)


@pytest.mark.parametrize(("name", "package"), [("tensorboard", "tensorboardX"), ("wandb", "wandb")])
def test_absent_loggers_say_how_to_get_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, package: str
) -> None:
    monkeypatch.setitem(__import__("sys").modules, package, None)
    with pytest.raises(DependencyMissing, match=f"pip install {package}"):
        other_logger(name, tmp_path, {})


def test_tensorboard_and_wandb_are_told_every_figure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Stand-ins with the two calls of each library that are used."""
    told: list[tuple[str, str, float, int]] = []

    class Writer:
        def __init__(self, folder: str) -> None:
            assert folder == str(tmp_path / "tensorboard")

        def add_scalar(self, name: str, value: float, step: int) -> None:
            told.append(("tensorboard", name, value, step))

        def flush(self) -> None:
            told.append(("tensorboard", "flush", 0, 0))

        def close(self) -> None:
            told.append(("tensorboard", "end", 0, 0))

    class Run:
        def log(self, values: dict[str, float], step: int) -> None:
            told.extend(("wandb", name, value, step) for name, value in values.items())

        def finish(self) -> None:
            told.append(("wandb", "end", 0, 0))

    def init(dir: str, config: dict[str, Any]) -> Run:
        assert (dir, config) == (str(tmp_path), {"model": "m"})
        return Run()

    monkeypatch.setitem(sys.modules, "tensorboardX", SimpleNamespace(SummaryWriter=Writer))  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))  # type: ignore[arg-type]
    for name in ("tensorboard", "wandb"):
        watch = other_logger(name, tmp_path, {"model": "m"})
        watch(_step(2))
        watch({"kind": "sample", "step": 2, "text": "x"})
        watch.close()
        assert (name, "step/loss", 2.5, 2) in told and (name, "step/lr", 0.1, 2) in told
        assert told[-1] == (name, "end", 0, 0)
    assert not any("sample" in name for _, name, _, _ in told)


def test_a_service_that_cannot_be_used_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def init(**_: Any) -> None:
        raise RuntimeError("no key:\nlog in first")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="log.to=wandb cannot be used: no key: log in first"):
        other_logger("wandb", tmp_path, {})
