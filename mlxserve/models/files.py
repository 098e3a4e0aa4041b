"""A model folder, looked at without loading it.

Knows: `config.json`, which safetensors files belong to the model, their headers, and what marks a
folder as damaged, incomplete or dependent on code. Plain Python: no MLX, no weights in memory.
Does not know: architectures, GGUF (`models.gguf`) or where the folder came from (`resolve`, `hub`).

Format of safetensors: 8 bytes little-endian length N, N bytes of JSON (name -> dtype, shape, data
offsets counted from the end of the header), then the data without gaps
(https://huggingface.co/docs/safetensors).
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mlxserve.errors import ModelInvalid, ModelUnsupported
from mlxserve.models.definitions import module_name

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt")
# Weights in a folder without an index: the first pattern that matches anything.
WEIGHT_PATTERNS = (
    "model.safetensors",
    "model-*-of-*.safetensors",
    "model*.safetensors",
    "weights*.safetensors",
)
# Safetensors files that are something else than the model's weights.
NOT_WEIGHTS = ("adapter*", "consolidated*", "*lora*", "optimizer*")
MAX_HEADER_BYTES = 100_000_000  # the format's own limit

BITS = {
    "F64": 64,
    "I64": 64,
    "U64": 64,
    "C64": 64,
    "F32": 32,
    "I32": 32,
    "U32": 32,
    "F16": 16,
    "BF16": 16,
    "I16": 16,
    "U16": 16,
    "I8": 8,
    "U8": 8,
    "BOOL": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "F4": 4,
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor as its file's header describes it; bytes [start, start + nbytes) of `file` hold it."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    file: Path
    start: int

    @property
    def size(self) -> int:
        """Number of elements as stored (packed formats hold several weights in one)."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A complete folder: its configuration, weight files and the tensors in them."""

    path: Path
    config: dict[str, Any]
    weights: tuple[Path, ...]
    tensors: dict[str, TensorInfo]


def inspect(folder: Path) -> ModelFolder:
    """Read everything but the weights themselves.

    Raises ModelInvalid for a missing or damaged file, naming it, and ModelUnsupported for a model that
    comes only as pickles or needs code of its own.
    """
    config = read_config(folder)
    refuse_code(config, str(folder))
    weights = weight_files(folder)
    tensors: dict[str, TensorInfo] = {}
    for file in weights:
        tensors |= read_header(file)
    return ModelFolder(folder, config, tuple(weights), tensors)


def read_config(folder: Path) -> dict[str, Any]:
    """`config.json` of a model folder.

    Floats that JSON cannot hold, tagged as {"__float__": "Infinity"}, become floats. Raises
    ModelInvalid when the file is missing, is no JSON, or is no object.
    """
    path = folder / CONFIG
    if not path.is_file():
        raise ModelInvalid(f"There is no {CONFIG} in {folder}, so it is not a model folder.", param=CONFIG)
    return read_json_object(path)


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a model; raises ModelInvalid, naming the file, for anything else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"), object_hook=_untag)
    except (ValueError, RecursionError) as error:  # broken JSON or broken UTF-8
        raise ModelInvalid(f"{path} is not valid JSON: {error}.", param=path.name) from error
    if not isinstance(value, dict):
        raise ModelInvalid(
            f"{path} should hold a JSON object, not a {type(value).__name__}.", param=path.name
        )
    return value


def _untag(value: dict[str, Any]) -> Any:
    tag = value.get("__float__")
    return float(tag) if len(value) == 1 and isinstance(tag, str) else value


def refuse_code(config: Mapping[str, Any], name: str) -> None:
    """Raise ModelUnsupported if running the model would need code that its repository brings.

    `model_file` replaces the definition, so it is always refused. `auto_map` beside a model type that
    mlx-lm defines is harmless: the code is ignored.
    """
    if config.get("model_file"):
        raise ModelUnsupported(
            f"{name} brings its own model code ({config['model_file']}), which mlxserve never runs.",
            param="model_file",
        )
    if config.get("auto_map") and not is_defined(config):
        raise ModelUnsupported(
            f"The architecture {config.get('model_type')!r} of {name} exists only as code in its repository "
            "(auto_map), which mlxserve never runs; the installed mlx-lm does not define it.",
            param="auto_map",
        )


