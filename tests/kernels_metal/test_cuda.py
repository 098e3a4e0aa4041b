"""The kernels' bodies as CUDA: translated, and taken by nvcc where it is installed. Nothing is run here."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxserve.kernels_metal import cuda, gguf_blocks, moe, paged_attention, sample, selftest
from mlxserve.kernels_metal.switch import KERNELS

TYPES = {
    mx.float32: "float",
    mx.float16: "__half",
    mx.bfloat16: "__nv_bfloat16",
    mx.int32: "int32_t",
    mx.uint32: "uint32_t",
    mx.uint16: "uint16_t",
    mx.uint8: "uint8_t",
}
# What MLX's own header for custom kernels on CUDA gives them, as far as bodies use it.
INCLUDES = """#include <cstdint>
struct Shape {
  int32_t held[10];
  __device__ int32_t operator[](int axis) const { return held[axis]; }
};
"""


@dataclass
class Recorded:
    """A kernel as it was made, and one call of it."""

    made: dict[str, Any]
    call: dict[str, Any]


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Recorded]]:
    """Launches are noted down, and answered with zeros."""
    found: list[Recorded] = []

    def metal_kernel(**made: Any) -> Callable[..., list[mx.array]]:
        def launch(**call: Any) -> list[mx.array]:
            found.append(Recorded(made, call))
            shapes = zip(call["output_shapes"], call["output_dtypes"], strict=True)
            return [mx.zeros(shape, dtype) for shape, dtype in shapes]

        return launch

    caches = (
        paged_attention._kernel,
        paged_attention._reduce_kernel,
        gguf_blocks._kernel,
        moe._kernel,
        sample._kernel,
    )
    monkeypatch.setattr(mx.fast, "metal_kernel", metal_kernel)
    for cached in caches:
        cached.cache_clear()
    yield found
    for cached in caches:
        cached.cache_clear()


def text(kernel: Recorded) -> str:
    """The function that MLX would hand to NVIDIA's compiler, from the bodies `cuda.py` translates."""
    arrays = [x if isinstance(x, mx.array) else mx.array(x) for x in kernel.call["inputs"]]
    names, source = kernel.made["input_names"], kernel.made["source"]
    arguments = []
    for name, array in zip(names, arrays, strict=True):
        arguments.append(f"const {TYPES[array.dtype]}* {name}")
        if array.ndim and f"{name}_shape" in source:
            arguments.append(f"const __grid_constant__ Shape {name}_shape")
    for name, dtype in zip(kernel.made["output_names"], kernel.call["output_dtypes"], strict=True):
        arguments.append(f"{TYPES[dtype]}* {name}")
    scalars = [name for name, array in zip(names, arrays, strict=True) if not array.ndim]
    return "\n".join(
        [
            INCLUDES,
            cuda.translate_header(kernel.made.get("header", "")),
            "namespace mlx::core::cu {",
            f"__global__ void {kernel.made['name']}({', '.join(arguments)}) {{",
            *[_constant(name, value) for name, value in kernel.call.get("template", [])],
            cuda.translate_body(source, scalars),
            "}",
            "}",
        ]
    )


def _constant(name: str, value: Any) -> str:
    if isinstance(value, mx.Dtype):
        return f"using {name} = {TYPES[value]};"
    kind = "bool" if isinstance(value, bool) else "int"
    return f"constexpr {kind} {name} = {str(value).lower()};"


def launches(recorded: list[Recorded], kernel: str) -> list[Recorded]:
    """What the self-test's small cases of one kernel launch, each kernel once."""
    for case in selftest.cases(False, frozenset({kernel})):
        case.kernel_call(*case.operands)
    if kernel == "paged_decode":
        paged_attention.reduce(
            mx.zeros((1, 4, 2, 64)), mx.zeros((1, 4, 2)), mx.zeros((1, 4, 2)), None, mx.float16
        )
    return list({launch.made["name"]: launch for launch in recorded}.values())


@pytest.mark.parametrize("kernel", KERNELS)
def test_nvcc_takes_the_bodies(kernel: str, recorded: list[Recorded], tmp_path: Path) -> None:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("nvcc is not installed")
    files = []
    for launch in launches(recorded, kernel):
        files.append(tmp_path / f"{launch.made['name']}.cu")
        files[-1].write_text(text(launch))
    assert files
    command = [nvcc, "-std=c++17", "-arch=sm_90", "-G", "-ptx", *map(str, files)]  # -G: no optimisation
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert all(".visible .entry" in file.with_suffix(".ptx").read_text() for file in files)


def test_no_word_of_metal_is_left(recorded: list[Recorded]) -> None:
    for kernel in KERNELS:
        for launch in launches(recorded, kernel):
            code = text(launch).split("namespace mlx::core::cu")[1]
            assert not re.search(r"\b(?:device|constant|threadgroup|thread)\s", code)


def test_functions_become_device_functions_and_blocks_do_not() -> None:
    header = """#define LOADER Pages<T>{k}
template <typename T, int N>
struct Pages {
  const device T* values;
  struct Row { int start; };
  Row row(const long i) const {
    if (i > 0) { return {1}; }
    return {0};
  }
};
constant float LEVELS[2] = {0.0f, 1.0f};
inline int half_of(const int n) { for (int i = 0; i < 1; i++) { } return n / 2; }  // halves
"""
    lines = cuda.translate_header(header).splitlines()[-12:]
    assert [line for line in lines if "__device__" in line] == [
        "   __device__ Row row(const long i) const {",
        " __device__ inline int half_of(const int n) { for (int i = 0; i < 1; i++) { } return n / 2; }  ",
    ]
    assert "__constant__ float LEVELS[2] = {0.0f, 1.0f};" in lines
    assert "  const T* values;" in lines


def test_arguments_without_axes_are_read_as_values() -> None:
    body = cuda.translate_body(
        "threadgroup float tile[4]; y[0] = x[thread_index_in_simdgroup] * scale;", ["scale"]
    )
    assert body.splitlines() == [
        f"const uint thread_index_in_simdgroup = {cuda.THREAD_INDEX} % 32;",
        "const auto& pointed_scale = *scale;",
        "{",
        "const auto& scale = pointed_scale;",
        "__shared__ float tile[4]; y[0] = x[thread_index_in_simdgroup] * scale;",
        "}",
    ]


def test_a_kernel_is_made_once_for_the_arguments_it_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def cuda_kernel(*, source: str, **rest: Any) -> Callable[..., list[mx.array]]:
        made.append(source)
        return lambda **call: [mx.array(len(call["inputs"]))]

    monkeypatch.setattr(mx.fast, "cuda_kernel", cuda_kernel)
    kernel = cuda.CudaKernel("scaled", ["x", "scale"], ["y"], "y[0] = x[0] * scale;")
    for _ in range(2):
        assert kernel(inputs=[mx.ones((8,)), 2.0])[0].item() == 2
    assert len(made) == 1 and "pointed_scale = *scale" in made[0]


def test_kernels_are_made_for_cuda_within_the_block() -> None:
    before = mx.fast.metal_kernel
    with cuda.in_place_of_metal():
        made = mx.fast.metal_kernel(name="copy", input_names=["x"], output_names=["y"], source="y[0] = x[0];")
        assert isinstance(made, cuda.CudaKernel)
    assert mx.fast.metal_kernel is before
