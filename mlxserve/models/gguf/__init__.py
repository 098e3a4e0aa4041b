"""GGUF model files: opened, described, and turned into an mlx-lm configuration and weights.

Knows: the whole of a model's file, in one object. Knows nothing of tokenizers (`text/gguf_vocab.py` builds
one from `metadata`), of building models (`models/load.py`), or of where files come from.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlxserve.models.gguf.architectures import find_architecture
from mlxserve.models.gguf.config import to_config
from mlxserve.models.gguf.file import Container, TensorInfo, is_gguf, read_container
from mlxserve.models.gguf.weights import Mode, Weights, read_weights

__all__ = ["GGUFFile", "TensorInfo", "Weights", "is_gguf", "open_gguf"]

# Recommended sampling in a file -> the names of generation_config.json.
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


class GGUFFile:
    """One GGUF model, all its parts mapped; nothing but the header has been read.

    metadata: the first part's, as Python values. tensors: name -> TensorInfo. paths: the parts, in order.
    """

    def __init__(self, container: Container) -> None:
        self.paths: tuple[Path, ...] = container.paths
        self.metadata: Mapping[str, Any] = container.metadata
        self.tensors: Mapping[str, TensorInfo] = container.tensors

    def config(self) -> dict[str, Any]:
        """The configuration in Hugging Face's terms. Raises ModelUnsupported or ModelInvalid."""
        return to_config(self.metadata, self.tensors)

    def weights(self, dtype: mx.Dtype = mx.float32, mode: Mode = "float") -> Weights:
        """Evaluated weights by parameter name, see `read_weights`. Raises ModelUnsupported or ModelInvalid.

        The definition's `sanitize` must still run on them, as it does for any other file.
        """
        row = find_architecture(self.metadata)
        return read_weights(self.tensors, row, self.config(), dtype=dtype, mode=mode)

    def generation_defaults(self) -> dict[str, Any]:
        """Sampling settings that the file recommends, under the names of generation_config.json."""
        found = {field: self.metadata.get(f"general.sampling.{name}") for name, field in _SAMPLING.items()}
        return {field: value for field, value in found.items() if value is not None}

    @property
    def parameters(self) -> int:
        """How many numbers the tensors hold."""
        return sum(prod(tensor.shape) for tensor in self.tensors.values())

    @property
    def size_in_bytes(self) -> int:
        """Bytes of all tensors as stored."""
        return sum(tensor.data.nbytes for tensor in self.tensors.values())

    @property
    def types(self) -> dict[str, int]:
        """How many tensors there are of each type, the commonest first: {"Q4_1": 210, "F32": 61}."""
        return dict(Counter(tensor.type.name for tensor in self.tensors.values()).most_common())


def open_gguf(path: str | Path) -> GGUFFile:
    """Open a `.gguf` file, and its other parts if it is the first of a split model.

    Raises ModelNotFound, ModelInvalid (not GGUF, cut short, a later part, a part missing) or
    ModelUnsupported (a version of the format that cannot be read); each names the file.
    """
    return GGUFFile(read_container(Path(path)))
