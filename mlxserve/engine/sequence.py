"""One request on its way: its tokens, how far they are computed, and what it holds.

Knows: positions, pages, a slot. Does not know text, MLX, or when it is its turn.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from mlxserve.cache.prefix import Cursor
from mlxserve.engine.batch import Segment
from mlxserve.request import FinishReason, Request


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """tokens: prompt and answer so far. computed: positions whose keys and values are (being) written.

    in_flight: tokens drawn in steps on their way and not read yet, 2 at most (void_draws: further ones that
    do not count any more); `computed` never passes len(tokens) + in_flight. tables: page ids, one list a
    group. waits_for, waits_until: another sequence that is computing tokens this one starts with, and how
    many of them. A preempted sequence keeps its tokens and starts again.
    """

    request: Request
    seed: int
    arrival: int
    arrived_s: float
    tokens: list[int]
    status: Status = Status.WAITING
    computed: int = 0
    in_flight: int = 0
    void_draws: int = 0
    slot: int = -1
    tables: list[list[int]] = field(default_factory=list)
    cursor: Cursor | None = None
    state_slot: int | None = None
    waits_for: Sequence | None = None
    waits_until: int = 0
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0
    preemptions: int = 0
    first_token_s: float | None = None

    @property
    def prompt_tokens(self) -> int:
        return len(self.request.prompt)

    @property
    def generated(self) -> int:
        """Tokens of the answer, those not read yet included."""
        return len(self.tokens) + self.in_flight - len(self.request.prompt)

    @property
    def to_compute(self) -> int:
        """Positions that must be computed before the next token can be drawn."""
        return len(self.tokens) + self.in_flight - self.computed

    @property
    def decoding(self) -> bool:
        return self.computed > 0 and self.to_compute == 1

    @property
    def may_run(self) -> bool:
        """False once everything was drawn that the limit allows."""
        return self.generated < (self.request.params.max_tokens or 1)

    @property
    def longest(self) -> int:
        """Positions it can ever hold: the last token drawn is never computed."""
        return len(self.request.prompt) + (self.request.params.max_tokens or 1) - 1


@dataclass(slots=True)
class Planned:
    """A sequence's part in a step; checkpoint: the state slot to copy its state to after the step."""

    sequence: Sequence
    segment: Segment
    checkpoint: int | None = None
