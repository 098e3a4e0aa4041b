"""Configuration fields that only some architectures have, read from their metadata.

Knows: for each family, which keys hold them, and what its files leave unsaid. Each function takes the keys,
the common fields (sizes, RoPE) and the names of the file's tensors, and returns fields to add or replace.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mlxserve.errors import ModelInvalid, ModelUnsupported
from mlxserve.models.gguf.keys import Keys

Config = dict[str, Any]
Settings = Callable[[Keys, Config, frozenset[str]], Config]


def nothing(keys: Keys, config: Config, names: frozenset[str]) -> Config:
    return {}


def mixtral(keys: Keys, config: Config, names: frozenset[str]) -> Config:
    return {
        "num_local_experts": keys.size("expert_count"),
        "num_experts_per_tok": keys.size("expert_used_count"),
    }


def qwen3_moe(keys: Keys, config: Config, names: frozenset[str]) -> Config:
    return {
        "num_experts": keys.size("expert_count"),
        "num_experts_per_tok": keys.size("expert_used_count"),
        "moe_intermediate_size": keys.size("expert_feed_forward_length"),
        "norm_topk_prob": bool(keys.get("expert_weights_norm", True)),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def gpt_oss(keys: Keys, config: Config, names: frozenset[str]) -> Config:
    return {
        "num_local_experts": keys.size("expert_count"),
        "num_experts_per_tok": keys.size("expert_used_count"),
        "intermediate_size": keys.size("expert_feed_forward_length"),
        "sliding_window": keys.size("attention.sliding_window"),
        "layer_types": _layer_types(keys, config, default=2),
    }


def gemma2(keys: Keys, config: Config, names: frozenset[str]) -> Config:
    # The definition has no sliding layers: exact up to the window, which is the context given here.
    window = keys.size("attention.sliding_window", 4096)
    keys.get("attention.sliding_window_pattern")
    return {
        "attn_logit_softcapping": keys.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.number("final_logit_softcapping", 30.0),
        "query_pre_attn_scalar": _gemma_query_scale(config, large=46),
        "max_position_embeddings": min(window, config["max_position_embeddings"]),
    }


def gemma3(keys: Keys, config: Config, names: frozenset[str]) -> Config:
    pattern = _period(keys, default=6)
    return {
        # Without a window every layer is global, which is a pattern of 1.
        "sliding_window": keys.number("attention.sliding_window", 0) or 512,
        "sliding_window_pattern": pattern if keys.get("attention.sliding_window") else 1,
        "rope_local_base_freq": keys.number("rope.freq_base_swa", 10000.0),
        "query_pre_attn_scalar": _gemma_query_scale(config, large=62),
    }


def _gemma_query_scale(config: Config, large: int) -> int:
    """The files do not hold it: the 27B models, known by their number of layers, take hidden / heads."""
    if config["num_hidden_layers"] == large:
        return int(config["hidden_size"] // config["num_attention_heads"])
    return int(config["head_dim"])


def granite(keys: Keys, config: Config, names: frozenset[str]) -> Config:
    return {
        "logits_scaling": keys.number("logit_scale"),
        "attention_multiplier": keys.number("attention.scale", 0.0) or config["head_dim"] ** -0.5,
        "embedding_multiplier": keys.number("embedding_scale", 0.0) or 1.0,
        "residual_multiplier": keys.number("residual_scale", 0.0) or 1.0,
    }


def smollm3(keys: Keys, config: Config, names: frozenset[str]) -> Config:
    return {"no_rope_layer_interval": 4}  # every fourth layer; the files do not hold it


def olmo3(keys: Keys, config: Config, names: frozenset[str]) -> Config:
    return {
        "sliding_window": keys.size("attention.sliding_window"),
        "layer_types": _layer_types(keys, config, default=4),
    }


def phi3(keys: Keys, config: Config, names: frozenset[str]) -> Config:
    context = config["max_position_embeddings"]
    return {"original_max_position_embeddings": keys.number("rope.scaling.original_context_length", context)}


def exaone(keys: Keys, config: Config, names: frozenset[str]) -> Config:
    return {"num_layers": config["num_hidden_layers"]}


def cohere(keys: Keys, config: Config, names: frozenset[str]) -> Config:
    return {
        "logit_scale": keys.number("logit_scale"),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in names,
        "layer_norm_bias": False,
    }


def cohere2(keys: Keys, config: Config, names: frozenset[str]) -> Config:
    return {
        "logit_scale": keys.number("logit_scale"),
        "layer_norm_bias": False,
        "sliding_window": keys.size("attention.sliding_window"),
        "sliding_window_pattern": _period(keys, default=4),
    }


def ministral3(keys: Keys, config: Config, names: frozenset[str]) -> Config:
    scaling = config["rope_scaling"]
    if not scaling or scaling["rope_type"] != "yarn":
        raise ModelUnsupported("The file scales attention by position but not its positions by YaRN.")
    temperature = keys.number("attention.temperature_scale")
    return {
        "rope_parameters": {
            **scaling,
            "rope_theta": config["rope_theta"],
            "llama_4_scaling_beta": temperature,
        }
    }


def _period(keys: Keys, default: int) -> int:
    """Sliding pattern as a period: every n-th layer is global, the others slide."""
    pattern = keys.get("attention.sliding_window_pattern", default)
    if not isinstance(pattern, list):
        return int(pattern)
    period = pattern.index(False) + 1 if False in pattern else 0
    if period == 0 or any(slides != ((i + 1) % period != 0) for i, slides in enumerate(pattern)):
        raise ModelUnsupported("The file's sliding layers follow no period, which its definition needs.")
    return period


def _layer_types(keys: Keys, config: Config, default: int) -> list[str]:
    """Sliding pattern as one word a layer."""
    layers = config["num_hidden_layers"]
    pattern = keys.get("attention.sliding_window_pattern", default)
    if not isinstance(pattern, list):
        pattern = [(i + 1) % pattern != 0 for i in range(layers)]
    if len(pattern) != layers:
        raise ModelInvalid(f"The file's sliding pattern has {len(pattern)} entries for {layers} layers.")
    return ["sliding_attention" if slides else "full_attention" for slides in pattern]
