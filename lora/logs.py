"""Who watches a run: metrics.jsonl, samples.jsonl, an SVG of loss and learning rate, other loggers.

Knows: events as the trainer tells them.
"""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from mlxserve.errors import DependencyMissing, UsageError
from mlxserve.lora.checkpoint import write_file
from mlxserve.lora.plot import plot

Event = dict[str, Any]


class Files:
    """Writes metrics.jsonl, samples.jsonl and loss.svg into a run's folder.

    The folder is made with the first of them. On resuming, lines of steps after the checkpoint are cut away.
    """

    def __init__(self, folder: Path, *, jsonl: bool = True) -> None:
        self.folder, self.jsonl = folder, jsonl
        self.metrics: list[Event] = []

    def __call__(self, event: Event) -> None:
        kind = event["kind"]
        if kind == "resume":
            self._cut(event["step"], event["evaluated"])
        elif kind in ("step", "eval"):
            self.metrics.append(event)
            if self.jsonl:
                self._append("metrics.jsonl", event)
        elif kind == "sample":
            self._append("samples.jsonl", event)
        if kind in ("eval", "save"):
            self.draw()

    def close(self) -> None:
        """Everything is written already."""

    def draw(self) -> None:
        if self.metrics:
            write_file(self.folder / "loss.svg", plot(self.metrics))

    def _append(self, name: str, event: Event) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / name).open("a", encoding="utf-8") as file:
            file.write(json.dumps(event, ensure_ascii=False) + "\n")

    def _cut(self, step: int, evaluated: int) -> None:
        """Keep steps up to `step`, evaluations and samples up to `evaluated`: what comes after is done again."""
        for name in ("metrics.jsonl", "samples.jsonl"):
            path = self.folder / name
            if not path.is_file():
                continue
            kept = [e for e in _events(path) if e["step"] <= (step if e["kind"] == "step" else evaluated)]
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


PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb"}


def package_of(name: str) -> Any:
    """The package that a logger needs. Raises DependencyMissing, naming it."""
    try:
        return import_module(PACKAGES[name])
    except ImportError as error:
        raise DependencyMissing(f"log.to={name} needs: pip install {PACKAGES[name]}.") from error


def other_logger(name: str, folder: Path, settings: dict[str, Any]) -> Logger:
    """TensorBoard or Weights & Biases. Raises DependencyMissing, naming the package, and UsageError where the
    service cannot be used (nobody is logged in)."""
    return TensorBoard(folder) if name == "tensorboard" else Wandb(folder, settings)


class Logger(Protocol):
    """Told every event; `close` once the run has ended, however it did."""

    def __call__(self, event: Event) -> None: ...

    def close(self) -> None: ...


def _numbers(event: Event) -> dict[str, float]:
    return {k: v for k, v in event.items() if isinstance(v, int | float) and k not in ("step", "steps")}


class TensorBoard:
    """Scalars `step/…` and `eval/…` in the run's folder `tensorboard`."""

    def __init__(self, folder: Path) -> None:
        self.writer = package_of("tensorboard").SummaryWriter(str(folder / "tensorboard"))

    def __call__(self, event: Event) -> None:
        if event["kind"] in ("step", "eval"):
            for name, value in _numbers(event).items():
                self.writer.add_scalar(f"{event['kind']}/{name}", value, event["step"])
            self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class Wandb:
    """The same figures as a run of Weights & Biases."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        wandb = package_of("wandb")
        try:
            self.run = wandb.init(dir=str(folder), config=settings)
        except Exception as error:  # its own errors share no base
            reason = " ".join(str(error).split()).rstrip(".")
            raise UsageError(f"log.to=wandb cannot be used: {reason}.", param="log.to") from error

    def __call__(self, event: Event) -> None:
        if event["kind"] in ("step", "eval"):
            values = {f"{event['kind']}/{name}": value for name, value in _numbers(event).items()}
            self.run.log(values, step=event["step"])

    def close(self) -> None:
        self.run.finish()
