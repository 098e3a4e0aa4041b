"""Files of a run, each written whole or not at all.

Knows: folders that appear by renaming, JSON state, arrays in safetensors. A checkpoint is a usable adapter
folder with the optimiser's arrays and the place in the data beside it. Does not know training.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlxserve.errors import MlxServeError, UsageError

STATE, OPTIMIZER = "state.json", "optimizer.safetensors"
PARTIAL, OLD = ".writing-", ".old-"


@dataclass(slots=True)
class State:
    """Where a run is. cursor: micro-batches of this epoch that are done. evaluated: the step after which was
    last evaluated. bad_evals: since the best one."""

    step: int = 0
    epoch: int = 0
    cursor: int = 0
    trained_tokens: int = 0
    best_loss: float | None = None
    evaluated: int = -1
    bad_evals: int = 0
    data: str = ""
    settings: str = ""


def state_numbers(state: State) -> mx.array:
    """A state as numbers (4096,) uint32, so that it travels between processes as arrays do."""
    return mx.array(list(json.dumps(asdict(state)).encode().ljust(4096)), mx.uint32)


def state_of(numbers: mx.array) -> State:
    """What `state_numbers` was given."""
    values: Any = numbers.tolist()
    return State(**json.loads(bytes(values)))


def write_folder(target: Path, fill: Callable[[Path], None]) -> None:
    """Let `fill` write into a folder beside `target`, then put it in target's place.

    Killed at any moment, the old folder or the new one is there (after `recover`), never a mixture. Raises
    MlxServeError where the disk does not take it; the old folder is there then.
    """
    partial = target.with_name(f"{PARTIAL}{target.name}")
    old = target.with_name(f"{OLD}{target.name}")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        fill(partial)
        for path in partial.rglob("*"):
            _sync(path)
        _sync(partial)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError | RuntimeError):  # the latter is how MLX says that a file is not written
            reason = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())
            raise MlxServeError(f"{target} cannot be written: {str(reason).rstrip('.')}.") from error
        raise
    if target.exists():
        shutil.rmtree(old, ignore_errors=True)
        target.rename(old)
    partial.rename(target)
    _sync(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def write_file(target: Path, text: str) -> None:
    """A small file, replaced in one step."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f"{PARTIAL}{target.name}")
    partial.write_text(text, encoding="utf-8")
    _sync(partial)
    partial.replace(target)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def recover(folder: Path) -> None:
    """Tidy up after a killed run: half-written folders go, ones that were being replaced come back."""
    for place in (folder, folder / "checkpoints"):
        if not place.is_dir():
            continue
        for path in place.iterdir():
            if path.name.startswith(OLD):
                target = path.with_name(path.name.removeprefix(OLD))
                if target.exists():
                    shutil.rmtree(path)
                else:
                    path.rename(target)
        for path in place.iterdir():
            if path.name.startswith(PARTIAL):
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def save_checkpoint(
    run: Path,
    state: State,
    optimizer: dict[str, mx.array],
    save_weights: Callable[[Path], None],
    keep: int,
) -> Path:
    """Write checkpoints/<step> whole, then let older ones than the last `keep` go."""

    def fill(folder: Path) -> None:
        save_weights(folder)
        mx.save_safetensors(str(folder / OPTIMIZER), optimizer)
        (folder / STATE).write_text(_state_text(state), encoding="utf-8")

    target = run / "checkpoints" / str(state.step)
    write_folder(target, fill)
    for old in checkpoints(run)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return target


def rewrite_state(run: Path, state: State) -> None:
    """Replace the state of checkpoints/<step>."""
    write_file(run / "checkpoints" / str(state.step) / STATE, _state_text(state))


def _state_text(state: State) -> str:
    return json.dumps(asdict(state), indent=1)


def checkpoints(run: Path) -> list[Path]:
    """Whole checkpoints of a run, the oldest first."""
    folder = run / "checkpoints"
    found = folder.iterdir() if folder.is_dir() else ()
    whole = (path for path in found if path.name.isdigit() and (path / STATE).is_file())
    return sorted(whole, key=lambda path: int(path.name))


def read_checkpoint(path: Path) -> tuple[State, dict[str, mx.array]]:
    """(state, the optimiser's arrays). Raises UsageError for a folder that is no checkpoint of ours."""
    try:
        values: dict[str, Any] = json.loads((path / STATE).read_text(encoding="utf-8"))
        arrays: Any = mx.load(str(path / OPTIMIZER))
        return State(**values), dict(arrays)
    except (OSError, ValueError, TypeError, RuntimeError) as error:
        raise UsageError(f"{path} is no whole checkpoint: {error}.", param="resume") from error
