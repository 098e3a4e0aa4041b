"""The standard Hugging Face cache on this disk: what of it is complete, and taking things out.

Knows: the cache's documented layout, `models--ORG--NAME/{blobs,refs,snapshots}`
(https://huggingface.co/docs/huggingface_hub/guides/manage-cache). Never uses the network.
Does not know: how files get there (`hub`).
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mlxserve.errors import ModelInvalid, ModelNotFound, UsageError
from mlxserve.models.files import choose_weights, weight_files

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


@dataclass(frozen=True, slots=True)
class HubName:
    """`org/name`, with a revision (`@v1.0`) and a GGUF file or its quantisation (`:Q4_K_M`) if given."""

    repo: str
    revision: str | None = None
    file: str | None = None

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        return f"{self.repo}{revision}{f':{self.file}' if self.file else ''}"


_HUB_NAME = re.compile(
    r"(?:https?://)?(?:huggingface\.co/|hf\.co/)?"
    r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)"
    r"(?:@(?P<revision>[\w./-]+))?"
    r"(?::(?P<file>[^:]+))?/?"
)


def parse_hub_name(name: str) -> HubName | None:
    """`org/name[@revision][:FILE.gguf]` in its parts, also with the Hub's address in front; else None."""
    match = _HUB_NAME.fullmatch(name)
    if match is None or ".." in name:
        return None
    return HubName(match["repo"], match["revision"], match["file"])


def cache_folder() -> Path:
    """Where the cache lies: HF_HUB_CACHE, HF_HOME or the default."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def repo_folder(repo: str) -> Path:
    return cache_folder() / f"models--{repo.replace('/', '--')}"


def snapshot(repo: str, revision: str | None = None) -> Path | None:
    """The folder of a revision's files, complete or not; None if there is nothing of it."""
    folder = repo_folder(repo)
    ref = folder / "refs" / (revision or "main")
    commit = ref.read_text().strip() if ref.is_file() else revision
    path = folder / "snapshots" / commit if commit else None
    return path if path and path.is_dir() else None


def find(name: HubName) -> Path | None:
    """The complete folder or GGUF file that `name` means, if it is in the cache; None otherwise."""
    folder = snapshot(name.repo, name.revision)
    if folder is None:
        return None
    if name.file is None and is_complete(folder):
        return folder
    present = files_under(folder)
    try:
        parts = choose_gguf(present, name.file, str(name))
    except (UsageError, ModelInvalid):
        return None
    return folder / parts[0] if parts and set(parts) <= set(present) else None


def is_complete(folder: Path) -> bool:
    """True if all weights of a safetensors model are there, and a tokenizer.

    Weights are fetched after everything else, so that where they are whole the rest is too.
    """
    present = {path.name for path in folder.iterdir()}
    if not choose_weights(present, None) or "config.json" not in present:
        return False
    try:
        weight_files(folder)
    except ModelInvalid:
        return False
    return any(name in present for name in TOKENIZER_FILES) or any(n.endswith(".tiktoken") for n in present)


def files_under(folder: Path) -> list[str]:
    """Every file below `folder` that exists, as a relative path with slashes."""
    paths = (path for path in folder.rglob("*") if path.is_file())
    return sorted(path.relative_to(folder).as_posix() for path in paths)


def choose_gguf(names: Iterable[str], wanted: str | None, shown: str) -> list[str]:
    """The GGUF file among `names` that is wanted, as the list of its parts (one for a file not split).

    `wanted` is a path, a file name or a quantisation such as `Q4_K_M`; None takes the only one there is.
    Raises UsageError when several fit, naming them, or when a later part is named, and ModelInvalid when
    none fits. An empty list means that there are no GGUF files at all and none was asked for.
    """
    models = [name for name in names if name.lower().endswith(".gguf") and "mmproj" not in name.lower()]
    if wanted is None and not models:
        return []
    fitting = [name for name in models if wanted is None or _is_wanted(name, wanted)]
    heads = [name for name in fitting if _part_number(name) == 1]
    if not fitting:
        raise ModelInvalid(f"There is no {wanted!r} in {shown}; it has {_offer(models)}.", param=wanted)
    if not heads:
        raise UsageError(
            f"{fitting[0]} is not the first part of its model; name part 00001 of it.", param=wanted
        )
    if len(heads) > 1:
        base = shown.split(":")[0]
        raise UsageError(
            f"{base} has several GGUF files; name one, as in '{base}:{heads[0]}': {_offer(heads)}."
        )
    return parts_of(heads[0])


