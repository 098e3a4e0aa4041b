"""One tiny model for each row of the table of architectures, with the metadata of its GGUF file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter, RopeScalingType

from tests.models.gguf import writing

BASE: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": 288,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
WIDE = {"head_dim": 32}  # heads * width is not the hidden size
NORMAL = {"head_dim": 16}
EXPERTS = {"num_experts_per_tok": 2}
Extra = Callable[[GGUFWriter], Any]


@dataclass
class Example:
    """An architecture in a file, the configuration that it must come out as, and its own metadata."""

    architecture: str
    model_type: str
    config: dict[str, Any] = field(default_factory=dict)
    extra: Extra = lambda writer: None
    norm_center: float = 1.0
    tensors: dict[str, np.ndarray] = field(default_factory=dict)

    def settings(self) -> dict[str, Any]:
        return {"model_type": self.model_type, **BASE, **self.config}


def _experts(writer: GGUFWriter) -> None:
    writer.add_expert_count(4)
    writer.add_expert_used_count(2)


def _qwen3_moe(writer: GGUFWriter) -> None:
    _experts(writer)
    writer.add_expert_feed_forward_length(32)


def _gpt_oss(writer: GGUFWriter) -> None:
    _experts(writer)
    writer.add_expert_feed_forward_length(96)
    writer.add_sliding_window(8)
    writer.add_rope_scaling_type(RopeScalingType.YARN)
    writer.add_rope_scaling_factor(32.0)
    writer.add_rope_scaling_orig_ctx_len(64)


def _gemma2(writer: GGUFWriter) -> None:
    writer.add_attn_logit_softcapping(20.0)
    writer.add_final_logit_softcapping(15.0)
    writer.add_sliding_window(2048)


def _gemma3(writer: GGUFWriter) -> None:
    writer.add_sliding_window(8)
    writer.add_sliding_window_pattern(3)
    writer.add_rope_scaling_type(RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(8.0)


def _granite(writer: GGUFWriter) -> None:
    writer.add_attention_scale(0.3)
    writer.add_embedding_scale(3.0)
    writer.add_residual_scale(0.5)
    writer.add_logit_scale(2.0)


def _olmo3(writer: GGUFWriter) -> None:
    writer.add_sliding_window(8)
    writer.add_sliding_window_pattern([True, False, True])


def layer_norm(writer: GGUFWriter) -> None:
    writer.add_layer_norm_eps(1e-5)


def _cohere(writer: GGUFWriter) -> None:
    layer_norm(writer)
    writer.add_logit_scale(0.25)
    writer.add_rope_scaling_type(RopeScalingType.NONE)


def _cohere2(writer: GGUFWriter) -> None:
    _cohere(writer)
    writer.add_sliding_window(8)
    writer.add_sliding_window_pattern(3)


def _ministral3(writer: GGUFWriter) -> None:
    writer.add_rope_scaling_type(RopeScalingType.YARN)
    writer.add_rope_scaling_factor(4.0)
    writer.add_rope_scaling_orig_ctx_len(16)
    writer.add_rope_scaling_yarn_log_mul(1.0)
    writer.add_attn_temperature_scale(0.1)


def _longrope(writer: GGUFWriter) -> None:
    writer.add_rope_dimension_count(12)
    writer.add_rope_scaling_type(RopeScalingType.LONGROPE)
    writer.add_rope_scaling_orig_ctx_len(1024)
    writer.add_rope_scaling_attn_factors((1 + np.log(4) / np.log(1024)) ** 0.5)


LONG, SHORT = np.linspace(1, 4, 6, dtype=np.float32), np.linspace(1, 2, 6, dtype=np.float32)
UNTIED = {"tie_word_embeddings": False}
YARN32 = {
    "rope_type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
EXAMPLES = {
    "llama": Example("llama", "llama", NORMAL),
    "llama-untied": Example("llama", "llama", {**NORMAL, **UNTIED}),
    "llama-biases": Example("llama", "llama", {**NORMAL, "attention_bias": True, "mlp_bias": True}),
    "mistral": Example("llama", "llama", {**WIDE, **UNTIED}),
    "mistral-named": Example("mistral", "mistral", {**WIDE, **UNTIED}),
    "mistral3": Example("mistral3", "mistral", {**WIDE, **UNTIED}),
    "ministral3": Example(
        "mistral3",
        "ministral3",
        {
            **WIDE,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "rope_theta": 10000.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
        _ministral3,
    ),
    "mixtral": Example("llama", "mixtral", {**EXPERTS, "num_local_experts": 4, **UNTIED}, _experts),
    "qwen2": Example("qwen2", "qwen2"),
    "qwen3": Example("qwen3", "qwen3", WIDE),
    "qwen3moe": Example(
        "qwen3moe",
        "qwen3_moe",
        {
            **WIDE,
            **EXPERTS,
            **UNTIED,
            "num_experts": 4,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
        _qwen3_moe,
    ),
    "gpt-oss": Example(
        "gpt-oss",
        "gpt_oss",
        {
            **NORMAL,
            **EXPERTS,
            "num_local_experts": 4,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_scaling": YARN32,
        },
        _gpt_oss,
    ),
    "gemma": Example("gemma", "gemma", WIDE, norm_center=0.0),
    "gemma2": Example(
        "gemma2",
        "gemma2",
        {
            **WIDE,
            "attn_logit_softcapping": 20.0,
            "final_logit_softcapping": 15.0,
            "query_pre_attn_scalar": 32,
        },
        _gemma2,
        norm_center=0.0,
    ),
    "gemma3": Example(
        "gemma3",
        "gemma3_text",
        {
            **WIDE,
            "sliding_window": 8,
            "sliding_window_pattern": 3,
            "query_pre_attn_scalar": 32,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
        _gemma3,
        norm_center=0.0,
    ),
    "phi3": Example("phi3", "phi3", UNTIED),
    "phi3-longrope": Example(
        "phi3",
        "phi3",
        {
            "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": 1024,
            "rope_scaling": {
                "type": "longrope",
                "long_factor": LONG.tolist(),
                "short_factor": SHORT.tolist(),
            },
        },
        _longrope,
        tensors={"rope_factors_long.weight": LONG, "rope_factors_short.weight": SHORT},
    ),
    "granite": Example(
        "granite",
        "granite",
        {
            "attention_bias": False,
            "mlp_bias": False,
            "attention_multiplier": 0.3,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "logits_scaling": 2.0,
        },
        _granite,
    ),
    "olmo2": Example("olmo2", "olmo2", NORMAL),
    "olmo3": Example(
        "olmo2",
        "olmo3",
        {
            **NORMAL,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        _olmo3,
    ),
    "seed_oss": Example("seed_oss", "seed_oss", {**WIDE, "attention_bias": True}),
    "smollm3": Example("smollm3", "smollm3", {**NORMAL, "num_hidden_layers": 5}),
    "starcoder2": Example("starcoder2", "starcoder2", {"norm_epsilon": 1e-5}, layer_norm),
    "exaone": Example("exaone", "exaone", {"num_layers": 3, "layer_norm_epsilon": 1e-5, **NORMAL}),
    "command-r": Example("command-r", "cohere", {"layer_norm_eps": 1e-5, "logit_scale": 0.25}, _cohere),
    "command-r-plus": Example(
        "command-r", "cohere", {"layer_norm_eps": 1e-5, "logit_scale": 0.25, "use_qk_norm": True}, _cohere
    ),
    "cohere2": Example(
        "cohere2",
        "cohere2",
        {
            **NORMAL,
            "layer_norm_eps": 1e-5,
            "logit_scale": 0.25,
            "sliding_window": 8,
            "sliding_window_pattern": 3,
        },
        _cohere2,
    ),
}


def written(example: Example, folder: Path, **options: Any) -> tuple[Any, Path]:
    config = example.settings()
    model = writing.build(config, norm_center=example.norm_center)
    path = writing.write(
        folder / "tiny.gguf",
        example.architecture,
        writing.weights_of(model),
        config,
        extra=example.extra,
        tensors=example.tensors,
        **options,
    )
    return model, path
