"""Whether a rank's weights are still what was loaded: sums over their bytes, taken anew again and again.

Knows: parameters by name, their bytes, CRC-32. Does not know what a change leads to. A changed weight gives
fluent, wrong text on every rank; sums of tensor-parallel ranks hide it from a comparison of activations,
so each rank looks at its own bytes. A background thread does it, at a pace that has seen every byte once
in `sweep_s`: 100 GB in 5 minutes are 0.3 GB/s, a fraction of one core (CRC-32 runs at about 1 GB/s or more).
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable, Iterable

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

SWEEP_S = 300.0


def checksum(array: mx.array) -> int:
    """CRC-32 of an evaluated array's bytes."""
    return zlib.crc32(np.array(array.reshape(-1).view(mx.uint8), copy=False).data)


class IntegrityWatch:
    """Sweeps over a model's parameters until `stop`; later ones are compared with the first, which does not
    wait and makes the sums.

    on_change is called once, on the watch's thread, with the name of the first parameter that has changed.
    only: the parameters to look at; None takes all.
    """

    def __init__(
        self,
        model: nn.Module,
        on_change: Callable[[str], None],
        *,
        sweep_s: float = SWEEP_S,
        only: Iterable[str] | None = None,
    ) -> None:
        self._model, self._on_change, self._sweep_s = model, on_change, sweep_s
        self._only = None if only is None else frozenset(only)
        self._known: dict[str, int] = {}
        self._stopped = threading.Event()
        self.sweeps = 0
        self._thread = threading.Thread(target=self._run, name="mlxserve-integrity", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Returns when the thread has ended."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.is_set():
            changed = self._sweep()
            if changed is not None:
                self._on_change(changed)
                return

    def _sweep(self) -> str | None:
        """One look at everything, spread over `sweep_s`; the name of a changed parameter."""
        weights = self._weights()
        total = sum(array.nbytes for _, array in weights) or 1
        spread_s = self._sweep_s if self._known else 0.0
        began, seen = time.monotonic(), 0
        for name, array in weights:
            if self._known.setdefault(name, sum_now := checksum(array)) != sum_now:
                return name
            seen += array.nbytes
            if self._rest(began + spread_s * seen / total):
                return None
        self.sweeps += 1
        return None

    def _weights(self) -> list[tuple[str, mx.array]]:
        found = tree_flatten(self._model.parameters())
        return [(name, array) for name, array in found if self._only is None or name in self._only]

    def _rest(self, until: float) -> bool:
        """Sleep until a time of the clock; True if told to stop meanwhile."""
        return self._stopped.wait(max(until - time.monotonic(), 0.0))
