"""What a model is, before it is loaded or even fetched.

Knows: how to get configuration and sizes from a folder, a GGUF file or a repository that is still on
the Hub (only configuration and headers travel). Does not know: the machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mlxserve.config import LoadConfig
from mlxserve.models.cached import HubName
from mlxserve.models.files import TensorInfo, inspect, is_defined, read_config
from mlxserve.models.kvlayout import text_config
from mlxserve.models.memory import Weights, weigh
from mlxserve.models.resolve import ModelFiles, look_for


@dataclass(frozen=True, slots=True)
class Description:
    """A model's name, where it is (None while it is only on the Hub), configuration and weights.

    `types` counts tensors by the type they are stored in, the commonest first.
    """

    name: str
    path: Path | None
    config: Mapping[str, Any]
    weights: Weights
    types: dict[str, int]

    @property
    def architecture(self) -> str:
        return str(text_config(self.config).get("model_type"))

    @property
    def context(self) -> int:
        """Tokens that a sequence may hold if nothing else is asked for."""
        from mlxserve.models.load import context_of

        return context_of(self.config, LoadConfig())

    @property
    def float_bytes(self) -> int:
        """Bytes of the floats that an accelerator computes with: as most are stored, 2 in a packed model."""
        return 4 if set(self.types) == {"F32"} and self.weights.bits_per_weight == 32 else 2

    @property
    def is_defined(self) -> bool:
        """True if the installed mlx-lm has a definition for it."""
        return is_defined(self.config)


def describe(name: str) -> Description:
    """Describe what `name` means, without fetching any weights. Raises as `resolve.resolve` does."""
    found = look_for(name)
    return describe_files(found) if isinstance(found, ModelFiles) else _describe_remote(name, found)


def describe_files(files: ModelFiles) -> Description:
    """Describe a model on this disk; only headers are read."""
    if files.kind == "gguf":
        from mlxserve.models.gguf import open_gguf

        file = open_gguf(files.path)
        weights = Weights(file.parameters, file.size_in_bytes)
        return Description(files.name, files.path, file.config(), weights, dict(file.types))
    folder = inspect(files.path)
    weights = weigh(folder.tensors, folder.config)
    return Description(files.name, files.path, folder.config, weights, _types(folder.tensors))


def _describe_remote(name: str, hub_name: HubName) -> Description:
    from mlxserve.models.hub import peek

    with TemporaryDirectory() as scratch:
        tensors = peek(hub_name, Path(scratch))
        config = read_config(Path(scratch))
    return Description(name, None, config, weigh(tensors, config), _types(tensors))


def _types(tensors: Mapping[str, TensorInfo]) -> dict[str, int]:
    return dict(Counter(tensor.dtype for tensor in tensors.values()).most_common())
