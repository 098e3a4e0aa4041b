"""Tied output heads in model folders: present, absent, and missing where they are needed."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import pytest

import mlxserve  # noqa: F401  (puts OpenBLAS before MLX)
from mlxserve.config import LoadConfig
from mlxserve.errors import ModelInvalid
from mlxserve.models.load import load_folder
from tests import tiny


def _folder(path: Path, tied: bool, head: bool) -> Path:
    """A tiny llama whose configuration says `tied` and whose file has an output head or not."""
    folder = tiny.write(path, "llama", tokenizer=False)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": tied}))
    weights = mx.load(str(folder / "model.safetensors"))
    assert isinstance(weights, dict) and "lm_head.weight" not in weights
    if head:
        weights["lm_head.weight"] = mx.random.normal(weights["model.embed_tokens.weight"].shape)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    return folder


def _logits(folder: Path) -> mx.array:
    return load_folder(folder, LoadConfig()).model(mx.array([[1, 2, 3]]))


def test_case_49_tied_with_or_without_a_head(tmp_path: Path) -> None:
    """The embedding is the head, whatever else the file holds."""
    without = _logits(_folder(tmp_path / "without", tied=True, head=False))
    with_head = _logits(_folder(tmp_path / "with", tied=True, head=True))
    assert mx.array_equal(without, with_head)


def test_case_49_untied_without_a_head_names_the_tensor(tmp_path: Path) -> None:
    with pytest.raises(ModelInvalid, match=r"lm_head\.weight"):
        load_folder(_folder(tmp_path, tied=False, head=False), LoadConfig())


def test_an_untied_head_is_used(tmp_path: Path) -> None:
    tied = _logits(_folder(tmp_path / "tied", tied=True, head=False))
    untied = _logits(_folder(tmp_path / "untied", tied=False, head=True))
    assert not mx.allclose(tied, untied)