def is_defined(config: Mapping[str, Any]) -> bool:
    """True if the installed mlx-lm has a definition for a configuration; imports nothing of it."""
    spec = find_spec("mlx_lm")
    places = spec.submodule_search_locations if spec else None
    file = f"{module_name(config)}.py"
    return any((Path(place) / "models" / file).is_file() for place in places or ())


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of the model in `folder`, all of which exist.

    Raises ModelInvalid when the index names a file that is absent or there are none, ModelUnsupported
    when there are only pickles.
    """
    present = sorted(path.name for path in folder.iterdir() if path.is_file())
    index = read_index(folder / INDEX) if INDEX in present else None
    wanted = choose_weights(present, index)
    if not wanted:
        raise _no_weights(present, str(folder))
    missing = [name for name in wanted if name not in present]
    if missing:
        raise ModelInvalid(
            f"{_listed(missing)} missing from {folder}, though {INDEX} names "
            f"{'it' if len(missing) == 1 else 'them'}; fetch the model again.",
            param=missing[0],
        )
    return [folder / name for name in wanted]


def read_index(path: Path) -> list[str]:
    """The files that an index names, sorted. Raises ModelInvalid for an index without a weight map."""
    weight_map = read_json_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelInvalid(f"{path} has no weight_map, so nobody knows the model's files.", param=path.name)
    files = sorted({str(name) for name in weight_map.values()})
    for name in files:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ModelInvalid(f"{path} names {name!r}, which is no safetensors file of the same folder.")
    return files


def choose_weights(names: Iterable[str], index: Sequence[str] | None) -> list[str]:
    """Which of a folder's or repository's files are the model's weights: the index decides, else names."""
    if index is not None:
        return list(index)
    candidates = [name for name in names if name.endswith(".safetensors") and not is_nested(name)]
    candidates = [name for name in candidates if not any(fnmatch(name, other) for other in NOT_WEIGHTS)]
    for pattern in WEIGHT_PATTERNS:
        chosen = sorted(name for name in candidates if fnmatch(name, pattern))
        if chosen:
            return chosen
    return sorted(candidates)


def is_nested(name: str) -> bool:
    """True for a file that lies in a sub-folder of its repository."""
    return "/" in name


def pickles(names: Iterable[str]) -> list[str]:
    """The files whose format can carry code, which is why they are never read."""
    return [name for name in names if any(fnmatch(name, pattern) for pattern in PICKLES)]


def _no_weights(present: list[str], name: str) -> ModelInvalid | ModelUnsupported:
    if pickled := pickles(present):
        return only_pickles(pickled[0], name)
    return ModelInvalid(f"There are no .safetensors files in {name}.", param=INDEX)


def only_pickles(example: str, name: str) -> ModelUnsupported:
    """The refusal of a model that has no other weights than pickles."""
    return ModelUnsupported(
        f"{name} holds its weights only as pickles ({example}), a format that can run code when it is read; "
        "use a copy in safetensors, for instance one from mlx-community on the Hub.",
        param=example,
    )


def _listed(names: list[str]) -> str:
    if len(names) == 1:
        return f"{names[0]} is"
    return f"{', '.join(names[:3])}{' and more' if len(names) > 3 else ''} are"


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Tensors of a safetensors file by name, from its header alone.

    Raises ModelInvalid, naming the file, when the header is damaged or the file is shorter than it says.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(8)
        if head.startswith(b"version "):
            raise ModelInvalid(f"{path} is a Git LFS pointer, not the file itself; run 'git lfs pull'.")
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        if not 2 <= length <= MAX_HEADER_BYTES:
            raise ModelInvalid(f"{path} is not a safetensors file.", param=path.name)
        text = file.read(length)
    if len(text) < length:
        raise _cut_short(path, 8 + length, size)
    tensors = _parse_header(path, text)
    end = max((tensor.start + tensor.nbytes for tensor in tensors.values()), default=8 + length)
    if end > size:
        raise _cut_short(path, end, size)
    return tensors


def _cut_short(path: Path, promised: int, size: int) -> ModelInvalid:
    return ModelInvalid(
        f"{path} is cut short: its header promises {promised:,} bytes and the file has {size:,}; "
        "fetch it again.",
        param=path.name,
    )


def _parse_header(path: Path, text: bytes) -> dict[str, TensorInfo]:
    try:
        entries = json.loads(text)
        entries.pop("__metadata__", None)
        return {name: _tensor(path, 8 + len(text), entry) for name, entry in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelInvalid(f"{path} has a damaged header: {error}.", param=path.name) from error


def _tensor(path: Path, data: int, entry: Mapping[str, Any]) -> TensorInfo:
    """`data` is where the header ends; offsets count from there."""
    start, end = entry["data_offsets"]
    shape = tuple(entry["shape"])
    nbytes = (math.prod(shape) * BITS[entry["dtype"]] + 7) // 8
    if start < 0 or end - start != nbytes or any(length < 0 for length in shape):
        raise ValueError(
            f"a tensor of shape {shape} and type {entry['dtype']} cannot fill {end - start} bytes"
        )
    return TensorInfo(entry["dtype"], shape, nbytes, path, data + start)
