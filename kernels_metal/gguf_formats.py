"""The block formats of GGUF files that run as they lie in the file: names and sizes.

Knows: how many weights and bytes a block has. Does not know: what the bytes mean (gguf_reference and
formats/*.metal), nor how a file is read.

A matrix [N, K] is stored as N rows of K / weights blocks, so K is a multiple of the block's weights.
Source: ggml's block definitions, as restated by the PyPI package `gguf` (gguf.constants, gguf.quants).
"""

from __future__ import annotations

from dataclasses import dataclass

from mlxserve.errors import ModelInvalid, ModelUnsupported


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """One block type: `name` as in GGUF, `weights` in a block and the `size_bytes` they take."""

    name: str
    weights: int
    size_bytes: int

    def row_bytes(self, weights: int) -> int:
        """Bytes of a row of so many weights. Raises ModelInvalid if blocks do not divide it."""
        if weights % self.weights:
            raise ModelInvalid(
                f"{self.name} stores blocks of {self.weights} weights; a row of {weights} does not divide."
            )
        return weights // self.weights * self.size_bytes

    def row_weights(self, row_bytes: int) -> int:
        """Weights in a row of so many bytes. Raises ModelInvalid if blocks do not divide it."""
        if row_bytes % self.size_bytes or not row_bytes:
            raise ModelInvalid(
                f"{self.name} stores blocks of {self.size_bytes} bytes; a row of {row_bytes} does not divide."
            )
        return row_bytes // self.size_bytes * self.weights


FORMATS = {
    item.name: item
    for item in (
        BlockFormat("Q4_0", 32, 18),
        BlockFormat("Q4_1", 32, 20),
        BlockFormat("Q5_0", 32, 22),
        BlockFormat("Q5_1", 32, 24),
        BlockFormat("Q8_0", 32, 34),
        BlockFormat("Q2_K", 256, 84),
        BlockFormat("Q3_K", 256, 110),
        BlockFormat("Q4_K", 256, 144),
        BlockFormat("Q5_K", 256, 176),
        BlockFormat("Q6_K", 256, 210),
        BlockFormat("IQ4_NL", 32, 18),
        BlockFormat("IQ4_XS", 256, 136),
    )
}


def find_format(name: str) -> BlockFormat:
    """The format called `name`, such as "Q4_K". Raises ModelUnsupported for one without a kernel."""
    if name not in FORMATS:
        raise ModelUnsupported(f"No kernel reads GGUF blocks of type {name}; known are {', '.join(FORMATS)}.")
    return FORMATS[name]
