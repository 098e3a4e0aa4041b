"""Tiny random models and a byte tokenizer, for tests that need no download.

`config(kind)` is a complete configuration of one architecture with layers and widths cut down;
`build(kind)` the mlx-lm definition with seeded float32 weights; `write(folder, kind)` the same as a
model folder in Hugging Face layout. Token i of the byte tokenizer is byte i; see `BYTE_SPECIALS`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

VOCAB = 288
# Token 256.. of the byte tokenizer, in this order.
BYTE_SPECIALS = (
    "<|bos|>",
    "<|eos|>",
    "<|im_start|>",
    "<|im_end|>",
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
)
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_BASE: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 256,
    "eos_token_id": 257,
}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
_ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
}
_MLA = {
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}
_YARN = {
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
_GATED_DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
}
_EXTRA: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {**_MOE, "decoder_sparse_step": 1, "mlp_only_layers": []},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gemma2": {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "query_pre_attn_scalar": 16},
    "gemma3_text": {"sliding_window": 8, "sliding_window_pattern": 3, "query_pre_attn_scalar": 16},
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "phi3": {},
    "cohere2": {"sliding_window": 8, "sliding_window_pattern": 3, "layer_norm_eps": 1e-5, "logit_scale": 1.0},
    "olmo2": {},
    "olmo3": {"sliding_window": 8, "num_hidden_layers": 4},
    "glm4": {"partial_rotary_factor": 0.5, "attention_bias": False},
    "granite": {
        "logits_scaling": 1.0,
        "attention_multiplier": 0.25,
        "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "attention_bias": False,
        "mlp_bias": False,
    },
    "smollm3": {},
    "starcoder2": {"norm_epsilon": 1e-5},
    "gpt2": {
        "n_ctx": 128,
        "n_embd": 64,
        "n_head": 4,
        "n_layer": 3,
        "n_positions": 128,
        "layer_norm_epsilon": 1e-5,
    },
    "seed_oss": {},
    "exaone4": {
        "rope_scaling": {"rope_type": "default"},
        "sliding_window": 8,
        "sliding_window_pattern": "LLG",
    },
    "llama4_text": {
        "intermediate_size_mlp": 128,
        "no_rope_layers": [1, 1, 0],
        "use_qk_norm": True,
    },
    "glm4_moe": {
        **_ROUTED,
        "num_key_value_heads": 2,
        "rope_scaling": None,
        "use_qk_norm": True,
        "attention_bias": False,
        "partial_rotary_factor": 0.5,
    },
    "deepseek_v2": {**_MLA, **_ROUTED, "rope_scaling": _YARN},
    "deepseek_v3": {**_MLA, **_ROUTED, "rope_scaling": _YARN},
    "qwen3_next": {
        **_MOE,
        **_GATED_DELTA,
        "num_hidden_layers": 4,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "shared_expert_intermediate_size": 32,
        "partial_rotary_factor": 0.5,
    },
    "qwen3_5": {
        **_GATED_DELTA,
        "num_hidden_layers": 4,
        "rope_parameters": {"type": "default", "rope_theta": 1e4},
    },
    "lfm2": {
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 64,
        "block_multiple_of": 16,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "block_ff_dim": 128,
        "full_attn_idxs": [1],
    },
    "granitemoehybrid": {
        "num_hidden_layers": 4,
        "attention_bias": False,
        "embedding_multiplier": 1.0,
        "attention_multiplier": 0.25,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
        "layer_types": ["mamba", "mamba", "attention", "mamba"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 32,
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_proj_bias": False,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_n_groups": 1,
        "mamba_conv_bias": True,
    },
    "mamba2": {
        "num_heads": 8,
        "head_dim": 16,
        "state_size": 16,
        "layer_norm_epsilon": 1e-5,
        "conv_kernel": 4,
        "n_groups": 1,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_limit": [0.0, 100.0],
        "time_step_rank": 8,
    },
}


def kinds() -> list[str]:
    """Every architecture that this file can make."""
    return sorted(_EXTRA)


def config(kind: str, **overrides: Any) -> dict[str, Any]:
    """A small but complete configuration of architecture `kind`."""
    return {"model_type": kind, **_BASE, **_EXTRA[kind], **overrides}


def build(kind: str, seed: int = 0, **overrides: Any) -> Any:
    """mlx-lm's definition of `kind` with seeded random float32 weights, evaluated.

    Weights are stirred well beyond their initial size, so that greedy answers do not repeat one token.
    """
    import mlx.core as mx
    from mlx.utils import tree_flatten, tree_unflatten

    from mlxserve.models.definitions import find_definition

    settings = config(kind, **overrides)
    module = find_definition(settings)
    mx.random.seed(seed)
    model = module.Model(module.ModelArgs.from_dict(settings))
    stirred = [
        (name, value + 0.3 * mx.random.normal(value.shape))
        for name, value in tree_flatten(model.parameters())
    ]
    model.update(tree_unflatten(stirred))
    model.eval()
    mx.eval(model.parameters())
    return model


def byte_tokenizer_json(special: bool = True) -> dict[str, Any]:
    """A `tokenizer.json`: token i is byte i, then BYTE_SPECIALS; no merges, no BOS added."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = _byte_alphabet()
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    if special:
        tokenizer.add_special_tokens(list(BYTE_SPECIALS))
    return json.loads(tokenizer.to_str())


def _byte_alphabet() -> list[str]:
    """GPT-2's printable stand-in for each byte, in byte order."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    stand_ins, spare = {}, 256
    for byte in range(256):
        if byte in printable:
            stand_ins[byte] = chr(byte)
        else:
            stand_ins[byte] = chr(spare)
            spare += 1
    return [stand_ins[byte] for byte in range(256)]


def write_tokenizer(folder: Path, chat_template: str | None = CHATML, **settings: Any) -> Path:
    """The byte tokenizer as Hugging Face files in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(byte_tokenizer_json()))
    values = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    if chat_template is not None:
        values["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps({**values, **settings}))
    return folder


def write(
    folder: Path, kind: str = "llama", seed: int = 0, *, tokenizer: bool = True, **overrides: Any
) -> Path:
    """A whole model folder: config.json, model.safetensors, tokenizer files. Returns `folder`."""
    import mlx.core as mx
    from mlx.utils import tree_flatten

    folder.mkdir(parents=True, exist_ok=True)
    model = build(kind, seed, **overrides)
    (folder / "config.json").write_text(json.dumps(config(kind, **overrides), indent=1))
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    if tokenizer:
        write_tokenizer(folder)
    return folder
