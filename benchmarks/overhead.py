"""What the engine itself costs a step, with a model that returns at once.

    python benchmarks/overhead.py [--sequences 256]

Scheduling, page tables, arrays, sampling and text for that many running sequences, in microseconds a
sequence a step; for two pool sizes, early and late in the answers: neither may matter.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.table import Table  # first: it puts OpenBLAS in before MLX loads

import mlx.core as mx  # isort: skip
import numpy as np

from mlxserve.config import EngineConfig, LoadConfig
from mlxserve.engine.engine import Engine
from mlxserve.models.load import load_folder
from mlxserve.models.step import Step
from mlxserve.request import Request, SamplingParams
from mlxserve.text.tokenizer import load_tokenizer
from tests import tiny

VOCABULARY = 1024


class NullModel:
    """Has pages, computes nothing: the same logits for every row."""

    windows = (None,)

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.logits = mx.zeros((4096, VOCABULARY))
        mx.eval(self.logits)

    def forward(self, ids: mx.array, step: Step) -> mx.array:
        return self.logits[: int(step.wanted.sum())]

    def arrays(self) -> list[mx.array]:
        return []

    def room(self, group: int) -> int:
        return 1 << 30

    def reserve(self, group: int, pages: int) -> None:
        """There is nothing behind the pages."""

    def copy_pages(self, group: int, sources: Any, targets: Any) -> None:
        """There is nothing to copy."""

    @property
    def nbytes(self) -> int:
        return 0


def measure(engine: Engine, sequences: int, steps: int, warm: int) -> float:
    """Median microseconds a sequence a step, after `warm` steps."""
    draw = np.random.default_rng(0)
    for i in range(sequences):
        params = SamplingParams(max_tokens=warm + steps + 50, temperature=0.0, ignore_eos=True).resolved()
        engine.add(Request(str(i), draw.integers(0, 256, 24).tolist(), params), lambda news: None)
    while len(engine.scheduler.running) < sequences or not all(s.decoding for s in engine.scheduler.running):
        engine.step()
    for _ in range(warm):
        engine.step()
    times = []
    for _ in range(steps):
        began = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - began)
    return statistics.median(times) / sequences * 1e6


def engine_with(pages: int, folder: Path, sequences: int) -> Engine:
    loaded = load_folder(folder, LoadConfig())
    page_bytes = 12288
    config = EngineConfig(max_sequences=sequences, step_tokens=4096, cache_bytes=pages * page_bytes)
    engine = Engine(loaded, load_tokenizer(folder), config)
    engine.runner.model = NullModel(config.page_size)  # type: ignore[assignment]
    return engine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    table = Table("pages in the pool", "tokens generated before", "µs a sequence a step")
    with tempfile.TemporaryDirectory() as name:
        folder = tiny.write(Path(name), "llama", vocab_size=VOCABULARY)
        for pages in (16_000, 60_000):
            for warm in (20, 600):
                engine = engine_with(pages, folder, args.sequences)
                cost = measure(engine, args.sequences, args.steps, warm)
                table.add(engine.stats()["pages_total"], warm, f"{cost:.1f}")
    table.print(f"Engine overhead, {args.sequences} sequences, null model")


if __name__ == "__main__":
    main()
