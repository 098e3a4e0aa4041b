"""Model folders that both sides of a comparison can load.

Knows: how to turn the embedded GGUF model into a float32 folder in Hugging Face layout, once.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import mlxserve  # noqa: F401  (first: it puts OpenBLAS in before MLX loads)

import mlx.core as mx  # isort: skip
from mlx.utils import tree_flatten

from mlxserve.config import LoadConfig
from mlxserve.models.load import load_gguf
from mlxserve.models.resolve import resolve
from mlxserve.text.gguf_vocab import tokenizer_from_gguf


def cache_folder() -> Path:
    """Where benchmark models are kept between runs."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "mlxserve" / "benchmarks"


def smollm2_folder() -> Path:
    """SmolLM2-135M-Instruct in float32, as a folder; made from the packaged GGUF file if it is not there."""
    folder = cache_folder() / "SmolLM2-135M-Instruct-float32"
    if (folder / "config.json").is_file():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    files = resolve("smollm2")
    loaded = load_gguf(files.path, LoadConfig(dtype="float32"))
    weights = dict(tree_flatten(loaded.model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    tokenizer = tokenizer_from_gguf(loaded.metadata)
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    names = {name: text for name, text in tokenizer.special_tokens.items() if isinstance(text, str)}
    settings = {
        **names,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": tokenizer.chat_template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
    (folder / "config.json").write_text(
        json.dumps(loaded.config, indent=1)
    )  # last: it marks the folder whole
    return folder
