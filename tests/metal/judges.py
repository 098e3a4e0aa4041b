"""Which tests judge the mutants of which kernel file: a few small runs that together reach all its text.

The paged attention kernels have judges of their own, beside their tests: tests/kernels_metal/test_paged_mutants.py.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np

Test = Callable[[], None]


def call(module: str, name: str, *arguments: Any) -> Test:
    """The test function `name` of tests/kernels_metal/`module`.py with its parameters."""

    def test() -> None:
        getattr(importlib.import_module(f"tests.kernels_metal.{module}"), name)(*arguments)

    return test


def blocks(name: str, *arguments: Any) -> Test:
    return call("test_gguf_blocks", name, *arguments)


def mixture(name: str, *arguments: Any) -> Test:
    return call("test_moe_kernels", name, *arguments)


def unpacked(kind: str) -> list[Test]:
    """A format, by a product in float32: any wrong weight shows."""
    return [blocks("check_matrix_vector", kind, mx.float32, 2, "forward", 768)]


def held(kind: str) -> list[Test]:
    """A format whose units share words, by a product of matrices: those wait in registers."""
    return [blocks("test_matrix_matrix", kind, mx.float16, 3, "forward")]


def sampled(name: str, *arguments: Any) -> Test:
    return call("test_sample", name, *arguments)


# Three threadgroups or more along each axis, the last one partly filled.
GATHERED_VECTOR = [blocks("test_gathered_matrix_vector", mx.float16, 3, "reverse", 21)]
GATHERED_MATRIX = [blocks("test_gathered_matrix_matrix", "Q4_K", mx.float16, "reverse", 140)]
VECTORS = [
    blocks("check_matrix_vector", "Q6_K", mx.float16, 3, "reverse", 1280),
    blocks("check_matrix_vector", "Q5_1", mx.float32, 17, "rotating", 96, 21),
]
MATRICES = [
    blocks("test_matrix_matrix", "Q6_K", mx.float16, 3, "reverse"),
    blocks("test_matrix_matrix", "Q5_1", mx.float32, 38, "rotating", 140),
]
GATE_UP = [
    mixture("test_gate_up_affine", 4, mx.float16, 3, "reverse", 21),
    mixture("test_gate_up_blocks", "Q6_K"),
]
DOWN = [
    mixture("test_down", 4, mx.float16, 3, "reverse", 21),
    mixture("test_down", "Q4_K", mx.float32, 1, "forward"),
]
SAMPLES = [
    sampled("test_kernel_draws", mx.float16, 3, "reverse", 1025),
    sampled("test_kernel_draws", mx.float32, 9, "rotating", 3001),
    sampled("test_kernel_searches_any_logits", 1 + np.arange(1300) * 2.0**-23),
    sampled("test_kernel_searches_any_logits", -np.geomspace(1e-30, 1e3, 1300)),
]

JUDGES: dict[str, list[Test]] = {
    "formats/nibbles.metal": [test for kind in ("Q4_0", "Q4_1", "Q5_0", "Q5_1") for test in unpacked(kind)],
    "formats/q8_0.metal": unpacked("Q8_0"),
    "formats/q2_k.metal": unpacked("Q2_K"),
    "formats/q3_k.metal": unpacked("Q3_K"),
    "formats/q4_k.metal": unpacked("Q4_K") + unpacked("Q5_K") + held("Q5_K"),
    "formats/q6_k.metal": unpacked("Q6_K"),
    "formats/iq4.metal": unpacked("IQ4_NL") + unpacked("IQ4_XS"),
    "formats/blocks.metal": [*unpacked("Q3_K"), *GATHERED_VECTOR, *held("Q3_K")],
    "formats/affine.metal": [
        mixture("test_gate_up_affine", bits, mx.float16, 3, "reverse") for bits in (2, 3, 4, 6, 8)
    ],
    "matvec.metal": VECTORS,
    "matmat.metal": MATRICES,
    "gguf_qmv.metal": VECTORS,
    "gguf_qmm.metal": MATRICES,
    "gguf_gather_qmv.metal": GATHERED_VECTOR,
    "gguf_gather_qmm.metal": GATHERED_MATRIX,
    "activations.metal": GATE_UP,
    "moe_gate_up.metal": GATE_UP,
    "moe_down.metal": DOWN,
    "ranking.metal": SAMPLES,
    "sample.metal": SAMPLES,
}


def judge_all(name: str) -> None:
    """Run every test that judges the file `name` of kernels_metal/."""
    for test in JUDGES[name]:
        test()
