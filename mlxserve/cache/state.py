"""Recurrent state in slots: what mamba, gated-delta and short-convolution layers carry between tokens.

A slot holds the state of one sequence at one exact position, for all recurrent layers together. Each
array of each layer is one pool shaped (slots, …).

Knows: MLX arrays and slot ids. Does not know sequences, positions or who owns a slot.
"""

from __future__ import annotations

import mlx.core as mx


class LayerState:
    """One recurrent layer's arrays for every slot, allocated when their shapes are first seen."""

    def __init__(self, slots: int, arrays: int) -> None:
        self.slots = slots
        self.pools: list[mx.array | None] = [None] * arrays

    def read(self, slots: mx.array) -> list[mx.array | None]:
        """The arrays of `slots`, each (B, …); None where this layer has written nothing yet."""
        return [None if pool is None else mx.take(pool, slots, axis=0) for pool in self.pools]

    def write(self, slots: mx.array, arrays: list[mx.array | None]) -> None:
        """Put (B, …) arrays into `slots`; what is None stays as it is."""
        for index, new in enumerate(arrays):
            if new is None:
                continue
            pool = self.pools[index]
            if pool is None:
                pool = mx.zeros((self.slots, *new.shape[1:]), new.dtype)
            pool[slots] = new
            self.pools[index] = pool

    def grow(self, slots: int) -> None:
        """Make room for slot ids below `slots`; what is written stays."""
        extra = slots - self.slots
        self.slots = slots
        for index, pool in enumerate(self.pools):
            if pool is not None:
                zeros = mx.zeros((extra, *pool.shape[1:]), pool.dtype)
                self.pools[index] = mx.concatenate([pool, zeros])
        mx.eval(self.arrays())

    def clear(self) -> None:
        """Drop the arrays; the next write allocates them anew."""
        self.pools = [None] * len(self.pools)

    def copy(self, sources: mx.array, targets: mx.array) -> None:
        """Copy slots: (n,) ids onto (n,) other ids."""
        self.write(targets, self.read(sources))

    @property
    def nbytes(self) -> int:
        return sum(pool.nbytes for pool in self.pools if pool is not None)

    def arrays(self) -> list[mx.array]:
        return [pool for pool in self.pools if pool is not None]