def _is_wanted(name: str, wanted: str) -> bool:
    file = name.rsplit("/", 1)[-1]
    if wanted.lower().endswith(".gguf"):
        return wanted in (name, file)
    stem = _PART.sub("", file).removesuffix(".gguf")
    return re.search(rf"(^|[-._]){re.escape(wanted)}$", stem, re.IGNORECASE) is not None


def _part_number(name: str) -> int:
    match = _PART.search(name)
    return int(match[1]) if match else 1


def parts_of(first: str) -> list[str]:
    """All parts of a split GGUF, given its first one; the file itself if it is not split."""
    match = _PART.search(first)
    if match is None:
        return [first]
    stem, count = first[: match.start()], int(match[2])
    return [f"{stem}-{number:05d}-of-{count:05d}.gguf" for number in range(1, count + 1)]


def _offer(names: Sequence[str]) -> str:
    heads = [name for name in names if _part_number(name) == 1]
    return (", ".join(heads[:8]) + (" and more" if len(heads) > 8 else "")) or "no GGUF files"


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A model repository in the cache. `kind`: 'safetensors', 'gguf' or 'incomplete'."""

    name: str
    kind: str
    path: Path
    nbytes: int


def list_cached() -> list[CachedModel]:
    """Models in the cache, by name: one row a repository in safetensors, one a GGUF file."""
    root = cache_folder()
    repos = sorted(root.glob("models--*--*")) if root.is_dir() else []
    return [model for repo in repos for model in _models_of(repo)]


def _models_of(repo: Path) -> list[CachedModel]:
    name = repo.name.removeprefix("models--").replace("--", "/", 1)
    folder = snapshot(name) or _newest_snapshot(repo)
    if folder is None:
        return [CachedModel(name, "incomplete", repo, _size(repo / "blobs"))]
    present = files_under(folder)
    ggufs = [file for file in present if file.lower().endswith(".gguf") and _part_number(file) == 1]
    rows = [_gguf_row(name, folder, file, present) for file in ggufs]
    if is_complete(folder):
        rows.append(CachedModel(name, "safetensors", folder, _size(folder)))
    elif not rows and (folder / "config.json").exists():
        rows.append(CachedModel(name, "incomplete", folder, _size(repo / "blobs")))
    return rows


def _gguf_row(name: str, folder: Path, file: str, present: list[str]) -> CachedModel:
    parts = parts_of(file)
    nbytes = sum((folder / part).stat().st_size for part in parts if part in present)
    kind = "gguf" if set(parts) <= set(present) else "incomplete"
    return CachedModel(f"{name}:{file}", kind, folder / file, nbytes)


def _newest_snapshot(repo: Path) -> Path | None:
    folders = [path for path in (repo / "snapshots").glob("*") if path.is_dir()]
    return max(folders, key=lambda path: path.stat().st_mtime, default=None)


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def remove(name: HubName) -> int:
    """Take a repository, or one GGUF file of it, out of the cache; the bytes that became free.

    Files that other revisions or repositories share stay. Raises ModelNotFound when the cache holds
    nothing of it and UsageError where the named GGUF file is not the only one that fits.
    """
    from huggingface_hub import scan_cache_dir

    folder = repo_folder(name.repo)
    if not folder.is_dir():
        raise ModelNotFound(f"There is nothing of {name} in the cache ({cache_folder()}).")
    cache = scan_cache_dir(cache_folder())
    revisions = [r for repo in cache.repos if repo.repo_path == folder.resolve() for r in repo.revisions]
    files = [file for revision in revisions for file in revision.files]
    if name.file:
        wanted = {part for revision in revisions for part in _gguf_parts(revision.snapshot_path, name)}
        files = [file for file in files if file.file_path in wanted]
    strategy = cache.delete_files(*files)
    freed = strategy.expected_freed_size
    strategy.execute()
    if not name.file:  # what is left: links, and half-arrived files, which no revision lists
        freed += sum(path.stat().st_size for path in folder.glob("blobs/*.incomplete"))
        shutil.rmtree(folder)
    return freed


def _gguf_parts(folder: Path, name: HubName) -> list[Path]:
    return [folder / part for part in choose_gguf(files_under(folder), name.file, str(name))]
