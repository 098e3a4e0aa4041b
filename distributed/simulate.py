"""A server on several Macs, simulated event by event from the arithmetic of `plan` and `estimate`.

Knows: how long a stage takes for a batch, which sequences run, and what waits for what. Nothing here was
measured on Macs; where one sequence decodes alone the result is `estimate`'s, with its error of 35 %.

What is assumed:
  - A step costs the larger of reading (weights, K/V of its sequences) and computing, and what `estimate`
    charges for layers of experts. Matrices are multiplied at 0.65 of a chip's peak.
  - Experts are chosen evenly and independently, so that more tokens read more of them.
  - A reduction or a hand-over costs its fixed time, and its bytes beyond one token's at the link's rate.
  - The scheduler is this program's: a step takes every decoding sequence and fills up to 512 tokens with
    prompts, the oldest first. A sequence is admitted when the K/V of its prompt and answer fits.
  - A pipeline deals its sequences over micro-batches; a micro-batch begins its next step when it has left
    the last stage. A prompt's chunks follow one another.
What is left out: prefix hits, the cost of the scheduler, faults, heat, and other work on the machines.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from mlxserve.config import EngineConfig
from mlxserve.distributed.estimate import (
    HANDOVER_S,
    REDUCTION_S,
    REDUCTIONS_A_LAYER,
    eta,
    layer_seconds,
    rank_loads,
)
from mlxserve.distributed.facts import Facts, bytes_read
from mlxserve.distributed.hosts import Host
from mlxserve.distributed.shares import work_bytes
from mlxserve.distributed.split import Split
from mlxserve.errors import DoesNotFit, UsageError
from mlxserve.models.kvlayout import HEADS, text_config
from mlxserve.models.memory import bytes_per_value

COMPUTE_SHARE = 0.65  # of peak, as matrix products of long prompts reach
LINK_BYTES_S = {"rdma": 6e9, "tcp": 2.5e9}  # Thunderbolt 5 and 4, of large messages


@dataclass(frozen=True, slots=True)
class Work:
    """Requests: `count` of them, each so many tokens; `rate` a second, arriving at random (None: all at 0).

    cached: tokens of each prompt whose K/V is already there, as with a shared prefix.
    """

    prompt: int
    answer: int
    count: int
    rate: float | None = None
    seed: int = 0
    cached: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a simulation saw. Times in seconds; `first_s` and `total_s` are sorted, one a request.

    tokens_per_s: answer tokens over the time from the first arrival to the last token. gap_s: mean time
    between tokens of an answer. busy: share of its time that each stage worked.
    """

    tokens_per_s: float
    first_s: tuple[float, ...]
    total_s: tuple[float, ...]
    gap_s: float
    busy: tuple[float, ...]
    at_once: int

    def first_at(self, share: float) -> float:
        """A percentile of the time to the first token, 0 < share <= 1."""
        return self.first_s[max(0, round(share * len(self.first_s)) - 1)]


@dataclass(slots=True)
class _Sequence:
    """A request in flight: `read` of its prompt, `made` of its answer."""

    arrived: float
    prompt: int
    answer: int
    read: int = 0
    made: int = 0
    first: float | None = None
    ended: float = 0.0

    @property
    def reading(self) -> bool:
        return self.read < self.prompt

    @property
    def context(self) -> int:
        return self.read + self.made


# (sequence, tokens of it in this step)
Batch = list[tuple[_Sequence, int]]


