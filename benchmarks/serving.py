"""mlxserve's engine against mlx-lm's BatchGenerator: the same weights, arrivals and lengths, in one run.

    python benchmarks/serving.py [--model FOLDER] [--runs 3] [--quick]

Without --model, a random float32 llama of about 30 M parameters stands in: both sides do the same work, and
greedy answers of fixed length need no meaning. Three loads: requests arriving over time, requests that share
a long system prompt, and a long prompt arriving among running streams.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.table import Table  # first: it puts OpenBLAS in before MLX loads

import mlx.core as mx  # isort: skip
import numpy as np

from mlxserve.config import EngineConfig, LoadConfig
from mlxserve.engine.engine import Engine
from mlxserve.models.load import LoadedModel, load
from mlxserve.models.resolve import resolve
from mlxserve.request import Request, SamplingParams
from mlxserve.text.tokenizer import load_tokenizer
from tests import tiny

VOCABULARY = 8192
SHAPE = {
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "intermediate_size": 1408,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": VOCABULARY,
}


@dataclass
class Job:
    """One request of a load."""

    arrival_s: float
    prompt: list[int]
    tokens: int


@dataclass
class Seen:
    """What came of a load. times_s: when each token of each job came, counted from its arrival."""

    times_s: list[list[float]]
    total_s: float = 0.0
    kv_bytes: int = 0

    @property
    def tokens_per_s(self) -> float:
        return sum(map(len, self.times_s)) / self.total_s

    @property
    def first_token_s(self) -> float:
        return statistics.median(times[0] for times in self.times_s)

    def gaps_s(self) -> list[float]:
        return [b - a for times in self.times_s for a, b in zip(times, times[1:])]

    def gap_95_s(self) -> float:
        return float(np.percentile(self.gaps_s(), 95))


class Side:
    """One server under test: takes jobs, makes a step, says which jobs got a token."""

    def add(self, number: int, job: Job) -> None:
        raise TypeError("abstract")

    def step(self) -> list[int]:
        raise TypeError("abstract")

    def kv_bytes(self) -> int:
        raise TypeError("abstract")

    def close(self) -> None:
        """Free what it holds."""


class Ours(Side):
    """mlxserve's engine, stepped by the driver."""

    def __init__(self, loaded: LoadedModel, tokenizer: Any, **settings: Any) -> None:
        self.engine = Engine(loaded, tokenizer, EngineConfig(**settings))
        self.news: list[int] = []

    def add(self, number: int, job: Job) -> None:
        params = SamplingParams(max_tokens=job.tokens, temperature=0.0, ignore_eos=True).resolved()

        def sink(news: Any) -> None:
            if isinstance(news, Exception):
                raise news
            self.news += [number] * len(news.token_ids)

        self.engine.add(Request(str(number), job.prompt, params), sink)

    def step(self) -> list[int]:
        self.news = []
        if self.engine.has_work:
            self.engine.step()
        return self.news

    def kv_bytes(self) -> int:
        return self.engine.runner.model.nbytes


class Theirs(Side):
    """mlx-lm's BatchGenerator; `prefix` hands it a computed cache of the first tokens of every prompt."""

    def __init__(self, model: Any, prefix: list[int] | None = None) -> None:
        from mlx_lm.generate import BatchGenerator
        from mlx_lm.models.cache import make_prompt_cache

        self.generator = BatchGenerator(model)
        self.numbers: dict[int, int] = {}
        self.prefix = prefix
        if prefix is not None:
            self.cache = make_prompt_cache(model)
            mx.eval(model(mx.array(prefix)[None], cache=self.cache))

    def add(self, number: int, job: Job) -> None:
        extra: dict[str, Any] = {}
        prompt = job.prompt
        if self.prefix is not None:
            prompt = prompt[len(self.prefix) :]
            extra = {"caches": [copy.deepcopy(self.cache)], "all_tokens": [list(self.prefix)]}
        (uid,) = self.generator.insert([prompt], [job.tokens], **extra)
        self.numbers[uid] = number

    def step(self) -> list[int]:
        _, responses = self.generator.next()
        return [self.numbers[response.uid] for response in responses]

    def kv_bytes(self) -> int:
        return self.generator.prompt_cache_nbytes

    def close(self) -> None:
        self.generator.close()


def drive(side: Side, jobs: list[Job]) -> Seen:
    """Feed the jobs at their times and step until every token has come."""
    seen = Seen([[] for _ in jobs])
    waiting = sorted(range(len(jobs)), key=lambda n: jobs[n].arrival_s)
    began = time.perf_counter()
    left = sum(job.tokens for job in jobs)
    while left:
        now = time.perf_counter() - began
        while waiting and jobs[waiting[0]].arrival_s <= now:
            number = waiting.pop(0)
            side.add(number, jobs[number])
        news = side.step()
        now = time.perf_counter() - began
        for number in news:
            seen.times_s[number].append(now - jobs[number].arrival_s)
        left -= len(news)
        seen.kv_bytes = max(seen.kv_bytes, side.kv_bytes())
    seen.total_s = now
    side.close()
    return seen


def arriving(count: int, draw: np.random.Generator, mean_gap_s: float) -> list[Job]:
    """Poisson arrivals, prompts of 20 to 800 tokens, outputs of 20 to 200."""
    times = np.cumsum(draw.exponential(mean_gap_s, count))
    return [
        Job(
            float(t),
            draw.integers(0, VOCABULARY, int(draw.integers(20, 801))).tolist(),
            int(draw.integers(20, 201)),
        )
        for t in times
    ]


