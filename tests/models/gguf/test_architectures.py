"""Each row of the table: a tiny random model, written as a GGUF file and read again, gives its own logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGUFWriter, RopeScalingType

from mlxserve.errors import ModelInvalid, ModelUnsupported
from mlxserve.models.gguf import open_gguf
from mlxserve.models.gguf.architectures import TABLE, supported
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


def _layer_norm(writer: GGUFWriter) -> None:
    writer.add_layer_norm_eps(1e-5)


def _cohere(writer: GGUFWriter) -> None:
    _layer_norm(writer)
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
    "starcoder2": Example("starcoder2", "starcoder2", {"norm_epsilon": 1e-5}, _layer_norm),
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


def _written(example: Example, folder: Path, **options: Any) -> tuple[Any, Path]:
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


@pytest.mark.parametrize("name", EXAMPLES)
def test_logits_of_a_written_model(name: str, tmp_path: Path) -> None:
    example = EXAMPLES[name]
    model, path = _written(example, tmp_path)
    file = open_gguf(path)
    config = file.config()
    assert config["model_type"] == example.model_type
    again = writing.load(config, file.weights().arrays)
    np.testing.assert_allclose(writing.logits(again), writing.logits(model), atol=1e-4)


def test_every_row_has_an_example() -> None:
    shown = {(example.architecture, example.model_type) for example in EXAMPLES.values()}
    assert shown == {(row.name, row.model_type) for row in TABLE}


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row.name}-{row.model_type}")
def test_tensor_names_are_the_formats_own(row: Any) -> None:
    kind = writing.ARCHITECTURES["llama" if row.name == "mistral" else row.name]
    known = {gguf.TENSOR_NAMES[tensor].format(bid="") for tensor in gguf.MODEL_TENSORS[kind]}
    assert set(row.block) <= {name.removeprefix("blk..") for name in known}
    assert set(row.ends) - {"output"} <= known


def test_config_is_complete(tmp_path: Path) -> None:
    _, path = _written(EXAMPLES["llama-untied"], tmp_path)
    config = open_gguf(path).config()
    expected = {
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 288,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": [2, 3],
        "attention_bias": False,
    }
    assert {key: config[key] for key in expected} == expected


def test_an_unknown_architecture_is_named(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "odd.gguf", "rwkv9")
    writing.finish(writer)
    with pytest.raises(ModelUnsupported, match="rwkv9.*llama.*qwen3moe") as caught:
        open_gguf(tmp_path / "odd.gguf").config()
    assert all(name in str(caught.value) for name in supported())


@pytest.mark.parametrize(
    ("what", "name"), [("clip", "image projector"), ("llama", "adapter")], ids=["projector", "adapter"]
)
def test_other_kinds_of_file_are_refused(what: str, name: str, tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "other.gguf", what)
    writer.add_type("model" if what == "clip" else "adapter")
    writing.finish(writer)
    with pytest.raises(ModelUnsupported, match=name):
        open_gguf(tmp_path / "other.gguf").config()


REFUSED: dict[str, tuple[str, Extra, str]] = {
    "soft cap": ("llama", lambda w: w.add_attn_logit_softcapping(30.0), "attn_logit_softcapping"),
    "clamp": ("qwen2", lambda w: w.add_clamp_kqv(8.0), "clamp_kqv"),
    "attention scale": ("qwen3", lambda w: w.add_attention_scale(0.5), "attention.scale"),
    "experts": ("qwen3", lambda w: w.add_expert_count(8), "expert_count"),
    "encoder": ("qwen3", lambda w: w.add_causal_attention(False), "encoder"),
    "partial rotary": ("llama", lambda w: w.add_rope_dimension_count(8), "rotates 8 of 16"),
    "value width": (
        "qwen3",
        lambda w: w.add_float32("qwen3.attention.value_length_mla", 3.0),
        "value_length",
    ),
    "scaling": (
        "starcoder2",
        lambda w: (
            _layer_norm(w),
            w.add_rope_scaling_type(RopeScalingType.LINEAR),
            w.add_rope_scaling_factor(2.0),
        ),
        "linear",
    ),
    "yarn attention": (
        "llama",
        lambda w: (
            w.add_rope_scaling_type(RopeScalingType.YARN),
            w.add_rope_scaling_factor(2.0),
            w.add_rope_scaling_yarn_attn_factor(1.5),
        ),
        "attention factor",
    ),
    "other scaling": (
        "llama",
        lambda w: (w.add_string("llama.rope.scaling.type", "ntk"), w.add_rope_scaling_factor(2.0)),
        "ntk",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_settings_that_would_be_ignored_are_refused(case: str, tmp_path: Path) -> None:
    name, extra, words = REFUSED[case]
    example = EXAMPLES[name]
    refused = Example(name, example.model_type, example.config, extra)
    _, path = _written(refused, tmp_path)
    with pytest.raises(ModelUnsupported, match=words):
        open_gguf(path).config()


def test_neutral_settings_are_accepted(tmp_path: Path) -> None:
    def neutral(writer: GGUFWriter) -> None:
        writer.add_expert_count(0)
        writer.add_causal_attention(True)
        writer.add_string("llama.tensor_data_layout", "Meta AI original pth")
        writer.add_rope_scaling_type(RopeScalingType.NONE)
        writer.add_rope_dimension_count(16)

    _, path = _written(Example("llama", "llama", NORMAL, neutral), tmp_path)
    assert open_gguf(path).config()["rope_scaling"] is None


def test_layers_of_different_sizes_are_refused(tmp_path: Path) -> None:
    _, path = _written(EXAMPLES["llama"], tmp_path)
    file = open_gguf(path)
    file.metadata = {**file.metadata, "llama.attention.head_count_kv": [2, 2, 1]}
    with pytest.raises(ModelUnsupported, match="layer by layer"):
        file.config()


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    _, path = _written(EXAMPLES["llama"], tmp_path)
    file = open_gguf(path)
    file.metadata = {k: v for k, v in file.metadata.items() if k != "llama.block_count"}
    with pytest.raises(ModelInvalid, match="llama.block_count"):
        file.config()


def test_a_window_without_sliding_layers_bounds_the_context(tmp_path: Path) -> None:
    def window(writer: GGUFWriter) -> None:
        writer.add_sliding_window(2047)

    _, path = _written(Example("phi3", "phi3", UNTIED, window), tmp_path)
    assert open_gguf(path).config()["max_position_embeddings"] == 2047


@pytest.mark.parametrize(("layers", "expected"), [(3, 32), (46, 16)])
def test_the_largest_gemma2_scales_queries_by_hidden_size(layers: int, expected: int, tmp_path: Path) -> None:
    _, path = _written(EXAMPLES["gemma2"], tmp_path)
    file = open_gguf(path)
    file.metadata = {**file.metadata, "gemma2.block_count": layers}
    assert file.config()["query_pre_attn_scalar"] == expected


def test_generation_defaults(tmp_path: Path) -> None:
    def sampling(writer: GGUFWriter) -> None:
        writer.add_sampling_temp(0.5)
        writer.add_sampling_top_k(20)

    _, path = _written(Example("llama", "llama", NORMAL, sampling), tmp_path)
    assert open_gguf(path).generation_defaults() == {"temperature": 0.5, "top_k": 20}


def test_description(tmp_path: Path) -> None:
    model, path = _written(EXAMPLES["llama"], tmp_path)
    file = open_gguf(path)
    numbers = sum(value.size for value in writing.weights_of(model).values())
    assert (file.parameters, file.size_in_bytes) == (numbers, 4 * numbers)
    assert file.types == {"F32": len(file.tensors)}
