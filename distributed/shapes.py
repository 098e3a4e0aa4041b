"""Well-known models by name: their configurations, so that one can be planned before a byte is fetched.

Knows: what publishers print in config.json, as far as it decides sizes. What is here is in full precision,
as published; gpt-oss keeps its experts in MXFP4. Does not know where files are (`sources`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_LLAMA = {
    "model_type": "llama",
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}
_QWEN3 = {
    "model_type": "qwen3",
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
}
_QWEN3_MOE = {
    **_QWEN3,
    "model_type": "qwen3_moe",
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
_QWEN25 = {
    "model_type": "qwen2",
    "vocab_size": 152064,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
}
_MIXTRAL = {
    "model_type": "mixtral",
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
}
_DEEPSEEK = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "routed_scaling_factor": 2.5,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "qk_nope_head_dim": 128,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "n_group": 8,
    "topk_group": 4,
    "num_experts_per_tok": 8,
    "moe_layer_freq": 1,
    "first_k_dense_replace": 3,
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "vocab_size": 129280,
}
_GPT_OSS = {
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_experts_per_tok": 4,
    "vocab_size": 201088,
    "sliding_window": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "quantization_config": {"quant_method": "mxfp4"},
}
_GLM45 = {
    "model_type": "glm4_moe",
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "vocab_size": 151552,
    "tie_word_embeddings": False,
}


def _sizes(hidden: int, layers: int, heads: int, wide: int) -> dict[str, int]:
    """The four sizes that differ inside a family; `wide` is the feed-forward layers' inner width."""
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": wide,
    }


_TIED = {"tie_word_embeddings": True}

SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.2-1b": {**_LLAMA, **_sizes(2048, 16, 32, 8192), **_TIED, "head_dim": 64},
    "llama-3.2-3b": {**_LLAMA, **_sizes(3072, 28, 24, 8192), **_TIED},
    "llama-3.1-8b": {**_LLAMA, **_sizes(4096, 32, 32, 14336)},
    "llama-3.1-70b": {**_LLAMA, **_sizes(8192, 80, 64, 28672)},
    "llama-3.3-70b": {**_LLAMA, **_sizes(8192, 80, 64, 28672)},
    "llama-3.1-405b": {**_LLAMA, **_sizes(16384, 126, 128, 53248)},
    "qwen2.5-7b": {**_QWEN25, **_sizes(3584, 28, 28, 18944), "num_key_value_heads": 4},
    "qwen2.5-32b": {**_QWEN25, **_sizes(5120, 64, 40, 27648), "num_key_value_heads": 8},
    "qwen2.5-72b": {**_QWEN25, **_sizes(8192, 80, 64, 29568), "num_key_value_heads": 8},
    "qwen3-0.6b": {**_QWEN3, **_sizes(1024, 28, 16, 3072), **_TIED},
    "qwen3-1.7b": {**_QWEN3, **_sizes(2048, 28, 16, 6144), **_TIED},
    "qwen3-4b": {**_QWEN3, **_sizes(2560, 36, 32, 9728), **_TIED},
    "qwen3-8b": {**_QWEN3, **_sizes(4096, 36, 32, 12288)},
    "qwen3-14b": {**_QWEN3, **_sizes(5120, 40, 40, 17408)},
    "qwen3-32b": {**_QWEN3, **_sizes(5120, 64, 64, 25600)},
    "qwen3-30b-a3b": {**_QWEN3_MOE, **_sizes(2048, 48, 32, 6144), "moe_intermediate_size": 768},
    "qwen3-235b-a22b": {**_QWEN3_MOE, **_sizes(4096, 94, 64, 12288), "moe_intermediate_size": 1536},
    "qwen3-coder-480b-a35b": {
        **_QWEN3_MOE,
        **_sizes(6144, 62, 96, 8192),
        "num_key_value_heads": 8,
        "num_experts": 160,
        "moe_intermediate_size": 2560,
        "max_position_embeddings": 262144,
    },
    "mixtral-8x7b": {
        **_MIXTRAL,
        **_sizes(4096, 32, 32, 14336),
        "vocab_size": 32000,
        "max_position_embeddings": 32768,
    },
    "mixtral-8x22b": {
        **_MIXTRAL,
        **_sizes(6144, 56, 48, 16384),
        "vocab_size": 32768,
        "max_position_embeddings": 65536,
    },
    "deepseek-v3": _DEEPSEEK,
    "deepseek-r1": _DEEPSEEK,
    "kimi-k2": {
        **_DEEPSEEK,
        "model_type": "kimi_k2",
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "n_routed_experts": 384,
        "routed_scaling_factor": 2.827,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "max_position_embeddings": 131072,
        "rope_theta": 50000,
        "vocab_size": 163840,
    },
    "gpt-oss-20b": {**_GPT_OSS, "num_hidden_layers": 24, "num_local_experts": 32},
    "gpt-oss-120b": {**_GPT_OSS, "num_hidden_layers": 36, "num_local_experts": 128},
    "glm-4.5": {
        **_GLM45,
        **_sizes(5120, 92, 96, 12288),
        "n_routed_experts": 160,
        "moe_intermediate_size": 1536,
        "first_k_dense_replace": 3,
        "routed_scaling_factor": 2.5,
        "use_qk_norm": True,
    },
    "glm-4.5-air": {
        **_GLM45,
        **_sizes(4096, 46, 96, 10944),
        "n_routed_experts": 128,
        "moe_intermediate_size": 1408,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.0,
        "use_qk_norm": False,
    },
}

# What names carry beside the shape: a tuning, a date, a format.
_EXTRAS = re.compile(
    r"-(instruct|it|base|chat|thinking|hf|mlx|bf16|fp16|fp8|\d{4}|0\d{3}|v0\.\d|mxfp4(-q\d)?|dwq)(?=-|$)"
)
_BITS = re.compile(r"-(\d)-?bits?(?=-|$)")


def find_shape(name: str) -> tuple[Mapping[str, Any], int | None] | None:
    """(configuration, bits that the name says) of a well-known model; None for any other.

    `meta-llama/Llama-3.1-405B-Instruct` and `Llama-3.1-405B-4bit` both mean `llama-3.1-405b`.
    """
    word = name.split("@")[0].rstrip("/").rpartition("/")[2].lower().removeprefix("meta-")
    bits = _BITS.search(word)
    word = _EXTRAS.sub("", _BITS.sub("", word))
    shape = SHAPES.get(word)
    return None if shape is None else (shape, int(bits[1]) if bits else None)
