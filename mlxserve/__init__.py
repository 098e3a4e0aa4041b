"""mlxserve: run, serve and fine-tune language models on Apple Silicon.

Knows: the public names, and that a fast BLAS must be in the process before MLX. Names are resolved on
first use, so that `import mlxserve` and `mlxserve --help` load neither MLX nor a tokenizer library.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from mlxserve import blas
from mlxserve.errors import MlxServeError
from mlxserve.request import Output, SamplingParams

__version__ = "0.1.0"
__all__ = ["AsyncLLM", "LLM", "MlxServeError", "Output", "SamplingParams", "__version__"]

_LAZY = {"AsyncLLM": "mlxserve.engine.aio", "LLM": "mlxserve.engine.llm"}

blas.preload()


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'mlxserve' has no attribute {name!r}")