def sharing(count: int, draw: np.random.Generator, prefix: list[int]) -> list[Job]:
    """Everyone at once, behind the same system prompt."""
    return [
        Job(0.0, prefix + draw.integers(0, VOCABULARY, int(draw.integers(10, 60))).tolist(), 20)
        for _ in range(count)
    ]


def among_streams(draw: np.random.Generator, length: int, tokens: int) -> list[Job]:
    """Eight streams, and a long prompt that arrives while they run."""
    jobs = [Job(0.0, draw.integers(0, VOCABULARY, 30).tolist(), tokens) for _ in range(8)]
    return [*jobs, Job(2.0, draw.integers(0, VOCABULARY, length).tolist(), 4)]


def ratio(ours: list[float], theirs: list[float]) -> str:
    """Median of the run-by-run ratios, and their range."""
    each = sorted(a / b for a, b in zip(ours, theirs))
    return f"{statistics.median(each):.2f} ({each[0]:.2f} to {each[-1]:.2f})"


def compare(
    runs: int, ours: Callable[[], Side], theirs: Callable[[], Side], jobs: Callable[[int], list[Job]]
) -> tuple[list[Seen], list[Seen]]:
    """Both sides in turn, the same jobs in each pair."""
    mine, other = [], []
    for run in range(runs):
        mine.append(drive(ours(), jobs(run)))
        other.append(drive(theirs(), jobs(run)))
    return mine, other


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="small loads, to see that it works")
    parser.add_argument("--loads", default="arriving,prefix,streams")
    args = parser.parse_args()
    loaded, tokenizer = open_model(args.model)
    count = 6 if args.quick else 32
    table = Table("load", "measure", "wanted", "ratio to mlx-lm, median (range)")

    def ours(**settings: Any) -> Callable[[], Side]:
        return lambda: Ours(loaded, tokenizer, **settings)

    def theirs() -> Side:
        return Theirs(loaded.model)

    drive(ours()(), arriving(2, np.random.default_rng(9), 0.01))  # compile and warm both
    drive(theirs(), arriving(2, np.random.default_rng(9), 0.01))

    loads = {"arriving": over_time, "prefix": behind_one_prefix, "streams": among_eight}
    for name in args.loads.split(","):
        loads[name](table, args, count, loaded, ours, theirs)
    table.print(f"Serving, {loaded.name}, float32, {args.runs} runs a side")


def over_time(table: Table, args: Any, count: int, loaded: Any, ours: Any, theirs: Any) -> None:
    """Requests arriving one after another."""

    def jobs(run: int) -> list[Job]:
        return arriving(count, np.random.default_rng(run), 0.25)

    mine, other = compare(args.runs, ours(), theirs, jobs)
    for measure, wanted, figure in (
        ("tokens a second", "≥ 1.3", lambda seen: seen.tokens_per_s),
        ("95th percentile between tokens", "≤ 0.6", lambda seen: seen.gap_95_s()),
        ("peak K/V bytes", "≤ 0.6", lambda seen: seen.kv_bytes),
    ):
        table.add(
            f"{count} arriving", measure, wanted, ratio(list(map(figure, mine)), list(map(figure, other)))
        )


def behind_one_prefix(table: Table, args: Any, count: int, loaded: Any, ours: Any, theirs: Any) -> None:
    """Everyone at once behind one system prompt; mlx-lm plain, and handed the prefix's cache."""
    length = 150 if args.quick else 1500
    prefix = np.random.default_rng(1).integers(0, VOCABULARY, length).tolist()

    def jobs(run: int) -> list[Job]:
        return sharing(count, np.random.default_rng(run), prefix)

    peers = (("plain", "≤ 0.2", theirs), ("handed the prefix", "≤ 0.8", lambda: Theirs(loaded.model, prefix)))
    for name, wanted, peer in peers:
        mine, other = compare(args.runs, ours(), peer, jobs)
        load = f"{count} behind one prefix, mlx-lm {name}"
        first = ratio([s.first_token_s for s in mine], [s.first_token_s for s in other])
        table.add(load, "median time to first token", wanted, first)
        held = ratio([s.kv_bytes for s in mine], [s.kv_bytes for s in other])
        table.add(load, "peak K/V bytes", "≤ 0.15", held)


def among_eight(table: Table, args: Any, count: int, loaded: Any, ours: Any, theirs: Any) -> None:
    """A long prompt arrives among eight running streams: how long they are held up."""
    target_s, worst = 0.25, []
    for run in range(args.runs):
        length, tokens = (400, 60) if args.quick else (4000, 150)
        seen = drive(ours(gap_target_s=target_s)(), among_streams(np.random.default_rng(run), length, tokens))
        seen.times_s.pop()
        worst.append(max(seen.gaps_s()) / target_s)
    spread = f"{statistics.median(worst):.2f} ({min(worst):.2f} to {max(worst):.2f})"
    table.add("a long prompt among 8 streams", "slowest gap over the target of 250 ms", "≤ 2", spread)


def open_model(name: str | None) -> tuple[LoadedModel, Any]:
    """The model folder under test, or the random stand-in."""
    if name is not None:
        files = resolve(name)
        return load(files, LoadConfig()), load_tokenizer(files.path)
    import tempfile
    from pathlib import Path

    folder = tiny.write(Path(tempfile.mkdtemp()) / "llama-30M", "llama", **SHAPE)
    from mlxserve.models.load import load_folder

    return load_folder(folder, LoadConfig()), load_tokenizer(folder)


if __name__ == "__main__":
    main()
