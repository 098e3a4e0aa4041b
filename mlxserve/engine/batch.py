"""What one step computes: the one plain object between scheduler and runner.

Knows: integers. No MLX, no tokenizer, no request. It can be serialised and sent to another machine.

The runner keeps a row of page ids, of sampling settings and of recurrent state for each *slot*; a
sequence has a slot from admission until it ends or is preempted. A batch holds only what changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from mlxserve.request import SamplingParams


class Segment(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Positions [start, start + count) of the sequence in `slot`.

    tokens: their ids; None for one token that the step before sampled and nobody has read yet.
    sample: whether the last position's logits are drawn from. draw: how many tokens of the answer came
    before the one to be drawn (with the seed it fixes the draw, whatever else is in the batch).
    """

    slot: int
    start: int
    count: int
    tokens: Sequence[int] | None
    sample: bool
    draw: int = 0


@dataclass(frozen=True, slots=True)
class Admission:
    """A sequence takes a slot. history: tokens whose penalties hold, prompt first, `prompt_tokens` of them.

    state_slot: where its recurrent state lives, for models that have any.
    """

    slot: int
    params: SamplingParams
    seed: int
    history: Sequence[int]
    prompt_tokens: int
    adapter: str | None = None
    state_slot: int | None = None


@dataclass(slots=True)
class Batch:
    """One step, in the order in which its parts are carried out.

    admitted: new slots. pages: (group, slot, index, page) changes of page tables. copies: (group, source,
    target) pages to copy, all sources read before any target is written. restores: (source, target) state
    slots to copy before the step, alike. segments: what is computed. checkpoints: (source, target) state
    slots to copy after it. later_pages: changes of page tables for the steps that follow.
    """

    step: int
    admitted: list[Admission] = field(default_factory=list)
    pages: list[tuple[int, int, int, int]] = field(default_factory=list)
    copies: list[tuple[int, int, int]] = field(default_factory=list)
    restores: list[tuple[int, int]] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    checkpoints: list[tuple[int, int]] = field(default_factory=list)
    later_pages: list[tuple[int, int, int, int]] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return sum(segment.count for segment in self.segments)
