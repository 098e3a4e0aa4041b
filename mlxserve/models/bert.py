"""Encoders of the BERT family, for sentence embeddings: bert, roberta, xlm-roberta.

    embeddings (word + position + kind, layer norm)
    layers     (attention over the whole text, residual, layer norm; feed-forward, residual, layer norm)
    pooling    mean over the text's tokens, or the first token's vector; then length 1

Knows: the architecture (Devlin et al. 2018, arXiv:1810.04805) and how sentence-transformers lays its folders
out. Parameter names are those of the files. Does not know text or batching of requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from mlxserve.errors import ModelUnsupported
from mlxserve.models.files import inspect, read_json_object
from mlxserve.models.weights import check_names_and_shapes

FAMILY = ("bert", "roberta", "xlm-roberta")
POOLING = "1_Pooling/config.json"
PREFIXES = ("bert.", "roberta.")
ACTIVATIONS = {"gelu": nn.gelu, "gelu_new": nn.gelu_approx, "relu": nn.relu}


class Attention(nn.Module):
    """Self-attention without a causal mask."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)

    def __call__(self, x: mx.array, mask: mx.array) -> mx.array:
        batch, length, width = x.shape

        def split(y: mx.array) -> mx.array:
            return y.reshape(batch, length, self.heads, -1).transpose(0, 2, 1, 3)  # (B, H, L, D)

        out = mx.fast.scaled_dot_product_attention(
            split(self.query(x)),
            split(self.key(x)),
            split(self.value(x)),
            scale=(width // self.heads) ** -0.5,
            mask=mask,
        )
        return out.transpose(0, 2, 1, 3).reshape(batch, length, width)


class Layer(nn.Module):
    """One encoder layer; norms come after the residual sums."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        width, inner, eps = config["hidden_size"], config["intermediate_size"], config["layer_norm_eps"]
        self.attention = Attention(width, config["num_attention_heads"])
        self.attention_dense = nn.Linear(width, width)
        self.attention_norm = nn.LayerNorm(width, eps=eps)
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)
        self.norm = nn.LayerNorm(width, eps=eps)
        self.activation = ACTIVATIONS[config.get("hidden_act", "gelu")]

    def __call__(self, x: mx.array, mask: mx.array) -> mx.array:
        x = self.attention_norm(x + self.attention_dense(self.attention(x, mask)))
        return self.norm(x + self.down(self.activation(self.up(x))))


class Bert(nn.Module):
    """Token ids (B, L) and which of them are text (B, L) to hidden states (B, L, H)."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        width = config["hidden_size"]
        self.words = nn.Embedding(config["vocab_size"], width)
        self.positions = nn.Embedding(config["max_position_embeddings"], width)
        self.kinds = nn.Embedding(config["type_vocab_size"], width)
        self.norm = nn.LayerNorm(width, eps=config["layer_norm_eps"])
        self.layers = [Layer(config) for _ in range(config["num_hidden_layers"])]
        self.first_position = first_position(config)

    def __call__(self, ids: mx.array, present: mx.array) -> mx.array:
        places = self.first_position + mx.arange(ids.shape[1])
        x = self.norm(self.words(ids) + self.positions(places) + self.kinds(mx.zeros_like(ids)))
        mask = present[:, None, None, :]  # (B, 1, 1, L): padding is not looked at
        for layer in self.layers:
            x = layer(x, mask)
        return x


@dataclass(slots=True)
class LoadedEncoder:
    """An encoder in memory. pooling: 'mean' or 'cls'. context: tokens of a text, specials included."""

    name: str
    path: Path
    model: Bert
    config: dict[str, Any]
    pooling: str
    context: int

    def embed(self, batch: list[list[int]]) -> list[list[float]]:
        """Vectors of length 1 for token ids, specials included; short texts are padded to the longest."""
        longest = max(map(len, batch))
        ids = mx.array([text + [0] * (longest - len(text)) for text in batch])  # (B, L)
        present = mx.arange(longest)[None] < mx.array([len(text) for text in batch])[:, None]
        hidden = self.model(ids, present)  # (B, L, H)
        if self.pooling == "cls":
            pooled = hidden[:, 0]
        else:
            weights = present[:, :, None].astype(hidden.dtype)
            pooled = (hidden * weights).sum(axis=1) / weights.sum(axis=1)
        length = mx.maximum(mx.linalg.norm(pooled, axis=-1, keepdims=True), 1e-12)
        return (pooled / length).tolist()  # type: ignore[return-value]


def is_encoder(config: Mapping[str, Any]) -> bool:
    """True for a configuration that this file runs."""
    return config.get("model_type") in FAMILY


def first_position(config: Mapping[str, Any]) -> int:
    """Where positions begin: RoBERTa's count from behind the padding id."""
    return 0 if config["model_type"] == "bert" else int(config.get("pad_token_id", 1)) + 1


def load_encoder(folder: Path, *, name: str | None = None) -> LoadedEncoder:
    """Load a folder in Hugging Face or sentence-transformers layout, in float32.

    Raises ModelInvalid for damaged or missing tensors, ModelUnsupported for what is not computed here.
    """
    files = inspect(folder)
    config = files.config
    _refuse_unknown(config)
    model = Bert(config)
    weights: dict[str, mx.array] = {}
    for file in files.weights:
        tensors = mx.load(str(file))
        assert isinstance(tensors, dict)
        weights |= {
            ours: value.astype(mx.float32) for key, value in tensors.items() if (ours := _renamed(key))
        }
    check_names_and_shapes(model, weights, str(folder))
    model.update(tree_unflatten(list(weights.items())))
    model.eval()
    mx.eval(model.parameters())
    context = int(config["max_position_embeddings"]) - first_position(config)
    return LoadedEncoder(name or folder.name, folder, model, config, _pooling(folder), context)


def _refuse_unknown(config: Mapping[str, Any]) -> None:
    kind = config.get("position_embedding_type", "absolute")
    activation = config.get("hidden_act", "gelu")
    for what, value, known in (
        ("position embeddings", kind, ("absolute",)),
        ("activation", activation, tuple(ACTIVATIONS)),
    ):
        if value not in known:
            raise ModelUnsupported(f"This encoder's {what} are {value!r}; known are {', '.join(known)}.")


# The files' names and ours, inside a layer and outside.
_NAMES = {
    "embeddings.word_embeddings": "words",
    "embeddings.position_embeddings": "positions",
    "embeddings.token_type_embeddings": "kinds",
    "embeddings.LayerNorm": "norm",
}
_LAYER_NAMES = {
    "attention.self.query": "attention.query",
    "attention.self.key": "attention.key",
    "attention.self.value": "attention.value",
    "attention.output.dense": "attention_dense",
    "attention.output.LayerNorm": "attention_norm",
    "intermediate.dense": "up",
    "output.dense": "down",
    "output.LayerNorm": "norm",
}


def _renamed(name: str) -> str | None:
    """Our name of a stored tensor; None for those that embeddings have no use for (pooler, heads)."""
    for prefix in PREFIXES:
        name = name.removeprefix(prefix)
    base, _, leaf = name.rpartition(".")
    if base in _NAMES:
        return f"{_NAMES[base]}.{leaf}"
    if base.startswith("encoder.layer."):
        number, _, inner = base.removeprefix("encoder.layer.").partition(".")
        return f"layers.{number}.{_LAYER_NAMES[inner]}.{leaf}" if inner in _LAYER_NAMES else None
    return None


def _pooling(folder: Path) -> str:
    """'mean' unless sentence-transformers' own file says that the first token stands for the text."""
    file = folder / POOLING
    if not file.is_file():
        return "mean"
    settings = read_json_object(file)
    if settings.get("pooling_mode_cls_token"):
        return "cls"
    if settings.get("pooling_mode_mean_tokens", True):
        return "mean"
    raise ModelUnsupported(f"{file} asks for a pooling other than the mean or the first token.")
