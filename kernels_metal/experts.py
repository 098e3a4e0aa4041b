"""One projection of all experts of a mixture, as its weights lie in memory.

Knows: two ways of storing them, MLX's affine words and GGUF blocks, and for each how to multiply in plain
MLX and how a fused kernel reaches the weights. Knows nothing of routing.

Both answer the same questions: `kind`, `rows`, `columns`, `product`, and for the kernels `inputs` and
`template`. What a kernel's text needs depends on `kind` alone: `header` defines
MATRIX(name, expert, rows, row, columns), which finds a row of the operand `name`.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from mlxserve.kernels_metal import gguf_blocks, gguf_reference
from mlxserve.kernels_metal.gguf_formats import find_format
from mlxserve.kernels_metal.source import read

AFFINE = "affine"
AFFINE_BITS = (2, 3, 4, 5, 6, 8)
AFFINE_GROUPS = (32, 64, 128)
# MLX passes smaller inputs to a kernel in another address space, which helpers here do not take.
LEAST_ELEMENTS = 8


@dataclass(frozen=True, slots=True, eq=False)
class AffineExperts:
    """As mx.quantize stores it: words uint32 [E, N, K * bits / 32]; scales, biases [E, N, K / group_size]."""

    words: mx.array
    scales: mx.array
    biases: mx.array
    group_size: int
    bits: int

    def __post_init__(self) -> None:
        if self.bits not in AFFINE_BITS or self.group_size not in AFFINE_GROUPS:
            raise ValueError(f"no kernel reads {self.bits} bits in groups of {self.group_size}")
        if self.scales.size < LEAST_ELEMENTS:
            raise ValueError(
                f"a kernel's weights have at least {LEAST_ELEMENTS} scales, not {self.scales.size}"
            )
        groups = self.columns // self.group_size
        if self.scales.shape != (*self.words.shape[:2], groups) or self.biases.shape != self.scales.shape:
            raise ValueError(f"words {self.words.shape} do not go with scales {self.scales.shape}")

    @property
    def rows(self) -> int:
        return self.words.shape[1]

    @property
    def columns(self) -> int:
        return self.words.shape[2] * 32 // self.bits

    @property
    def kind(self) -> str:
        """What a kernel must be made for."""
        return AFFINE

    def product(self, x: mx.array, indices: mx.array) -> mx.array:
        """Row p // (P / X) of x [X, K] times expert indices[p] [P] -> [P, N]."""
        x = mx.repeat(x, indices.shape[0] // x.shape[0], axis=0)[:, None]
        product = mx.gather_qmm(
            x,
            self.words,
            self.scales,
            self.biases,
            rhs_indices=indices,
            transpose=True,
            group_size=self.group_size,
            bits=self.bits,
        )
        return product[:, 0]

    def inputs(self) -> list[mx.array]:
        return [self.words, self.scales, self.biases]

    def template(self) -> list[tuple[str, int]]:
        return [("BITS", self.bits), ("GROUP", self.group_size)]


@dataclass(frozen=True, slots=True, eq=False)
class BlockExperts:
    """As a GGUF file stores it: blocks uint8 [E, N, row bytes] of format `kind`."""

    blocks: mx.array
    kind: str

    @property
    def rows(self) -> int:
        return self.blocks.shape[1]

    @property
    def columns(self) -> int:
        return find_format(self.kind).row_weights(self.blocks.shape[2])

    def product(self, x: mx.array, indices: mx.array) -> mx.array:
        """Row p // (P / X) of x [X, K] times expert indices[p] [P] -> [P, N]."""
        return gguf_reference.gather_matmul(x, self.blocks, indices, self.kind)

    def inputs(self) -> list[mx.array]:
        return [self.blocks.view(mx.uint16)]

    def template(self) -> list[tuple[str, int]]:
        return []


Experts = AffineExperts | BlockExperts


def input_names(kind: str, name: str) -> list[str]:
    """The kernel inputs that make up operand `name`, in the order of `inputs()`."""
    return [name, f"{name}_scales", f"{name}_biases"] if kind == AFFINE else [name]


def header(kind: str) -> str:
    """Helper text that defines MATRIX for weights stored as `kind`."""
    if kind == AFFINE:
        text = read("matvec", "formats/affine")
        row = "affine_rows<BITS, GROUP>(NAME, NAME##_scales, NAME##_biases, EXPERT, ROWS, ROW, COLUMNS)"
    else:
        text = gguf_blocks.header(kind)
        row = "block_rows<Block>(NAME, EXPERT, ROWS, ROW, COLUMNS)"
    return f"{text}\n#define MATRIX(NAME, EXPERT, ROWS, ROW, COLUMNS) {row}\n"
