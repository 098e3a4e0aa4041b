"""Who watches a run: metrics.jsonl, samples.jsonl, an SVG of loss and learning rate, other loggers.

Knows: events as the trainer tells them. Draws by hand, readable on light and dark pages.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mlxserve.errors import DependencyMissing
from mlxserve.lora.checkpoint import write_file

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


WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 720, 360, 56, 28, 44
STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#777}.axis{stroke:#999;stroke-width:1}"
    ".train{stroke:#2a6fdb}.valid{stroke:#d9480f}.rate{stroke:#868e96;stroke-dasharray:4 3}"
    "path{fill:none;stroke-width:1.6}circle{fill:#d9480f}"
    "@media(prefers-color-scheme:dark){text{fill:#ccc}.axis{stroke:#666}"
    ".train{stroke:#74a9ff}.valid{stroke:#ff922b}circle{fill:#ff922b}}"
)


def plot(events: Sequence[Event]) -> str:
    """An SVG of training loss, held-out loss and learning rate over steps."""
    steps = [event for event in events if event["kind"] == "step"]
    evals = [event for event in events if event["kind"] == "eval"]
    losses = [event["loss"] for event in [*steps, *evals]]
    last = max(event["step"] for event in events)
    low, high = min(losses), max(losses)
    high = high if high > low else low + 1
    top_rate = max((event["lr"] for event in steps), default=1.0) or 1.0

    def x(step: int) -> float:
        return LEFT + (WIDTH - 2 * LEFT) * step / max(1, last)

    def y(share: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - share)

    def line(kind: str, points: Sequence[tuple[float, float]]) -> str:
        path = " ".join(f"{'L' if i else 'M'}{px:.1f} {py:.1f}" for i, (px, py) in enumerate(points))
        return f'<path class="{kind}" d="{path}"/>' if points else ""

    def losses_of(chosen: Sequence[Event]) -> list[tuple[float, float]]:
        return [(x(event["step"]), y((event["loss"] - low) / (high - low))) for event in chosen]

    rates = [(x(event["step"]), y(event["lr"] / top_rate)) for event in steps]
    dots = "".join(f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3"/>' for px, py in losses_of(evals))
    bottom, right = HEIGHT - BOTTOM, WIDTH - LEFT
    labels = [
        (LEFT - 6, TOP + 4, "end", f"{high:.3g}"),
        (LEFT - 6, bottom, "end", f"{low:.3g}"),
        (right + 6, TOP + 4, "start", f"{top_rate:.1e}"),
        (right + 6, bottom, "start", "0"),
        (LEFT, bottom + 18, "start", "0"),
        (right, bottom + 18, "end", f"step {last}"),
        (LEFT, TOP - 10, "start", "loss: training (line), held out (dots); learning rate (dashed, right)"),
    ]
    words = "".join(f'<text x="{a}" y="{b}" text-anchor="{c}">{d}</text>' for a, b, c, d in labels)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">'
        f"<title>Loss and learning rate</title><style>{STYLE}</style>"
        f'<path class="axis" d="M{LEFT} {TOP}V{bottom}H{right}V{TOP}"/>'
        f"{line('rate', rates)}{line('train', losses_of(steps))}{line('valid', losses_of(evals))}{dots}{words}</svg>"
    )
