"""The same kernels on an NVIDIA GPU: their text turned into CUDA's, for `mx.fast.cuda_kernel`.

Knows: how Metal's address spaces, attributes and 0-d arguments are spelled in CUDA; prelude.cuh has its
functions. Knows nothing of what a kernel computes.

A second target for the bodies as they are, not a fast one: it lets any machine with an NVIDIA GPU or its
compiler say whether the text is right. Source of the conventions: mlx's custom kernels for both backends.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

from mlxserve.kernels_metal.source import FOLDER

THREAD_INDEX = "(threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z))"
# What a body may ask about its thread, and how CUDA finds it.
ATTRIBUTES = {
    "thread_position_in_grid": "const uint3 {} = make_uint3(blockIdx.x * blockDim.x + threadIdx.x, "
    "blockIdx.y * blockDim.y + threadIdx.y, blockIdx.z * blockDim.z + threadIdx.z);",
    "threadgroup_position_in_grid": "const uint3 {} = make_uint3(blockIdx.x, blockIdx.y, blockIdx.z);",
    "thread_position_in_threadgroup": "const uint3 {} = make_uint3(threadIdx.x, threadIdx.y, threadIdx.z);",
    "threads_per_threadgroup": "const uint3 {} = make_uint3(blockDim.x, blockDim.y, blockDim.z);",
    "threadgroups_per_grid": "const uint3 {} = make_uint3(gridDim.x, gridDim.y, gridDim.z);",
    "thread_index_in_threadgroup": f"const uint {{}} = {THREAD_INDEX};",
    "thread_index_in_simdgroup": f"const uint {{}} = {THREAD_INDEX} % 32;",
    "simdgroup_index_in_threadgroup": f"const uint {{}} = {THREAD_INDEX} / 32;",
}
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_SHARED = re.compile(r"((?:^|[;{}])\s*)threadgroup\s+((?:const\s+)?\w+\s+\w+\s*(?:\[[^;\]]*\]\s*)+;)")
_TABLE = re.compile(r"^constant\s+(?=\w+\s+\w+\[)", re.MULTILINE)
_SPACE = re.compile(r"\b(?:device|constant|threadgroup|thread)\b\s+")
_TEMPLATE = re.compile(r"\s*template\s*<")


class CudaKernel:
    """What `mx.fast.metal_kernel` returns, for CUDA: made on first call, when 0-d inputs are known."""

    def __init__(
        self,
        name: str,
        input_names: Sequence[str],
        output_names: Sequence[str],
        source: str,
        header: str = "",
    ) -> None:
        self._name, self._source, self._header = name, source, header
        self._input_names, self._output_names = list(input_names), list(output_names)
        self._made: dict[tuple[str, ...], Any] = {}

    def __call__(self, *, inputs: Sequence[Any], **call: Any) -> list[mx.array]:
        arrays = [x if isinstance(x, mx.array) else mx.array(x) for x in inputs]
        scalars = tuple(name for name, x in zip(self._input_names, arrays, strict=True) if not x.ndim)
        if scalars not in self._made:
            self._made[scalars] = mx.fast.cuda_kernel(
                name=self._name,
                input_names=self._input_names,
                output_names=self._output_names,
                source=translate_body(self._source, scalars),
                header=translate_header(self._header),
            )
        outputs: list[mx.array] = self._made[scalars](inputs=arrays, **call)
        return outputs


@contextmanager
def in_place_of_metal() -> Iterator[None]:
    """Within the block, kernels are made for CUDA. Those that were made before stay what they are."""
    fast: Any = mx.fast
    made_for_metal = fast.metal_kernel
    fast.metal_kernel = CudaKernel
    try:
        yield
    finally:
        fast.metal_kernel = made_for_metal


def translate_header(header: str) -> str:
    """The prelude, and helper functions as CUDA's."""
    return (FOLDER / "prelude.cuh").read_text() + _as_device_functions(_translate(header))


def translate_body(source: str, scalars: Sequence[str]) -> str:
    """A body as CUDA's. scalars: inputs without axes, which come as pointers and are read as values."""
    asked = [form.format(name) for name, form in ATTRIBUTES.items() if re.search(rf"\b{name}\b", source)]
    pointed = [f"const auto& pointed_{name} = *{name};" for name in scalars]
    named = [f"const auto& {name} = pointed_{name};" for name in scalars]
    return "\n".join([*asked, *pointed, "{", *named, _translate(source), "}"])


def _translate(text: str) -> str:
    text = _COMMENT.sub(lambda m: "\n" * m.group(0).count("\n"), text)
    text = text.replace("constant constexpr", "constexpr")
    text = text.replace('_Pragma("clang loop unroll(full)")', '_Pragma("unroll")')
    text = _SHARED.sub(r"\1__shared__ \2", text)
    return _SPACE.sub("", _TABLE.sub("__constant__ ", text))


def _as_device_functions(text: str) -> str:
    """`__device__` before each function, also inside structs."""
    starts, contexts, begin = [], ["file"], 0
    for at, ch in _outside_directives(text):
        if ch == "{":
            declaration = text[begin:at]
            function = contexts[-1] != "body" and re.search(r"\)\s*(?:const\s*)?$", declaration)
            if function:
                starts.append(begin + _after_template(declaration))
            struct = contexts[-1] == "file" and re.search(r"\b(?:struct|namespace)\b", declaration)
            nested = contexts[-1] == "struct" and re.search(r"\bstruct\b", declaration)
            contexts.append("struct" if struct or nested else "body")
        elif ch == "}":
            contexts.pop()
        if ch in "{};":
            begin = at + 1
    for start in reversed(starts):
        text = f"{text[:start]} __device__ {text[start:].lstrip()}"
    return text


def _outside_directives(text: str) -> list[tuple[int, str]]:
    """Braces and semicolons with their places, except on preprocessor lines."""
    marks, at = [], 0
    for line in text.splitlines(keepends=True):
        if not line.lstrip().startswith("#"):
            marks += [(at + i, ch) for i, ch in enumerate(line) if ch in "{};"]
        at += len(line)
    return marks


def _after_template(declaration: str) -> int:
    """Where a declaration goes on after its directives and `template <...>`."""
    start = 0
    for line in re.finditer(r"^\s*#.*\n", declaration, re.MULTILINE):
        start = line.end()
    found = _TEMPLATE.match(declaration, start)
    if not found:
        return start + len(declaration[start:]) - len(declaration[start:].lstrip())
    depth, at = 1, found.end()
    while depth:
        depth += {"<": 1, ">": -1}.get(declaration[at], 0)
        at += 1
    return at
