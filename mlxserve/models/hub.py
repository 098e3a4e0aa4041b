"""Models from the Hugging Face Hub into the standard cache.

Knows: which files of a repository a model needs, in which order they are fetched, and what each
refusal of the Hub means for a person. Requests, login, endpoint and cache layout are huggingface_hub's;
large files go through `transfer`, so that they resume in a later run, and land where huggingface_hub
would have put them.
Does not know: what is in the files, beyond names and the index.

Order: small files, then weights, and only then the reference (`main` -> commit) that makes the
revision findable. What was broken off is therefore never taken for a model.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from fnmatch import fnmatch
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxserve.errors import (
    DoesNotFit,
    MlxServeError,
    ModelError,
    ModelGated,
    ModelInvalid,
    ModelNotFound,
    ModelUnsupported,
)
from mlxserve.models.cached import HubName, cache_folder, choose_gguf, repo_folder, snapshot
from mlxserve.models.files import (
    CONFIG,
    INDEX,
    TensorInfo,
    choose_weights,
    is_nested,
    only_pickles,
    pickles,
    read_index,
)
from mlxserve.models.memory import show_bytes
from mlxserve.models.progress import download_bar
from mlxserve.models.transfer import Download, Meter, Progress, bring

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo
    from huggingface_hub.utils import tqdm

SMALL_FILES = (
    *("*.json", "*.jinja", "tokenizer.model", "*.tiktoken", "merges.txt", "vocab.txt", "*.model"),
    "additional_chat_templates/*.jinja",
    "*_Pooling/*.json",  # sentence embeddings
)
NOT_NEEDED = ("*.bin.index.json", "*_state.json", "training_args*")
PARALLEL = 4
Choose = Callable[[Path, dict[str, TensorInfo]], Sequence[str]]
LARGEST_OVER_HTTP = 50_000_000_000  # larger files come only through the Hub's own protocol


@dataclass(frozen=True, slots=True)
class Remote:
    """A revision of a repository: its commit, and size and SHA-256 (of large files) by file name."""

    name: HubName
    commit: str
    files: dict[str, tuple[int, str | None]]


def pull(name: HubName, progress: Progress | None = None) -> Path:
    """Fetch the newest files of `name` and return the folder or the (first) GGUF file.

    `progress` is called with (bytes present, bytes in all), from several threads; None draws a bar on
    standard error. Raises ModelNotFound, ModelGated, ModelInvalid, ModelUnsupported (only pickles),
    UsageError (several GGUF files), DoesNotFit (the disk) or ModelError, each saying what to do.
    """
    _refuse_offline(name)
    with _explained(name):
        remote = look_up(name)
        small, large = choose_files(remote)
        if small:
            folder = _fetch_listed(remote, small, remote.commit)
        if not large:
            large = _weights_by_index(remote, folder)
        _fetch_large(remote, large, progress)
        folder = _fetch_listed(remote, [*small, *large], name.revision)
    return folder / large[0] if name.file or large[0].lower().endswith(".gguf") else folder


def pull_part(name: HubName, choose: Choose, progress: Progress | None = None) -> Path:
    """Fetch the small files of `name` and only those weight files that `choose` names; return their folder.

    choose: is given the folder, with its config.json, and the tensors of all weight files from their headers.
    What is in the cache afterwards is a part, and is not taken for the model. Raises as `pull` and `peek` do.
    """
    _refuse_offline(name)
    with _explained(name):
        remote = look_up(name)
        small, weights = choose_files(remote)
        _refuse_gguf(name, weights)
        folder = _fetch_listed(remote, small, remote.commit)
        chosen = list(choose(folder, _headers(remote, weights or _weights_by_index(remote, folder))))
        _fetch_large(remote, chosen, progress)
        return _fetch_listed(remote, [*small, *chosen], remote.commit)


def peek(name: HubName, folder: Path) -> dict[str, TensorInfo]:
    """The tensors of a model on the Hub, from its headers; its `config.json` is left in `folder`.

    Nothing enters the cache. Raises as `pull` does, and ModelUnsupported for a GGUF file.
    """
    _refuse_offline(name)
    with _explained(name):
        remote = look_up(name)
        _, weights = choose_files(remote)
        _refuse_gguf(name, weights)
        for file in {CONFIG, INDEX} & set(remote.files):
            _fetch_to(remote, file, folder)
        return _headers(remote, weights or _weights_by_index(remote, folder))


def _refuse_gguf(name: HubName, weights: Sequence[str]) -> None:
    if name.file or (weights and weights[0].lower().endswith(".gguf")):
        raise ModelUnsupported(
            f"{name} is a GGUF file, which can be described only once it is here: "
            f"'mlxserve models pull {name}'."
        )


def _headers(remote: Remote, weights: Sequence[str]) -> dict[str, TensorInfo]:
    """The tensors of some weight files, from their first bytes."""
    with ThreadPoolExecutor(PARALLEL) as pool:
        headers = list(pool.map(lambda file: _remote_header(remote, file), weights))
    return {tensor: info for header in headers for tensor, info in header.items()}


def _fetch_to(remote: Remote, file: str, folder: Path) -> None:
    from huggingface_hub import hf_hub_download

    hf_hub_download(
        remote.name.repo, file, revision=remote.commit, local_dir=folder, tqdm_class=_silent_bar()
    )


def _remote_header(remote: Remote, file: str) -> dict[str, TensorInfo]:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import SafetensorsParsingError

    try:
        header = HfApi().parse_safetensors_file_metadata(remote.name.repo, file, revision=remote.commit)
    except SafetensorsParsingError as error:
        raise ModelInvalid(f"{file} of {remote.name} has a damaged header.", param=file) from error
    return {
        name: TensorInfo(info.dtype, tuple(info.shape), end - start, Path(file), start)
        for name, info in header.tensors.items()
        for start, end in [info.data_offsets]
    }


def look_up(name: HubName) -> Remote:
    """Ask the Hub what a revision holds."""
    from huggingface_hub import HfApi

    info: ModelInfo = HfApi().model_info(name.repo, revision=name.revision, files_metadata=True)
    files = {
        entry.rfilename: (entry.size or 0, entry.lfs.sha256 if entry.lfs else None)
        for entry in info.siblings or ()
    }
    return Remote(name, str(info.sha), files)


def choose_files(remote: Remote) -> tuple[list[str], list[str]]:
    """(small files, weights) that are needed; no weights yet where an index must be read first.

    Raises ModelUnsupported for a repository of pickles alone, ModelInvalid for one without weights.
    """
    names = list(remote.files)
    shown = str(remote.name)
    if remote.name.file:
        return [], choose_gguf(names, remote.name.file, shown)
    small = [name for name in names if _is_small(name)]
    if INDEX in names:
        return small, []
    weights = choose_weights(names, None)
    if weights:
        return small, weights
    if ggufs := choose_gguf(names, None, shown):
        return [], ggufs
    if pickled := pickles(names):
        raise only_pickles(pickled[0], shown)
    raise ModelInvalid(f"{shown} holds no weights: neither .safetensors nor .gguf files.")


def _is_small(name: str) -> bool:
    patterns = [pattern for pattern in SMALL_FILES if is_nested(pattern) == is_nested(name)]
    wanted = any(fnmatch(name, pattern) for pattern in patterns)
    return wanted and not any(fnmatch(name, pattern) for pattern in NOT_NEEDED)


def _weights_by_index(remote: Remote, folder: Path) -> list[str]:
    weights = choose_weights(remote.files, read_index(folder / INDEX))
    missing = [name for name in weights if name not in remote.files]
    if missing:
        raise ModelInvalid(
            f"{remote.name} is incomplete on the Hub: its index names {missing[0]}, which is absent."
        )
    return weights


def _fetch_listed(remote: Remote, files: Sequence[str], revision: str | None) -> Path:
    """Let huggingface_hub bring `files` into the cache's snapshot; those that are there are only linked."""
    from huggingface_hub import snapshot_download

    only = [escape(name) for name in files]
    folder = snapshot_download(
        remote.name.repo, revision=revision, allow_patterns=only, tqdm_class=_silent_bar()
    )
    return Path(folder)


