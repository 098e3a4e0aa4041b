"""Cuts a configuration down to a model of a few hundred kilobytes with the same kinds of layers.

Knows: the names that architectures give to widths, counts, windows and thresholds. The result is for
models/check.py, which needs the structure and not the size; if a cut does not fit, the next is milder.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

CHECK_TOKENS = 64

# Everything that counts tokens must bite inside CHECK_TOKENS, or the check would not see it.
_TOKENS = {
    "sliding_window": 8,
    "sliding_window_size": 8,
    "attention_window_size": 8,
    "window_size": 8,
    "attention_chunk_size": 16,
    "floor_scale": 16,
    "original_max_position_embeddings": 32,
    "index_topk": 16,
}
_COUNTS = {
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_heads": 4,
    "num_key_value_heads": 2,
    "num_kv_heads": 2,
    "vocab_size": 128,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 0,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "index_n_heads": 2,
}
_WIDTHS = {
    "hidden_size": 64,
    "d_model": 64,
    "n_embd": 64,
    "dim": 64,
    "block_dim": 64,
    "conv_dim": 64,
    "conv_dim_out": 64,
    "lru_width": 64,
    "intermediate_size": 128,
    "intermediate_size_mlp": 128,
    "n_inner": 128,
    "block_ff_dim": 128,
    "ffn_dim": 128,
    "ffn_hidden_size": 128,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32,
    "expert_ffn_hidden_size": 32,
    "head_dim": 16,
    "v_head_dim": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "index_head_dim": 32,
    "state_size": 16,
    "mamba_d_state": 16,
    "mamba_d_head": 16,
    "mamba_head_dim": 16,
    "ssm_state_size": 16,
    "time_step_rank": 8,
    "vocab_size_per_layer_input": 128,
    "hidden_size_per_layer_input": 16,
}
_LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_PERIODS = (
    "sliding_window_pattern",
    "full_attention_interval",
    "attn_layer_period",
    "global_attn_every_n_layers",
)
_QUANTISED = ("quantization", "quantization_config")


def shrunk(config: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Ever milder cuts of `config`: all sizes, then only counts and layers, then only layers."""
    for tables in ((_TOKENS, _COUNTS, _WIDTHS), (_TOKENS, {"vocab_size": 128}), (_TOKENS,)):
        yield _cut(config, tables)


def _cut(config: Mapping[str, Any], tables: tuple[Mapping[str, int], ...]) -> dict[str, Any]:
    small = {key: value for key, value in config.items() if key not in _QUANTISED}
    for table in tables:
        for key, limit in table.items():
            if isinstance(small.get(key), int) and not isinstance(small[key], bool):
                small[key] = min(small[key], limit)
    if _WIDTHS in tables:
        _mend_mamba(small)
        _mend_head_dim(small, config)
    _cut_layers(small)
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(small.get(key), dict):
            small[key] = _cut_rope(small[key], small if _WIDTHS in tables else None)
    if isinstance(small.get("text_config"), dict):
        small["text_config"] = _cut(small["text_config"], tables)
    return small


def _mend_mamba(small: dict[str, Any]) -> None:
    """Keep heads × head width = expand × hidden size, which mamba2-like layers need."""
    hidden = small.get("hidden_size", 64)
    for heads, width, expand in (
        ("mamba_n_heads", "mamba_d_head", "mamba_expand"),
        ("mamba_num_heads", "mamba_head_dim", "expand"),
    ):
        if heads in small and width in small:
            small[heads] = max(1, int(small.get(expand, 2)) * hidden // small[width])
    if small.get("model_type") == "mamba2":
        small["num_heads"] = int(small.get("expand", 2)) * hidden // small["head_dim"]
    for groups in ("mamba_n_groups", "n_groups"):
        if isinstance(small.get(groups), int):
            small[groups] = 1 if small[groups] == 1 else 2


def _mend_head_dim(small: dict[str, Any], config: Mapping[str, Any]) -> None:
    """Heads keep their ratio to K/V heads where it was 1 (no grouping)."""
    heads, kv_heads = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if heads is not None and heads == kv_heads:
        small["num_key_value_heads"] = small["num_attention_heads"]


def _cut_layers(small: dict[str, Any]) -> None:
    name = next((key for key in _LAYER_COUNTS if isinstance(small.get(key), int)), None)
    if name is None:
        return
    total = small[name]
    count = min(total, _layers_needed(small, total))
    small[name] = count
    for key, value in list(small.items()):
        if _per_layer(value, total):
            small[key] = value[:count]


def _per_layer(value: Any, layers: int) -> bool:
    """True for a list, or a pattern such as "M*M-", with one entry a layer."""
    pattern = isinstance(value, list) or (isinstance(value, str) and set(value) <= set("M*-E|"))
    return pattern and len(value) == layers


def _layers_needed(small: Mapping[str, Any], total: int) -> int:
    """The shortest run of first layers that has every kind of layer; 4 where nothing tells their kinds.

    (Architectures whose pattern is not in the configuration repeat it every 4 layers or fewer.)
    """
    needed = 4
    for value in small.values():
        if _per_layer(value, total) and all(isinstance(v, str | int | float | bool) for v in value):
            needed = max(needed, *(list(value).index(kind) + 1 for kind in set(value)))
    for key in _PERIODS:
        if isinstance(small.get(key), int):
            needed = max(needed, small[key])
    indices = small.get("full_attn_idxs") or small.get("attn_layer_indices") or []
    return max(needed, *(index + 1 for index in indices[:1])) if indices else needed


def _cut_rope(rope: Mapping[str, Any], small: Mapping[str, Any] | None) -> dict[str, Any]:
    """Thresholds below the check's tokens; per-frequency lists as long as the cut head needs."""
    cut: dict[str, Any] = {}
    for key, value in rope.items():
        if isinstance(value, dict):
            cut[key] = _cut_rope(value, small)
        elif key in _TOKENS and isinstance(value, int):
            cut[key] = min(value, _TOKENS[key])
        elif isinstance(value, list) and key.endswith("_factor") and small is not None:
            heads = small.get("num_attention_heads") or 1
            width = small.get("head_dim") or small.get("hidden_size", 64) // heads
            width = int(
                width * (rope.get("partial_rotary_factor") or small.get("partial_rotary_factor") or 1.0)
            )
            cut[key] = value[: width // 2]
        else:
            cut[key] = value
    return cut
