"""Each row of the table: a tiny random model, written as a GGUF file and read again, gives its own logits."""

from __future__ import annotations

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
from tests.models.gguf.examples import EXAMPLES, NORMAL, UNTIED, Example, Extra, layer_norm, written


@pytest.mark.parametrize("name", EXAMPLES)
def test_logits_of_a_written_model(name: str, tmp_path: Path) -> None:
    example = EXAMPLES[name]
    model, path = written(example, tmp_path)
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
    _, path = written(EXAMPLES["llama-untied"], tmp_path)
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
            layer_norm(w),
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
    _, path = written(refused, tmp_path)
    with pytest.raises(ModelUnsupported, match=words):
        open_gguf(path).config()


def test_neutral_settings_are_accepted(tmp_path: Path) -> None:
    def neutral(writer: GGUFWriter) -> None:
        writer.add_expert_count(0)
        writer.add_causal_attention(True)
        writer.add_string("llama.tensor_data_layout", "Meta AI original pth")
        writer.add_rope_scaling_type(RopeScalingType.NONE)
        writer.add_rope_dimension_count(16)

    _, path = written(Example("llama", "llama", NORMAL, neutral), tmp_path)
    assert open_gguf(path).config()["rope_scaling"] is None


def test_layers_of_different_sizes_are_refused(tmp_path: Path) -> None:
    _, path = written(EXAMPLES["llama"], tmp_path)
    file = open_gguf(path)
    file.metadata = {**file.metadata, "llama.attention.head_count_kv": [2, 2, 1]}
    with pytest.raises(ModelUnsupported, match="layer by layer"):
        file.config()


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    _, path = written(EXAMPLES["llama"], tmp_path)
    file = open_gguf(path)
    file.metadata = {k: v for k, v in file.metadata.items() if k != "llama.block_count"}
    with pytest.raises(ModelInvalid, match="llama.block_count"):
        file.config()


@pytest.mark.parametrize(
    ("value", "words"), [("three", "no number"), (True, "no number"), (0, "no size"), (2.5, "no size")]
)
def test_values_that_are_no_sizes_are_named(value: object, words: str, tmp_path: Path) -> None:
    _, path = written(EXAMPLES["llama"], tmp_path)
    file = open_gguf(path)
    file.metadata = {**file.metadata, "llama.attention.head_count": value}
    with pytest.raises(ModelInvalid, match=rf"llama\.attention\.head_count is .*{words}"):
        file.config()


def test_a_window_without_sliding_layers_bounds_the_context(tmp_path: Path) -> None:
    def window(writer: GGUFWriter) -> None:
        writer.add_sliding_window(2047)

    _, path = written(Example("phi3", "phi3", UNTIED, window), tmp_path)
    assert open_gguf(path).config()["max_position_embeddings"] == 2047


@pytest.mark.parametrize(("layers", "expected"), [(3, 32), (46, 16)])
def test_the_largest_gemma2_scales_queries_by_hidden_size(layers: int, expected: int, tmp_path: Path) -> None:
    _, path = written(EXAMPLES["gemma2"], tmp_path)
    file = open_gguf(path)
    file.metadata = {**file.metadata, "gemma2.block_count": layers}
    assert file.config()["query_pre_attn_scalar"] == expected


def test_generation_defaults(tmp_path: Path) -> None:
    def sampling(writer: GGUFWriter) -> None:
        writer.add_sampling_temp(0.5)
        writer.add_sampling_top_k(20)

    _, path = written(Example("llama", "llama", NORMAL, sampling), tmp_path)
    assert open_gguf(path).generation_defaults() == {"temperature": 0.5, "top_k": 20}


def test_description(tmp_path: Path) -> None:
    model, path = written(EXAMPLES["llama"], tmp_path)
    file = open_gguf(path)
    numbers = sum(value.size for value in writing.weights_of(model).values())
    assert (file.parameters, file.size_in_bytes) == (numbers, 4 * numbers)
    assert file.types == {"F32": len(file.tensors)}