@dataclass(frozen=True)
class Machine:
    """A model on hosts: how long each stage takes for a batch. A tensor split is one stage."""

    facts: Facts
    split: Split
    hosts: tuple[Host, ...]
    link: str = "tcp"
    loads: list[dict[float, int]] = field(init=False)
    _eta: float = field(init=False)
    _layer_s: float = field(init=False)
    _flops: list[float] = field(init=False)
    _kv: list[dict[int | None, tuple[int, int]]] = field(init=False)  # window -> (layers, values a token)

    def __post_init__(self) -> None:
        if any(host.bandwidth is None or host.flops is None for host in self.hosts):
            raise UsageError("A simulation needs the chip or the bandwidth of every host.", param="hosts")
        object.__setattr__(self, "_eta", eta(self.facts))
        object.__setattr__(self, "_layer_s", layer_seconds(self.facts))
        object.__setattr__(self, "_kv", [self._kv_layers(rank) for rank in range(self.split.size)])
        object.__setattr__(self, "loads", rank_loads(self.facts, self.split, 0)[0])
        object.__setattr__(self, "_flops", [self._token_flops(rank) for rank in range(self.split.size)])

    @property
    def stages(self) -> int:
        return self.split.size if self.split.mode == "pipeline" else 1

    def _token_flops(self, rank: int) -> float:
        """Operations of one token on a rank: two for each parameter that it is multiplied with."""
        whole = sum(share * nbytes for share, nbytes in self.facts.tensor_load(1).items())
        held = sum(share * nbytes for share, nbytes in self.loads[rank].items())
        return 2 * self.facts.active_parameters * held / whole if whole else 0.0

    def _layers(self, rank: int) -> range | None:
        return self.split.layers_of(rank) if self.split.mode == "pipeline" else None

    def _kv_layers(self, rank: int) -> dict[int | None, tuple[int, int]]:
        """Layers of a rank that keep K/V, those with the same window together."""
        layers = self._layers(rank)
        found: dict[int | None, tuple[int, int]] = {}
        for layer in self.facts.kv if layers is None else self.facts.kv[layers.start : layers.stop]:
            if layer is not None:
                many, values = found.get(layer.window, (0, 0))
                found[layer.window] = (many + 1, values + layer.values)
        return found

    @property
    def _parts(self) -> int:
        """On how many ranks a layer's heads are."""
        return self.split.size if self.split.mode == "tensor" else 1

    def kv_bytes(self, rank: int, context: int) -> float:
        """Bytes of K/V on a rank for one sequence of `context` tokens."""
        values = sum(each * _kept(window, context) for window, (_, each) in self._kv[rank].items())
        return values * bytes_per_value() / (1 if self.facts.replicated_kv else self._parts)

    def room(self, tokens: int) -> int:
        """How many sequences of `tokens` tokens fit at once. Raises DoesNotFit if not one does."""
        rooms = []
        for rank, host in enumerate(self.hosts):
            weights = sum(self.loads[rank].values())
            free = host.usable_bytes - weights - work_bytes(weights)
            each = self.kv_bytes(rank, tokens)
            if free < each:
                raise DoesNotFit(
                    f"{self.facts.name} as {self.split} has no room for {tokens:,} tokens on {host.name}.",
                    needed_bytes=round(each),
                    available_bytes=max(free, 0),
                )
            rooms.append(int(free // each) if each else EngineConfig().max_sequences)
        return min(*rooms, EngineConfig().max_sequences)

    def stage_seconds(self, stage: int, batch: Batch) -> float:
        """How long a stage works on a batch."""
        if self.split.mode == "pipeline":
            layers = len(self.split.layers_of(stage))
            return self._work(stage, batch) + layers * self._layer_s
        slowest = max(self._work(rank, batch) for rank in range(self.split.size))
        own = self.facts.layers * self._layer_s
        return slowest + own + self._reductions(sum(tokens for _, tokens in batch))

    def _work(self, rank: int, batch: Batch) -> float:
        host = self.hosts[rank]
        tokens = sum(tokens for _, tokens in batch)
        kv = sum(self.kv_bytes(rank, sequence.context) for sequence, _ in batch)
        reading = (bytes_read(self.loads[rank], tokens) + kv) / (self._eta * (host.bandwidth or 0))
        flops = tokens * self._flops[rank] + sum(self._attention(rank, *entry) for entry in batch)
        return max(reading, flops / (COMPUTE_SHARE * (host.flops or 0)))

    def _attention(self, rank: int, sequence: _Sequence, tokens: int) -> float:
        """Operations of attention scores and sums: 4 for each query, key, and number of a head."""
        text = text_config(self.facts.config)
        heads = next((text[key] for key in HEADS if isinstance(text.get(key), int)), 0)
        width = text.get("head_dim") or (self.facts.hidden // heads if heads else 0)
        seen = sum(
            many * _kept(window, sequence.context + tokens) for window, (many, _) in self._kv[rank].items()
        )
        return 4.0 * tokens * seen * heads * width / self._parts

    def _reductions(self, tokens: int) -> float:
        """Two a layer; a ring sends each byte 2 (n - 1) / n times."""
        size = self.split.size
        if size == 1:
            return 0.0
        beyond = (tokens - 1) * self.facts.hidden * 2 * 2 * (size - 1) / size
        each = REDUCTION_S[self.link] + beyond / LINK_BYTES_S[self.link]
        return REDUCTIONS_A_LAYER * self.facts.layers * each

    def handover_seconds(self, batch: Batch) -> float:
        """From a stage to the next, and from the last back to the first."""
        if self.stages == 1:
            return 0.0
        beyond = sum(tokens for _, tokens in batch) - 1
        return HANDOVER_S + beyond * self.facts.hidden * 2 / LINK_BYTES_S[self.link]


def _kept(window: int | None, context: int) -> int:
    return context if window is None else min(window, context)


def simulate(machine: Machine, work: Work, micro_batches: int | None = None) -> Outcome:
    """Serve `work` to its end. micro_batches: of a pipeline, as many as stages unless said.

    Raises DoesNotFit if not even one sequence has room, UsageError for hosts without figures.
    """
    return _Run(machine, work, micro_batches or machine.stages).outcome()


def arrivals(work: Work) -> list[float]:
    """When each request comes: a Poisson process, the same for the same seed."""
    if work.rate is None:
        return [0.0] * work.count
    drawn, now, times = random.Random(work.seed), 0.0, []
    for _ in range(work.count):
        now += drawn.expovariate(work.rate)
        times.append(now)
    return times


class _Run:
    """One simulation: a heap of events, a queue before each stage, and groups of sequences."""

    def __init__(self, machine: Machine, work: Work, groups: int) -> None:
        self.machine = machine
        self.room = machine.room(work.prompt + work.answer)
        self.waiting: deque[_Sequence] = deque()
        self.groups: list[list[_Sequence]] = [[] for _ in range(groups)]
        self.idle = set(range(groups))  # groups with no step in flight
        self.queues: list[deque[tuple[int, Batch]]] = [deque() for _ in range(machine.stages)]
        self.working = [False] * machine.stages
        self.busy = [0.0] * machine.stages
        cached = min(work.cached, work.prompt - 1)  # the last token is always computed
        self.sequences = [_Sequence(time, work.prompt, work.answer, cached) for time in arrivals(work)]
        self.most = 0
        self._events: list[tuple[float, int, Any, tuple[Any, ...]]] = []
        self._order = count()
        for sequence in self.sequences:
            self._at(sequence.arrived, self._arrive, sequence)
        while self._events:
            self.now, _, event, arguments = heapq.heappop(self._events)
            event(*arguments)

    def _at(self, time: float, event: Any, *arguments: Any) -> None:
        heapq.heappush(self._events, (time, next(self._order), event, arguments))

    def _arrive(self, sequence: _Sequence) -> None:
        self.waiting.append(sequence)
        self._admit()

    def _admit(self) -> None:
        """Waiting sequences join the smallest group while there is room; idle groups begin a step."""
        while self.waiting and sum(map(len, self.groups)) < self.room:
            min(self.groups, key=len).append(self.waiting.popleft())
        self.most = max(self.most, sum(map(len, self.groups)))
        for number in sorted(self.idle):
            if self.groups[number]:
                self.idle.discard(number)
                self._enter(0, number, _next_batch(self.groups[number]))

    def _enter(self, stage: int, group: int, batch: Batch) -> None:
        self.queues[stage].append((group, batch))
        self._start(stage)

    def _start(self, stage: int) -> None:
        if self.working[stage] or not self.queues[stage]:
            return
        group, batch = self.queues[stage].popleft()
        took = self.machine.stage_seconds(stage, batch)
        self.working[stage] = True
        self.busy[stage] += took
        self._at(self.now + took, self._leave, stage, group, batch)

    def _leave(self, stage: int, group: int, batch: Batch) -> None:
        self.working[stage] = False
        after = self.now + self.machine.handover_seconds(batch)
        if stage + 1 < self.machine.stages:
            self._at(after, self._enter, stage + 1, group, batch)
        else:
            self._at(after, self._commit, group, batch)
        self._start(stage)

    def _commit(self, group: int, batch: Batch) -> None:
        """The step's tokens are there: prompts have been read further, answers are longer."""
        for sequence, tokens in batch:
            if sequence.reading:
                sequence.read += tokens
                if sequence.reading:
                    continue
                sequence.first = self.now
            sequence.made += 1
            if sequence.made == sequence.answer:
                sequence.ended = self.now
                self.groups[group].remove(sequence)
        self.idle.add(group)
        self._admit()

    def outcome(self) -> Outcome:
        ended = self.sequences
        last, begun = max(s.ended for s in ended), min(s.arrived for s in ended)
        gaps = [(s.ended - s.first) / (s.answer - 1) for s in ended if s.first is not None and s.answer > 1]
        return Outcome(
            tokens_per_s=sum(s.answer for s in ended) / (last - begun),
            first_s=tuple(sorted(s.first - s.arrived for s in ended if s.first is not None)),
            total_s=tuple(sorted(s.ended - s.arrived for s in ended)),
            gap_s=sum(gaps) / len(gaps) if gaps else 0.0,
            busy=tuple(part / (last - begun) for part in self.busy),
            at_once=self.most,
        )


def _next_batch(group: Sequence[_Sequence]) -> Batch:
    """One token of every decoding sequence, then prompts, the oldest first, up to a step's tokens."""
    batch: Batch = [(sequence, 1) for sequence in group if not sequence.reading]
    left = EngineConfig().step_tokens - len(batch)
    for sequence in group:
        if sequence.reading and left > 0:
            tokens = min(left, sequence.prompt - sequence.read)
            batch.append((sequence, tokens))
            left -= tokens
    return batch
