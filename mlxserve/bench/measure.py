"""Runs loads against a target and writes down what each client saw.

Knows: asyncio, the clock, and how clients take turns. Does not know what the numbers mean (`figures`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from mlxserve.bench.scenarios import Job, Load, Sizes, Words, make
from mlxserve.bench.target import Ask, Target, Trace
from mlxserve.errors import MlxServeError

WARM_TOKENS = 4
WARM_WORDS = 40
MARGIN_TOKENS = 64  # what a chat template and the calibration's error may add to a prompt


@dataclass(slots=True)
class Seen:
    """A load's traces beside its jobs, and seconds from its first request to its last token, by phase."""

    load: Load
    jobs: list[Job] = field(default_factory=list)
    traces: list[Trace] = field(default_factory=list)
    phases_s: list[float] = field(default_factory=list)

    def of(self, role: str) -> list[Trace]:
        """Traces of the jobs with that role that were answered."""
        return [t for job, t in zip(self.jobs, self.traces) if job.role == role and not t.failed]

    @property
    def answered(self) -> list[Trace]:
        return [trace for trace in self.traces if not trace.failed]

    @property
    def failures(self) -> list[str]:
        return [trace.failed for trace in self.traces if trace.failed]


async def calibrate(target: Target, sizes: Sizes) -> Sizes:
    """Warm the target up; the sizes with its own tokens a word, and no longer than its context.

    Raises MlxServeError if the target does not answer even that.
    """
    words = Words(replace(sizes, tokens_per_word=1.0))
    short, long = ([{"role": "user", "content": words.text(n)}] for n in (1, WARM_WORDS))
    first = await target.ask(Ask(short, WARM_TOKENS), _nobody)
    second = await target.ask(Ask(long, WARM_TOKENS), _nobody)
    if first.prompt_tokens and second.prompt_tokens and second.prompt_tokens > first.prompt_tokens:
        more = second.prompt_tokens - first.prompt_tokens
        sizes = replace(sizes, tokens_per_word=more / (WARM_WORDS - 2))
    return sizes if target.context is None else fit(sizes, target.context)


def _nobody(text: str, tokens: int) -> None:
    """Nobody listens while the target is warmed up."""


def fit(sizes: Sizes, context: int) -> Sizes:
    """The sizes with every length small enough for `context` tokens."""
    tokens = min(sizes.tokens, max(2, context // 8))
    room = max(1, context - 2 * tokens - MARGIN_TOKENS)
    return replace(
        sizes,
        tokens=tokens,
        prompt_tokens=min(sizes.prompt_tokens, room),
        prefix_tokens=min(sizes.prefix_tokens, max(1, room - 30)),
        long_tokens=min(sizes.long_tokens, room),
    )


async def run(
    target: Target,
    names: Sequence[str],
    sizes: Sizes,
    *,
    progress: Callable[[str, int, int], None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Seen]:
    """Each named load in turn. progress: told (load, requests ended, requests in all)."""
    found = []
    for name in names:
        load = make(name, sizes)
        found.append(await _run_load(target, load, progress, clock))
    return found


async def _run_load(
    target: Target,
    load: Load,
    progress: Callable[[str, int, int], None] | None,
    clock: Callable[[], float],
) -> Seen:
    seen = Seen(load, jobs=[job for phase in load.phases for job in phase])
    seen.traces = [Trace(0.0) for _ in seen.jobs]
    began, done, offset = clock(), 0, 0

    def ended() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(load.name, done, len(seen.jobs))

    for phase in load.phases:
        phase_began = clock()
        pairs = list(zip(phase, seen.traces[offset:]))
        await _Phase(target, pairs, began, clock, ended).run()
        seen.phases_s.append(clock() - phase_began)
        offset += len(phase)
    return seen


class _Phase:
    """Jobs that run at the same time: one task a client, each its jobs in order."""

    def __init__(
        self,
        target: Target,
        pairs: list[tuple[Job, Trace]],
        began: float,
        clock: Callable[[], float],
        ended: Callable[[], None],
    ) -> None:
        self.target, self.pairs, self.began, self.clock, self.ended = target, pairs, began, clock, ended
        self.streams = [trace for job, trace in pairs if job.role == "stream"]
        self.news = asyncio.Event()

    async def run(self) -> None:
        clients = sorted({job.client for job, _ in self.pairs})
        async with asyncio.TaskGroup() as tasks:
            for client in clients:
                tasks.create_task(self._client(client))

    async def _client(self, client: int) -> None:
        for job, trace in self.pairs:
            if job.client == client:
                await self._under_way(job.after_pieces)
                await self._ask(job, trace)

    async def _under_way(self, pieces: int) -> None:
        """Wait until every stream has heard so many pieces, or has ended."""
        while any(len(t.pieces_s) < pieces and not (t.total_s or t.failed) for t in self.streams):
            self.news.clear()
            await self.news.wait()

    async def _ask(self, job: Job, trace: Trace) -> None:
        start = self.clock()
        trace.began_s = start - self.began

        def heard(text: str, tokens: int) -> None:
            trace.text += text
            trace.chunks += tokens
            trace.pieces_s.append(self.clock() - start)
            self.news.set()

        try:
            trace.totals = await self.target.ask(job.ask, heard)
            if not trace.pieces_s:
                trace.failed = "The answer is empty."
        except MlxServeError as error:
            trace.failed = error.message
        trace.total_s = self.clock() - start
        self.news.set()
        self.ended()
