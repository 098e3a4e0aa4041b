"""From the word after `--model` to files on this disk.

Knows: the order in which a name is understood: an existing path, an alias, a Hub name
(`org/name[@revision]`, `org/name:FILE.gguf`). Does not know: what is in the files.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from mlxserve.errors import ModelInvalid, ModelNotFound
from mlxserve.models.aliases import HUB, PACKAGED, is_alias, near
from mlxserve.models.cached import HubName, choose_gguf, find, list_cached, parse_hub_name
from mlxserve.models.files import CONFIG, only_pickles, pickles
from mlxserve.models.transfer import Progress

Kind = Literal["folder", "gguf"]
Origin = Literal["path", "alias", "hub", "package"]


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Where a model is: a folder in Hugging Face or MLX layout, or the (first part of a) GGUF file.

    `name` is what to call it to people, `origin` how it was found.
    """

    kind: Kind
    path: Path
    name: str
    origin: Origin


def resolve(name: str, progress: Progress | None = None) -> ModelFiles:
    """Find the model that `name` means, fetching it from the Hub if it is not on this disk.

    `progress` is called with (bytes present, bytes in all) while fetching; None draws a bar on standard
    error. Raises ModelNotFound, with near matches, for a name that means nothing, and whatever
    `hub.pull` raises for one that cannot be fetched.
    """
    found = look_for(name)
    if isinstance(found, ModelFiles):
        return found
    from mlxserve.models.hub import pull

    return _fetched(name, pull(found, progress))


def look_for(name: str) -> ModelFiles | HubName:
    """The model that `name` means if it is complete on this disk, else where it is on the Hub.

    Raises ModelNotFound for a name that means neither.
    """
    found = find_local(name)
    if found:
        return found
    hub_name = parse_hub_name(HUB.get(name.lower(), name))
    if hub_name is None or _is_surely_path(name):
        raise _nothing(name)
    path = find(hub_name)
    return _fetched(name, path) if path else hub_name


def _fetched(name: str, path: Path) -> ModelFiles:
    return ModelFiles("folder" if path.is_dir() else "gguf", path, name, "alias" if is_alias(name) else "hub")


def find_local(name: str) -> ModelFiles | None:
    """What `name` means without the Hub: a path or a model in an installed package; None otherwise.

    Raises ModelInvalid for a path that exists and holds no model.
    """
    path = Path(name).expanduser()
    if name and path.exists() and not (is_alias(name) and _holds_no_model(path)):
        return ModelFiles(*_look_at(path), path.resolve().name, "path")
    packaged = packaged_file(name)
    return ModelFiles("gguf", packaged, name, "package") if packaged else None


def packaged_file(alias: str) -> Path | None:
    """The model file inside the Python package that an alias names, if that package is installed."""
    package, file = PACKAGED.get(alias.lower(), ("", ""))
    spec = find_spec(package) if package else None
    places = spec.submodule_search_locations if spec else None
    return next((Path(place) / file for place in places or () if (Path(place) / file).is_file()), None)


def _look_at(path: Path) -> tuple[Kind, Path]:
    """What a path that exists is. Raises ModelInvalid, saying what was expected, for anything else."""
    if path.is_dir():
        return _look_into(path)
    if path.suffix.lower() == ".gguf" or _starts_like_gguf(path):
        return "gguf", path
    if path.suffix == ".safetensors":
        raise ModelInvalid(f"{path} is one file of a model; name its folder, {path.parent}.")
    if pickles([path.name]):
        raise only_pickles(path.name, str(path))
    raise ModelInvalid(f"{path} is neither a GGUF file nor a model folder.")


def _look_into(folder: Path) -> tuple[Kind, Path]:
    if (folder / CONFIG).is_file():
        return "folder", folder
    names = sorted(path.name for path in folder.iterdir())
    if ggufs := choose_gguf(names, None, str(folder)):
        return "gguf", folder / ggufs[0]
    raise ModelInvalid(f"{folder} holds no model: neither {CONFIG} nor a GGUF file.", param=CONFIG)


def _holds_no_model(path: Path) -> bool:
    """True for a folder that only happens to be called like an alias."""
    return path.is_dir() and not (path / CONFIG).exists() and not any(path.glob("*.gguf"))


def _starts_like_gguf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


def _is_surely_path(name: str) -> bool:
    return name.startswith(("/", "./", "../", "~")) or (name.lower().endswith(".gguf") and ":" not in name)


def _nothing(name: str) -> ModelNotFound:
    if _is_surely_path(name) or "/" in name:
        return ModelNotFound(f"There is no file or folder {name}.", param="model")
    close = near(name, [model.name for model in list_cached()])
    hint = f"did you mean {' or '.join(close)}?" if close else "'mlxserve models list' shows what there is."
    return ModelNotFound(
        f"There is no model {name!r}: it is no path, no alias and no Hub name (org/name); {hint}",
        param="model",
    )
