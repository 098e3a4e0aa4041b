"""What becomes of a file's tensors: order of rows, tied heads, packed form, and refusals that name them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize, quantize

from mlxserve.errors import ModelInvalid, ModelUnsupported
from mlxserve.models.gguf import GGUFFile, open_gguf
from tests.models.gguf import writing
from tests.models.gguf.examples import EXAMPLES

LLAMA = EXAMPLES["llama"].settings()
UNTIED = EXAMPLES["llama-untied"].settings()


def _file(path: Path, name: str = "llama", **options: Any) -> tuple[Any, GGUFFile]:
    example = EXAMPLES[name]
    config = example.settings()
    model = writing.build(config)
    weights = options.pop("weights", writing.weights_of(model))
    options.setdefault("extra", example.extra)
    return model, open_gguf(writing.write(path, example.architecture, weights, config, **options))


def _mixed(name: str) -> Kind:
    """Most packable types in one model, and floats."""
    if name.endswith(("norm.weight", ".bias")):
        return Kind.F32
    for part, kind in (
        ("token_embd", Kind.Q8_0),
        ("attn_q", Kind.Q4_0),
        ("attn_k", Kind.Q4_1),
        ("attn_v", Kind.Q5_0),
        ("attn_output", Kind.Q5_1),
        ("ffn_down", Kind.F16),
        ("ffn_up", Kind.BF16),
        ("ffn_gate", Kind.MXFP4),
    ):
        if part in name:
            return kind
    return Kind.Q4_0


def _rounded(weights: dict[str, np.ndarray], kinds: Any) -> dict[str, np.ndarray]:
    """The model's weights as its file's types round them, in the model's own order of rows."""
    stored = writing.as_stored("llama", weights, LLAMA)
    rounded = {name: dequantize(quantize(v, kinds(name)), kinds(name)) for name, v in stored.items()}
    back = {}
    for name, value in weights.items():
        (file_name,) = writing.as_stored("llama", {name: value}, LLAMA)
        got = rounded[file_name]
        if "q_proj" in name or "k_proj" in name:
            heads = LLAMA["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
            got = _deinterleave(got, heads)
        back[name] = got
    return back


def _deinterleave(value: np.ndarray, heads: int) -> np.ndarray:
    """Row by row, so that it cannot share a mistake with the code."""
    width = value.shape[0] // heads
    out = np.empty_like(value)
    for head in range(heads):
        for row in range(width):
            source = 2 * row if row < width // 2 else 2 * (row - width // 2) + 1
            out[head * width + row] = value[head * width + source]
    return out


def test_case_47_rows_of_q_and_k_are_put_back_by_their_own_heads(tmp_path: Path) -> None:
    assert (LLAMA["num_attention_heads"], LLAMA["num_key_value_heads"]) == (4, 2)
    weights = writing.weights_of(writing.build(LLAMA))
    _, file = _file(tmp_path / "a.gguf", weights=weights)
    arrays = file.weights().arrays
    for name in ("q_proj", "k_proj", "v_proj"):
        full = f"model.layers.1.self_attn.{name}.weight"
        np.testing.assert_array_equal(np.array(arrays[full]), weights[full])
    stored = file.tensors["blk.1.attn_k.weight"].data.view(np.float32)
    assert not np.array_equal(stored, weights["model.layers.1.self_attn.k_proj.weight"])


def test_case_47_quantised_rows_move_as_blocks(tmp_path: Path) -> None:
    model, file = _file(tmp_path / "a.gguf", kinds=_mixed)
    rounded = _rounded(writing.weights_of(model), _mixed)
    arrays = file.weights().arrays
    assert arrays.keys() == rounded.keys()
    for name, value in rounded.items():
        np.testing.assert_array_equal(np.array(arrays[name]), value, err_msg=name)


def test_packed_weights_give_the_logits_of_the_floats(tmp_path: Path) -> None:
    _, file = _file(tmp_path / "a.gguf", kinds=_mixed)
    config = file.config()
    expected = writing.logits(writing.load(config, file.weights().arrays))
    packed = file.weights(mode="packed")
    model = writing.load({**config, "quantization": packed.quantization}, packed.arrays)
    np.testing.assert_allclose(writing.logits(model), expected, atol=1e-4)


def test_packed_report_and_quantization(tmp_path: Path) -> None:
    _, file = _file(tmp_path / "b.gguf", kinds=_mixed)
    packed = file.weights(mx.float16, "packed")
    assert packed.report.keys() == file.tensors.keys()
    assert packed.report["blk.0.attn_q.weight"] == "repacked"
    assert packed.report["blk.0.ffn_down.weight"] == "float"
    assert packed.report["output_norm.weight"] == "float"
    quantization = packed.quantization
    assert quantization is not None and (quantization["group_size"], quantization["bits"]) == (32, 4)
    assert quantization["model.embed_tokens"] == {"group_size": 32, "bits": 8, "mode": "affine"}
    five_bits = {"group_size": 32, "bits": 5, "mode": "affine"}
    assert quantization["model.layers.2.self_attn.v_proj"] == five_bits
    assert quantization["model.layers.2.mlp.gate_proj"]["mode"] == "mxfp4"
    assert packed.arrays["model.layers.2.mlp.gate_proj.scales"].dtype == mx.uint8
    assert "model.layers.2.self_attn.q_proj" not in quantization
    assert packed.arrays["model.embed_tokens.scales"].dtype == mx.float16
    assert set(file.weights().report.values()) == {"dequantised", "float"}


def test_scales_too_large_for_float16_stay_floats(tmp_path: Path) -> None:
    weights = writing.weights_of(writing.build(LLAMA))
    name = "model.layers.0.self_attn.v_proj.weight"
    weights[name] = weights[name] * np.float32(1e6)
    _, file = _file(tmp_path / "a.gguf", weights=weights, kinds=_mixed)
    packed = file.weights(mx.float16, "packed")
    assert packed.report["blk.0.attn_v.weight"] == "dequantised"
    assert packed.report["blk.1.attn_v.weight"] == "repacked"


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_float_dtype_is_selectable(dtype: mx.Dtype, tmp_path: Path) -> None:
    _, file = _file(tmp_path / "a.gguf", kinds=_mixed)
    assert {value.dtype for value in file.weights(dtype).arrays.values()} == {dtype}


def test_packed_experts_give_the_logits_of_the_floats(tmp_path: Path) -> None:
    example = EXAMPLES["qwen3moe"]

    def kinds(name: str) -> Kind:
        return Kind.Q4_1 if "exps" in name else Kind.F32

    _, file = _file(tmp_path / "a.gguf", "qwen3moe", kinds=kinds, extra=example.extra)
    config = file.config()
    packed = file.weights(mode="packed")
    assert packed.report["blk.0.ffn_up_exps.weight"] == "repacked"
    model = writing.load({**config, "quantization": packed.quantization}, packed.arrays)
    expected = writing.logits(writing.load(config, file.weights().arrays))
    np.testing.assert_allclose(writing.logits(model), expected, atol=1e-4)


# Case 49, as far as a format goes that has no flag for tied weights: a head is there or not.


def test_case_49_tied_without_a_head(tmp_path: Path) -> None:
    model, file = _file(tmp_path / "a.gguf")
    assert file.config()["tie_word_embeddings"] and "output.weight" not in file.tensors
    np.testing.assert_allclose(
        writing.logits(writing.load(file.config(), file.weights().arrays)), writing.logits(model), atol=1e-4
    )


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_case_49_tied_with_a_head_present(name: str, tmp_path: Path) -> None:
    model = writing.build(EXAMPLES[name].settings())
    embedding = writing.weights_of(model)["model.embed_tokens.weight"]
    _, file = _file(tmp_path / "a.gguf", name, tensors={"output.weight": embedding})
    again = writing.load(file.config(), file.weights().arrays)
    np.testing.assert_allclose(writing.logits(again), writing.logits(model), atol=1e-4)


def test_case_49_untied_without_its_head_is_named(tmp_path: Path) -> None:
    _, file = _file(tmp_path / "a.gguf", "gpt-oss", drop=("output.weight",))
    with pytest.raises(ModelInvalid, match=r"output\.weight"):
        file.weights()


def test_another_head_than_the_definition_can_use_is_refused(tmp_path: Path) -> None:
    other = np.ones((288, 64), np.float32)
    _, file = _file(tmp_path / "a.gguf", "gemma2", tensors={"output.weight": other})
    with pytest.raises(ModelUnsupported, match=r"output\.weight"):
        file.weights()


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    _, file = _file(tmp_path / "a.gguf", drop=("blk.2.ffn_up.weight",))
    with pytest.raises(ModelInvalid, match=r"blk\.2\.ffn_up\.weight"):
        file.weights()


def test_a_missing_bias_is_named_where_the_definition_needs_it(tmp_path: Path) -> None:
    _, file = _file(tmp_path / "a.gguf", "qwen2", drop=("blk.1.attn_k.bias",))
    with pytest.raises(ModelInvalid, match=r"blk\.1\.attn_k\.bias"):
        file.weights()


def test_biases_that_a_file_leaves_out_are_zeros(tmp_path: Path) -> None:
    config = EXAMPLES["llama-biases"].settings()
    model = writing.build(config)
    weights = writing.weights_of(model)
    dropped = tuple(f"blk.{i}.attn_output.bias" for i in range(3))
    _, file = _file(tmp_path / "a.gguf", "llama-biases", weights=weights, drop=dropped)
    again = writing.load(file.config(), file.weights().arrays)
    zeroed = {n: np.zeros_like(v) if n.endswith("o_proj.bias") else v for n, v in weights.items()}
    np.testing.assert_allclose(
        writing.logits(again), writing.logits(writing.replaced(model, zeroed)), atol=1e-4
    )


@pytest.mark.parametrize("name", ["blk.0.attn_q_norm.weight", "blk.7.attn_q.weight", "blk.0.attn_q.scale"])
def test_a_tensor_without_a_place_is_named(name: str, tmp_path: Path) -> None:
    _, file = _file(tmp_path / "a.gguf", tensors={name: np.ones((4, 4), np.float32)})
    with pytest.raises(ModelUnsupported, match=name.replace(".", r"\.")):
        file.weights()


def test_old_tables_of_frequencies_are_left_out(tmp_path: Path) -> None:
    table = {"blk.0.attn_rot_embd.weight": np.ones(8, np.float32)}
    _, file = _file(tmp_path / "a.gguf", tensors=table)
    assert not any("rot" in name for name in file.weights().arrays)
