"""Where the model that the front named lies on a rank's own host.

Knows: paths, the hostfile's folder, names on the Hub. Does not read weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlxserve.config import LoadConfig
from mlxserve.distributed.load import weights_by_rank
from mlxserve.distributed.split import Split
from mlxserve.errors import ModelNotFound
from mlxserve.models.files import TensorInfo, read_config
from mlxserve.models.hub import pull_part
from mlxserve.models.resolve import ModelFiles, find_local, look_for

PLAIN = LoadConfig()
_FROM_THE_HUB = ("hub", "alias")


def describe(files: ModelFiles) -> dict[str, str]:
    """A model as the front found it, for the other hosts."""
    return {"kind": files.kind, "path": str(files.path), "name": files.name, "origin": files.origin}


def locate(
    model: Mapping[str, str], folder: str, split: str, rank: int, load: LoadConfig = PLAIN
) -> ModelFiles:
    """The same model here: in the host's `folder` if it has one, by its name on the Hub, else at its path.

    From the Hub only the files are fetched that hold bytes of this rank. Raises ModelNotFound, naming the
    place, and what fetching raises.
    """
    name = model["name"]
    if folder:
        return _named(_at(Path(folder).expanduser() / Path(name).name), name)
    if model["origin"] not in _FROM_THE_HUB:
        return _named(_at(Path(model["path"])), name)
    found = look_for(name)
    if isinstance(found, ModelFiles):
        return found

    def choose(here: Path, tensors: dict[str, TensorInfo]) -> list[str]:
        config = read_config(here)
        return weights_by_rank(config, tensors, Split.parse(split, layers_of(config)), load)[rank]

    return ModelFiles("folder", pull_part(found, choose), name, "hub")


def layers_of(config: Mapping[str, Any]) -> int:
    """How many layers a model's configuration names."""
    return int((config.get("text_config") or config).get("num_hidden_layers") or 0)


def _at(path: Path) -> ModelFiles:
    found = find_local(str(path)) if path.exists() else None
    if found is None:
        raise ModelNotFound(f"There is no model at {path} on this host.", param="model")
    return found


def _named(files: ModelFiles, name: str) -> ModelFiles:
    return ModelFiles(files.kind, files.path, name, files.origin)
