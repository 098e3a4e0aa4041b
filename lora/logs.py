"""Who watches a run: metrics.jsonl, samples.jsonl, an SVG of loss and learning rate, other loggers.

Knows: events as the trainer tells them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mlxserve.errors import DependencyMissing
from mlxserve.lora.checkpoint import write_file
from mlxserve.lora.plot import plot

Event = dict[str, Any]
Watch = Callable[[Event], None]


class Files:
    """Writes metrics.jsonl, samples.jsonl and loss.svg into a run's folder.

    On resuming, lines of steps after the checkpoint are cut away first.
    """

    def __init__(self, folder: Path, *, jsonl: bool = True) -> None:
        self.folder, self.jsonl = folder, jsonl
        self.metrics: list[Event] = []
        folder.mkdir(parents=True, exist_ok=True)

    def __call__(self, event: Event) -> None:
        kind = event["kind"]
        if kind == "resume":
            self._cut(event["step"])
        elif kind in ("step", "eval"):
            self.metrics.append(event)
            if self.jsonl:
                self._append("metrics.jsonl", event)
        elif kind == "sample":
            self._append("samples.jsonl", event)
        if kind in ("eval", "save"):
            self.draw()

    def draw(self) -> None:
        if self.metrics:
            write_file(self.folder / "loss.svg", plot(self.metrics))

    def _append(self, name: str, event: Event) -> None:
        with (self.folder / name).open("a", encoding="utf-8") as file:
            file.write(json.dumps(event, ensure_ascii=False) + "\n")

    def _cut(self, step: int) -> None:
        for name in ("metrics.jsonl", "samples.jsonl"):
            path = self.folder / name
            if not path.is_file():
                continue
            kept = [event for event in _events(path) if event["step"] <= step]
            write_file(path, "".join(json.dumps(event, ensure_ascii=False) + "\n" for event in kept))
            if name == "metrics.jsonl":
                self.metrics = kept


def _events(path: Path) -> list[Event]:
    """Whole lines of a file of events; a killed run may have left half a line."""
    events = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            events.append(json.loads(line))
        except ValueError:
            continue
    return events


def other_logger(name: str, folder: Path, settings: dict[str, Any]) -> Watch:
    """TensorBoard or Weights & Biases. Raises DependencyMissing, naming the package."""
    return _tensorboard(folder) if name == "tensorboard" else _wandb(folder, settings)


def _numbers(event: Event) -> dict[str, float]:
    return {k: v for k, v in event.items() if isinstance(v, int | float) and k not in ("step", "steps")}


def _tensorboard(folder: Path) -> Watch:
    try:
        from tensorboardX import SummaryWriter
    except ImportError as error:
        raise DependencyMissing("log.to=tensorboard needs: pip install tensorboardX.") from error
    writer = SummaryWriter(str(folder / "tensorboard"))

    def watch(event: Event) -> None:
        if event["kind"] in ("step", "eval"):
            for name, value in _numbers(event).items():
                writer.add_scalar(f"{event['kind']}/{name}", value, event["step"])
            writer.flush()

    return watch


def _wandb(folder: Path, settings: dict[str, Any]) -> Watch:
    try:
        import wandb
    except ImportError as error:
        raise DependencyMissing("log.to=wandb needs: pip install wandb.") from error
    run = wandb.init(dir=str(folder), config=settings)

    def watch(event: Event) -> None:
        if event["kind"] in ("step", "eval"):
            run.log({f"{event['kind']}/{k}": v for k, v in _numbers(event).items()}, step=event["step"])

    return watch
