"""From a file's metadata to a configuration in Hugging Face's terms, which mlx-lm's definitions read.

Knows: the fields that all architectures share, and that nothing may be dropped: what the metadata says and
the definition would ignore is refused. Knows nothing of single architectures; those are rows of the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlxserve.errors import ModelInvalid, ModelUnsupported
from mlxserve.models.gguf.architectures import Architecture, find_architecture
from mlxserve.models.gguf.file import TensorInfo
from mlxserve.models.gguf.keys import Keys
from mlxserve.models.gguf.rope import read_scaling
from mlxserve.models.gguf.settings import Config

EMBEDDING, HEAD = "token_embd.weight", "output.weight"
# End of text, end of turn, end of message: a generation stops at any of them.
_STOP_IDS = ("eos", "eot", "eom")


def to_config(metadata: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> Config:
    """The configuration of a GGUF model: `model_type`, sizes, RoPE, token ids, `max_position_embeddings`.

    `tensors` decides what metadata does not hold: whether head and embedding are one, which layers have
    biases, the size of the vocabulary. `max_position_embeddings` is cut to a sliding window that the
    definition does not implement: up to there its attention is exact.
    Raises ModelUnsupported (no such architecture, or a setting that its definition would ignore) or
    ModelInvalid (metadata missing or at odds with the tensors).
    """
    row = find_architecture(metadata)
    keys = Keys(metadata, row.name)
    config = _sizes(keys, row, tensors)
    config |= _rope(keys, row, config, tensors)
    config |= row.own_fields(keys, config, frozenset(tensors))
    config |= _biases(row, tensors) | _token_ids(metadata)
    _limit_to_window(keys, config)
    keys.check_all_read()
    return config


def _sizes(keys: Keys, row: Architecture, tensors: Mapping[str, TensorInfo]) -> Config:
    hidden, heads = keys.size("embedding_length"), keys.size("attention.head_count")
    eps_key, eps_field = row.eps
    return {
        "model_type": row.model_type,
        "hidden_size": hidden,
        "num_hidden_layers": keys.size("block_count"),
        "intermediate_size": keys.number("feed_forward_length", 0),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.size("attention.head_count_kv", heads),
        "head_dim": _head_dim(keys, row, hidden, heads),
        eps_field: keys.number(eps_key),
        "vocab_size": _vocabulary(keys, tensors),
        "max_position_embeddings": keys.size("context_length"),
        "tie_word_embeddings": row.head != "own" and HEAD not in tensors,
    }


def _head_dim(keys: Keys, row: Architecture, hidden: int, heads: int) -> int:
    width = keys.size("attention.key_length", hidden // heads)
    if keys.number("attention.value_length", width) != width:
        raise ModelUnsupported("The file's keys and values have heads of different widths.")
    if not row.own_head_dim and width * heads != hidden:
        raise ModelUnsupported(
            f"The file's {heads} heads of width {width} do not make up its hidden size {hidden}, "
            f"which the definition of {row.name} takes for granted."
        )
    return width


def _vocabulary(keys: Keys, tensors: Mapping[str, TensorInfo]) -> int:
    """Rows of the embedding: the metadata's own count may leave padding out."""
    keys.get("vocab_size")
    embedding = tensors.get(EMBEDDING)
    if embedding is None or len(embedding.shape) != 2:
        raise ModelInvalid(f"The file has no matrix {EMBEDDING}; it may hold a vocabulary only.")
    return embedding.shape[0]


def _rope(keys: Keys, row: Architecture, config: Config, tensors: Mapping[str, TensorInfo]) -> Config:
    width, base = config["head_dim"], keys.number("rope.freq_base", 10000.0)
    dims = keys.size("rope.dimension_count", width)
    if dims != width and not row.partial_rotary:
        raise ModelUnsupported(
            f"The file rotates {dims} of {width} dimensions a head, "
            f"which the definition of {row.name} cannot."
        )
    context = config["max_position_embeddings"]
    scaling = read_scaling(keys, tensors, dims=dims, base=base, context=context)
    kind = scaling and (scaling.get("rope_type") or scaling["type"])
    if kind and kind not in row.scalings:
        raise ModelUnsupported(
            f"The file scales positions by {kind}, which the definition of {row.name} does not carry out."
        )
    fields = {"rope_theta": base, "rope_scaling": scaling}
    return {**fields, "partial_rotary_factor": dims / width} if row.partial_rotary else fields


def _biases(row: Architecture, tensors: Mapping[str, TensorInfo]) -> Config:
    """Flags such as `attention_bias`: true where at least one of their tensors has a bias."""
    flags = {flag for flag in row.biases.values() if flag}
    present = {name.removesuffix(".bias").split(".")[-1] for name in tensors if name.endswith(".bias")}
    return {flag: any(row.biases[base] == flag for base in present & set(row.biases)) for flag in flags}


def _token_ids(metadata: Mapping[str, Any]) -> Config:
    ids: Config = {}
    for field, name in (("bos_token_id", "bos"), ("pad_token_id", "padding")):
        value = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if value is not None:
            ids[field] = value
    stops = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in _STOP_IDS]
    ids["eos_token_id"] = list(dict.fromkeys(stop for stop in stops if stop is not None))
    return ids


def _limit_to_window(keys: Keys, config: Config) -> None:
    """A window that no setting has taken up: attention is the same up to its length, so stop there."""
    window = keys.unread("attention.sliding_window")
    if not window or window >= config["max_position_embeddings"]:
        return
    if config["rope_scaling"]:
        raise ModelUnsupported(
            f"The file attends to a window of {window} tokens and scales positions for more, "
            "which its definition does not do together."
        )
    config["max_position_embeddings"] = window
