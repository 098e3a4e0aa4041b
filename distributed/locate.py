"""Where the model that the front named lies on a rank's own host.

Knows: paths, the hostfile's folder, names on the Hub. Does not read weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from mlxserve.errors import ModelNotFound
from mlxserve.models.resolve import ModelFiles, find_local, resolve

_FROM_THE_HUB = ("hub", "alias")


def describe(files: ModelFiles) -> dict[str, str]:
    """A model as the front found it, for the other hosts."""
    return {"kind": files.kind, "path": str(files.path), "name": files.name, "origin": files.origin}


def locate(model: Mapping[str, str], folder: str) -> ModelFiles:
    """The same model here: in the host's `folder` if it has one, by its name on the Hub, else at its path.

    Raises ModelNotFound, naming the place, and what `resolve` raises.
    """
    name = model["name"]
    if folder:
        return _named(_at(Path(folder).expanduser() / Path(name).name), name)
    if model["origin"] in _FROM_THE_HUB:
        return resolve(name)
    return _named(_at(Path(model["path"])), name)


def _at(path: Path) -> ModelFiles:
    found = find_local(str(path)) if path.exists() else None
    if found is None:
        raise ModelNotFound(f"There is no model at {path} on this host.", param="model")
    return found


def _named(files: ModelFiles, name: str) -> ModelFiles:
    return ModelFiles(files.kind, files.path, name, files.origin)
