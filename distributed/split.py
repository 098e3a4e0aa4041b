"""How a model is divided: the one plain object that plan, loader, runner and launcher share.

Knows: a mode, a number of ranks, and for a pipeline which layers each rank holds. Does not know bytes,
machines or MLX.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mlxserve.errors import UsageError

Mode = Literal["tensor", "pipeline"]


@dataclass(frozen=True, slots=True)
class Split:
    """`size` ranks; for a pipeline, rank r holds layers [bounds[r], bounds[r + 1])."""

    mode: Mode
    size: int
    bounds: tuple[int, ...] = ()

    @classmethod
    def tensor(cls, size: int) -> Split:
        """Every layer on every rank, its matrices divided."""
        if size < 1:
            raise UsageError(f"A tensor-parallel split needs at least 1 rank, not {size}.", param="split")
        return cls("tensor", size)

    @classmethod
    def pipeline(cls, layers_by_rank: list[int]) -> Split:
        """Whole layers, so many on each rank in turn."""
        if not layers_by_rank or min(layers_by_rank) < 1:
            raise UsageError(
                f"Every rank of a pipeline holds at least one layer, not {layers_by_rank}.", param="split"
            )
        bounds = [0]
        for layers in layers_by_rank:
            bounds.append(bounds[-1] + layers)
        return cls("pipeline", len(layers_by_rank), tuple(bounds))

    @classmethod
    def parse(cls, text: str, layers: int) -> Split:
        """`tensor:2`, `pipeline:2` (as even as can be), `pipeline:76,50`; a UsageError says what is wrong."""
        mode, _, rest = text.partition(":")
        try:
            numbers = [int(part) for part in rest.split(",")]
        except ValueError:
            numbers = []
        if mode not in ("tensor", "pipeline") or not numbers or (mode == "tensor" and len(numbers) != 1):
            raise UsageError(
                f"{text!r} is no split; write tensor:2, pipeline:2 or pipeline:76,50.", param="split"
            )
        if mode == "tensor":
            return cls.tensor(numbers[0])
        if len(numbers) == 1:
            return cls.pipeline(_evenly(layers, numbers[0]))
        if sum(numbers) != layers:
            raise UsageError(
                f"{text!r} divides {sum(numbers)} layers, but the model has {layers}.", param="split"
            )
        return cls.pipeline(numbers)

    def layers_of(self, rank: int) -> range:
        """The layers that `rank` holds; of a tensor split, a UsageError: there every rank holds all."""
        if self.mode != "pipeline":
            raise UsageError("A tensor split has no layers of one rank: every rank holds all of them.")
        return range(self.bounds[rank], self.bounds[rank + 1])

    def __str__(self) -> str:
        if self.mode == "tensor":
            return f"tensor:{self.size}"
        return "pipeline:" + ",".join(str(len(self.layers_of(rank))) for rank in range(self.size))


def _evenly(layers: int, ranks: int) -> list[int]:
    """Layers by rank, differing by at most one, the longer ones first."""
    if not 1 <= ranks <= layers:
        raise UsageError(f"{layers} layers cannot be divided over {ranks} ranks.", param="split")
    return [layers // ranks + (rank < layers % ranks) for rank in range(ranks)]
