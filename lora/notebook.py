"""A run's curves in a notebook while it trains; nothing outside of one.

Knows: IPython's display handles, events as the trainer tells them. Does not know the trainer.
"""

from __future__ import annotations

import builtins
import time
from typing import Any

from mlxserve import display
from mlxserve.lora.plot import plot

Event = dict[str, Any]
REST_S = 1.0  # between two pictures


class Html:
    """Shows itself as what it holds."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return ""

    def _repr_html_(self) -> str:
        return self.text


class Live:
    """Redraws figures and curves in place, at most once a second; goes away when the run has ended."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self.events: list[Event] = []
        self._drawn_at = 0.0

    def __call__(self, event: Event) -> None:
        if event["kind"] not in ("step", "eval"):
            return
        self.events.append(event)
        if time.monotonic() - self._drawn_at >= REST_S:
            self._drawn_at = time.monotonic()
            self.handle.update(Html(page(self.events)))

    def close(self) -> None:
        self.handle.update(Html(""))


def page(events: list[Event]) -> str:
    """The latest figures above the curves so far."""
    steps = [event for event in events if event["kind"] == "step"]
    facts = []
    if steps:
        last = steps[-1]
        left_s = (last["steps"] - last["step"]) * sum(e["seconds"] for e in steps) / len(steps)
        facts = [
            ("step", f"{last['step']:,} of {last['steps']:,}, about {left_s:,.0f} s left"),
            ("loss", f"{last['loss']:.4f}"),
            ("tokens a second", f"{last['tokens_per_s']:,.0f}"),
        ]
    return display.facts(facts, "Fine-tuning") + plot(events, inline=True)


def live() -> Live | None:
    """What shows a run in the notebook that calls; None where none does."""
    shell = getattr(builtins, "get_ipython", lambda: None)()
    if shell is None or not hasattr(shell, "kernel"):
        return None
    from IPython.display import display as show

    return Live(show(Html(""), display_id=True))