def _silent_bar() -> type[tqdm]:
    from huggingface_hub.utils import tqdm

    class Silent(tqdm):
        def __init__(self, *args: Any, **settings: Any) -> None:
            super().__init__(*args, **{**settings, "disable": True})

    return Silent


def _fetch_large(remote: Remote, files: Sequence[str], progress: Progress | None) -> None:
    """Bring weights into the cache's blobs, several at a time."""
    downloads = [download for name in files if (download := _download(remote, name))]
    missing = sum(download.size - download.present for download in downloads)
    if not missing:
        return
    _refuse_full_disk(remote.name, missing)
    bar = nullcontext(progress) if progress else download_bar(str(remote.name))
    with bar as shown:
        try:
            _run_all(downloads, Meter(sum(download.size for download in downloads), shown))
        except OSError as error:
            if error.errno == errno.ENOSPC:
                missing = sum(download.size - download.present for download in downloads)
                raise _disk_full(remote.name, missing) from error
            raise


def _download(remote: Remote, name: str) -> Download | None:
    """How to fetch one large file; None for one that huggingface_hub fetches itself."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import build_hf_headers

    size, sha256 = remote.files[name]
    if sha256 is None or size > LARGEST_OVER_HTTP:
        return None
    target = repo_folder(remote.name.repo) / "blobs" / sha256
    url = hf_hub_url(remote.name.repo, name, revision=remote.commit)
    return Download(url, build_hf_headers(), size, sha256, target)


def _run_all(downloads: Sequence[Download], meter: Meter) -> None:
    """All downloads in threads; the first error stops the others and is raised."""
    meter.add(sum(download.present for download in downloads))
    absent = [download for download in downloads if not download.target.exists()]
    with ThreadPoolExecutor(PARALLEL) as pool:
        running = [pool.submit(bring, download, meter) for download in absent]
        try:
            finished, _ = wait(running, return_when=FIRST_EXCEPTION)
            for task in finished:
                task.result()
        finally:
            meter.stop()
            pool.shutdown(wait=True, cancel_futures=True)


def _refuse_full_disk(name: HubName, needed: int) -> None:
    if needed > free_disk():
        raise _disk_full(name, needed)


def free_disk() -> int:
    """Free bytes on the disk of the cache, which need not exist yet."""
    folder = cache_folder()
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def _disk_full(name: HubName, needed: int) -> DoesNotFit:
    free = free_disk()
    return DoesNotFit(
        f"{name} needs {show_bytes(needed)} more on the disk of {cache_folder()}, which has "
        f"{show_bytes(free)} free; make room ('mlxserve models rm') or set HF_HUB_CACHE to another disk.",
        needed_bytes=needed,
        available_bytes=free,
    )


def _refuse_offline(name: HubName) -> None:
    from huggingface_hub import constants

    if constants.is_offline_mode():
        part = " completely" if snapshot(name.repo, name.revision) else ""
        raise ModelNotFound(
            f"{name} is not{part} in the cache ({cache_folder()}), and HF_HUB_OFFLINE forbids to fetch it."
        )


@contextmanager
def _explained(name: HubName) -> Iterator[None]:
    """Turn what huggingface_hub and the network raise into our errors."""
    from huggingface_hub.errors import HFValidationError, HTTPError

    try:
        yield
    except MlxServeError:
        raise
    except (HTTPError, OSError, HFValidationError) as error:
        raise _explain(name, error) from error


def _explain(name: HubName, error: Exception) -> MlxServeError:
    """The Hub's answer in a person's words. The order matters: gated is a kind of 'not found' there."""
    from huggingface_hub import errors as hub

    page = f"https://huggingface.co/{name.repo}"
    cause = error.__cause__ if isinstance(error, hub.LocalEntryNotFoundError) and error.__cause__ else error
    status = cause.response.status_code if isinstance(cause, hub.HfHubHTTPError) else 0
    if isinstance(cause, hub.GatedRepoError) or status == 403:
        return ModelGated(
            f"{name} is gated: accept its terms on {page}, then log in with 'hf auth login' or set HF_TOKEN."
        )
    if isinstance(cause, hub.RevisionNotFoundError):
        return ModelNotFound(f"{name.repo} has no revision {name.revision!r}; see {page}.")
    if isinstance(cause, hub.RepositoryNotFoundError | hub.HFValidationError) or status in (401, 404):
        return ModelNotFound(
            f"There is no model '{name.repo}' on the Hub, or it is private; check the name, or log in "
            "with 'hf auth login'."
        )
    if type(cause).__name__ in ("ConnectError", "ConnectTimeout", "ProxyError"):
        return ModelError(
            f"{name} is not in the cache, and the Hub cannot be reached ({_first_line(cause)}); "
            "check the network."
        )
    if status:
        return ModelError(f"The Hub answered {status} for {name}; try again later.")
    return ModelError(
        f"The download of {name} broke off ({type(cause).__name__}: {_first_line(cause)}); check the network "
        "and run it again, it goes on where it stopped."
    )


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0]
