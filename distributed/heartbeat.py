"""Heartbeats that carry progress, and the judgement of them: a rank that lives may still stand.

Knows: what a rank reports several times a second, and when silence or standstill is a fault. Does not know
processes or sockets. No MLX in here.

    silence      no beat of a rank for `deadline_s` (STARTING_S while it loads: a long call may hold its thread)
    standstill   work is queued at rank 0, and no step was completed for max(deadline_s, 20 x median step)
                 (STARTING_S for the very first step, and while an adapter is put on, which no step can pass)

A pause of the watching process itself (a Mac that slept, a stopped terminal) is nobody's fault: it is taken
off every clock.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from mlxserve.distributed.faults import Fault

STARTING_S = 60.0
SLOW_STEPS = 20
_BEATS_A_DEADLINE = 5
_STEPS_KEPT = 101
SERVING = "serving"


@dataclass(frozen=True, slots=True)
class Beat:
    """phase: "starting", "loading", "joining" or "serving". step: the last one completed, -1 for none.

    begun: the last one begun. queued: whether there is work. adapting: an adapter is being put on the ranks.
    These three are rank 0's to know.
    """

    phase: str = "starting"
    step: int = -1
    begun: int = -1
    queued: bool = False
    adapting: bool = False

    def plain(self) -> dict[str, Any]:
        return asdict(self)


class Pulse:
    """A thread that sends a beat several times within each deadline, until `stop`."""

    def __init__(self, read: Callable[[], Beat], send: Callable[[Beat], None], deadline_s: float) -> None:
        self._read, self._send = read, send
        self._every_s = deadline_s / _BEATS_A_DEADLINE
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mlxserve-pulse", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopped.wait(self._every_s):
            self._send(self._read())

    def stop(self) -> None:
        self._stopped.set()


class Monitor:
    """The judge of one epoch's beats. `names` of the ranks; times are the clock's seconds."""

    def __init__(
        self, names: Sequence[str], deadline_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.names = names
        self.deadline_s = deadline_s
        self._clock = clock
        now = clock()
        self._last = [Beat()] * len(names)
        self._heard_s = [now] * len(names)
        self._progress_s = self._looked_s = now
        self._steps_s: deque[float] = deque(maxlen=_STEPS_KEPT)

    @property
    def every_s(self) -> float:
        """How often `fault` is to be asked."""
        return self.deadline_s / _BEATS_A_DEADLINE

    def hear(self, rank: int, beat: Beat) -> None:
        """Take in one beat."""
        now = self._clock()
        before, self._last[rank] = self._last[rank], beat
        self._heard_s[rank] = now
        if rank:
            return
        if beat.step > before.step:
            if before.queued:
                self._steps_s.append((now - self._progress_s) / (beat.step - before.step))
            self._progress_s = now
        elif not (beat.queued and before.queued) or (before.adapting and not beat.adapting):
            self._progress_s = now

    def fault(self) -> Fault | None:
        """What is wrong now, if anything. To be asked every `every_s`: a longer gap is a pause of our own."""
        now = self._clock()
        pause = now - self._looked_s - self.every_s
        self._looked_s = now
        if pause > self.every_s:
            self._heard_s = [heard + pause for heard in self._heard_s]
            self._progress_s += pause
        return self._silence(now) or self._standstill(now)

    def _silence(self, now: float) -> Fault | None:
        for rank, beat in enumerate(self._last):
            allowed = self.deadline_s if beat.phase == SERVING else max(self.deadline_s, STARTING_S)
            if now - self._heard_s[rank] > allowed:
                what = f"has given no sign of life for {allowed:g} s; {self.did(rank)}"
                return Fault(rank, self.names[rank], what)
        return None

    def _standstill(self, now: float) -> Fault | None:
        usual = median(self._steps_s) if self._steps_s else 0.0
        first = self._last[0]
        # Kernels are compiled in the first step.
        once_s = STARTING_S if first.step < 0 or first.adapting else 0.0
        allowed = max(self.deadline_s, SLOW_STEPS * usual, once_s)
        if not self._last[0].queued or now - self._progress_s <= allowed:
            return None
        rank = self._behind()
        what = f"has completed no step for {allowed:.3g} s with work queued; {self.did(rank)}"
        return Fault(rank, self.names[rank], what)

    def _behind(self) -> int:
        """The rank to blame for a standstill: the last in completed steps, rank 0 if it has begun nothing new."""
        first = self._last[0]
        if first.begun <= first.step or len(self._last) == 1:
            return 0
        return min(range(1, len(self._last)), key=lambda rank: self._last[rank].step)

    def did(self, rank: int) -> str:
        """What a rank did last, as a clause."""
        beat = self._last[rank]
        if beat.phase != SERVING:
            return f"it was {beat.phase}"
        return f"it had completed step {beat.step}" if beat.step >= 0 else "it had completed no step"
