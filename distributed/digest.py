"""What ranks compare before they connect: digests of a model's configuration, tokenizer and tensors.

A rank's digests are of every byte that it reads (load.py makes them while reading; `rank_digests` without
loading). Two ranks agree if all names that both have agree: a tensor that is on both, or the same region.
Regions that only one rank reads are compared with rank 0, whose `reference_digests` are of the
others' regions in its own copy of the files, as far as it has them. They cost rank 0 one pass over those
bytes, at the speed of SHA-256 (1.4 GB/s a core on an x86-64 server CPU), and are remembered until a file changes.

Knows: files and regions. Does not know how digests travel or who compares them (handshake.py).
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

import mlx.core as mx

from mlxserve.config import LoadConfig
from mlxserve.distributed.blueprint import Blueprint, draw
from mlxserve.distributed.exchange import exchange
from mlxserve.distributed.load import ShardLoaded, blueprint
from mlxserve.distributed.reader import TensorReader, region_key
from mlxserve.distributed.split import Split
from mlxserve.errors import ModelInvalid
from mlxserve.models.files import read_config
from mlxserve.models.resolve import ModelFiles

# Everything that decides how text becomes tokens and tokens text.
TOKENIZER_PATTERNS = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.tiktoken",
    "spiece.model",
    "chat_template*",
)


def config_digest(folder: Path) -> str:
    """Of a model folder's configuration: its values, whatever the order or spacing of the file."""
    text = json.dumps(read_config(folder), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def tokenizer_digest(folder: Path) -> str:
    """Of the bytes and names of a model folder's tokenizer and chat template."""
    seen = hashlib.sha256()
    files = {path for pattern in TOKENIZER_PATTERNS for path in folder.glob(pattern) if path.is_file()}
    for file in sorted(files):
        data = file.read_bytes()
        seen.update(f"{file.name}:{len(data)};".encode() + data)
    return seen.hexdigest()[:32]


def rank_digests(
    files: ModelFiles, split: Split, rank: int, settings: LoadConfig | None = None
) -> dict[str, str]:
    """The digests that `load_shard` gives, without loading. Raises as it does."""
    return _digest_regions([blueprint(files, settings or LoadConfig(), split, rank)], {})


def reference_digests(
    files: ModelFiles, split: Split, rank: int = 0, settings: LoadConfig | None = None
) -> dict[str, str]:
    """What every other rank's digests are in this rank's files, but for what `rank` reads itself.

    Of an incomplete folder, only what it has. Raises as `load_shard` does.
    """
    settings = settings or LoadConfig()
    own = blueprint(files, settings, split, rank)
    memory = _memory(own)
    try:
        known = json.loads(memory.read_text())
        if isinstance(known, dict):
            return known
    except (OSError, ValueError):
        pass
    others = [_redrawn(own, other) for other in range(split.size) if other != rank]
    found = _digest_regions(others, _keys(own))
    _remember(memory, found)
    return found


def _redrawn(own: Blueprint, rank: int) -> Blueprint:
    return draw(own.config, own.settings, own.tensors, own.split, rank, complete=not own.missing_ok)


def _keys(print_: Blueprint) -> Iterable[str]:
    return {region_key(name, region, print_.tensors[name].shape) for name, region in print_.reads()}


def _digest_regions(prints: list[Blueprint], without: Iterable[str]) -> dict[str, str]:
    found: dict[str, str] = dict.fromkeys(without, "")
    skipped = set(found)
    for print_ in prints:
        with TensorReader(print_.tensors) as reader:
            for name, region in print_.reads():
                if region_key(name, region, print_.tensors[name].shape) not in found:
                    reader.digest(name, region)
        found |= reader.digests
    return {key: value for key, value in found.items() if key not in skipped}


def _memory(own: Blueprint) -> Path:
    """Where the reference digests of these files and this split are remembered."""
    files = sorted({tensor.file for tensor in own.tensors.values()})
    facts = [(str(file.resolve()), *_identity(file)) for file in files]
    text = json.dumps([facts, str(own.split), own.rank, own.settings.quantize_bits])
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "mlxserve" / "digests" / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


def _identity(file: Path) -> tuple[int, ...]:
    facts = file.stat()
    return facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns, facts.st_ino


def _remember(memory: Path, digests: dict[str, str]) -> None:
    """Written whole or not at all; a read-only home is no error."""
    try:
        memory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=memory.parent, delete=False) as file:
            json.dump(digests, file)
        os.replace(file.name, memory)
    except OSError:
        return


def refuse_differences(group: mx.distributed.Group, loaded: ShardLoaded, files: ModelFiles) -> None:
    """Raise ModelInvalid, on every rank, naming rank and tensor, unless all ranks read parts of one model.

    For ranks that are connected already and have no handshake of their own, such as a trainer's.
    """
    mine = loaded.digests
    if group.rank() == 0:
        print_ = loaded.blueprint
        mine = {**mine, **reference_digests(files, print_.split, 0, print_.settings)}
    found = differences(exchange(group, {"config.json": config_digest(files.path), **mine}))
    if found:
        rank, name = found[0]
        raise ModelInvalid(
            f"Rank {rank} has another {name} than rank 0 or an earlier one; copy the model's files from one host "
            "to the others."
        )


def differences(reports: list[dict[str, str]]) -> list[tuple[int, str]]:
    """(rank, name) of every digest that differs from that of the first rank that has the name."""
    first: dict[str, str] = {}
    found = []
    for rank, report in enumerate(reports):
        for name, digest in report.items():
            if first.setdefault(name, digest) != digest:
                found.append((rank, name))
    return found
