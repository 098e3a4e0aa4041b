"""Who is admitted next: interactive before batch, and within a class every client its fair share.

Knows: priorities, clients, tokens asked for. Does not know pages or what a request says.

Fairness is start-time fair queueing (Goyal et al. 1996): each client has a clock that advances by the
tokens it is served; the client whose clock is furthest behind goes first. A client that was idle starts
at the clock of those now waiting, so it cannot save up turns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from mlxserve.engine.sequence import Sequence
from mlxserve.request import Priority


class WaitingQueue:
    """Sequences not running. Preempted ones go back to the front of their client's line."""

    def __init__(self) -> None:
        self._lines: dict[Priority, dict[str, deque[Sequence]]] = {priority: {} for priority in Priority}
        self._clocks: dict[str, float] = {}
        self._now = 0.0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, sequence: Sequence, *, front: bool = False) -> None:
        lines = self._lines[sequence.request.priority]
        line = lines.setdefault(sequence.request.client, deque())
        if not line:
            client = sequence.request.client
            self._clocks[client] = max(self._clocks.get(client, 0.0), self._now)
        if front:
            line.appendleft(sequence)
        else:
            line.append(sequence)
        self._count += 1

    def remove(self, sequence: Sequence) -> None:
        """Take out a sequence wherever it stands; it must be here."""
        lines = self._lines[sequence.request.priority]
        line = lines[sequence.request.client]
        line.remove(sequence)
        self._count -= 1
        if not line:
            del lines[sequence.request.client]

    def served(self, sequence: Sequence) -> None:
        """`sequence` is admitted: its client's clock advances by what it asks for."""
        client = sequence.request.client
        self._now = self._clocks.get(client, self._now)
        self._clocks[client] = self._now + len(sequence.tokens) + (sequence.request.params.max_tokens or 0)
        if len(self._clocks) > 4096:
            self._forget_idle()

    def __iter__(self) -> Iterator[Sequence]:
        """In the order in which they would be admitted, if each one were."""
        for priority in Priority:
            lines = self._lines[priority]
            clocks = {client: self._clocks[client] for client in lines}
            places = dict.fromkeys(lines, 0)
            while places:
                client = min(places, key=lambda name: clocks[name])
                sequence = lines[client][places[client]]
                yield sequence
                clocks[client] += len(sequence.tokens) + (sequence.request.params.max_tokens or 0)
                places[client] += 1
                if places[client] >= len(lines[client]):
                    del places[client]

    def _forget_idle(self) -> None:
        busy = {client for lines in self._lines.values() for client in lines}
        self._clocks = {client: clock for client, clock in self._clocks.items() if client in busy}
