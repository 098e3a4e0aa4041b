"""Stacked adapters on one model: each row as if its adapter were fused, and nothing loaded in part."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlxserve.errors import ModelInvalid, ModelUnsupported, Unsupported
from mlxserve.models.adapters import Adapter, digest_of, read
from mlxserve.models.multilora import AdapterStack
from tests import tiny
from tests.adapters import fuse, write_adapter

TOKENS = mx.array(np.random.default_rng(3).integers(0, 256, (4, 12)))


def _stack(model: nn.Module, *folders: Path) -> tuple[AdapterStack, list[int]]:
    stack = AdapterStack(model, mx.float32)
    return stack, [stack.add(read(folder)) for folder in folders]


@pytest.mark.parametrize("kind", ["llama", "qwen2"])  # without and with a bias on the adapted layers
def test_mixed_rows_are_as_fused_models(tmp_path: Path, kind: str) -> None:
    model = tiny.build(kind)
    folders = [
        write_adapter(tmp_path / "a", model, 1, rank=4),
        write_adapter(
            tmp_path / "b", model, 2, rank=7, scale=0.5, endings=("self_attn.q_proj", "mlp.up_proj")
        ),
        write_adapter(tmp_path / "c", model, 3, rank=2, endings=("self_attn.q_proj",), dora=True),
    ]
    plain = np.array(model(TOKENS))
    stack, ids = _stack(model, *folders)
    rows = [ids[0], ids[1], 0, ids[2]]
    with stack.call(np.repeat(rows, TOKENS.shape[1])):
        mixed = np.array(model(TOKENS))
    for row, folder in zip((0, 1, 3), folders):
        truth = np.array(fuse(tiny.build(kind), folder)(TOKENS[row][None]))[0]
        np.testing.assert_allclose(mixed[row], truth, atol=2e-3, rtol=1e-3)
        assert np.abs(truth - plain[row]).max() > 0.5
    np.testing.assert_array_equal(mixed[2], plain[2])
    with stack.call(np.full(TOKENS.size, ids[1])):
        np.testing.assert_allclose(np.array(model(TOKENS))[1], mixed[1], atol=1e-3, rtol=1e-3)


def test_short_runs_and_long_runs_agree(tmp_path: Path) -> None:
    """Runs of one row are gathered, long ones taken apart."""
    model = tiny.build("llama")
    folders = [write_adapter(tmp_path / name, model, seed) for seed, name in enumerate("ab")]
    stack, (a, b) = _stack(model, *folders)
    short = np.tile([a, 0, b], 16)
    tokens = mx.array(np.random.default_rng(0).integers(0, 256, (48, 1)))
    order = np.argsort(short, kind="stable")
    with stack.call(short):
        scattered = np.array(model(tokens))
    with stack.call(short[order]):
        grouped = np.array(model(tokens[mx.array(order)]))
    np.testing.assert_allclose(grouped, scattered[order], atol=1e-3, rtol=1e-3)


def test_the_base_stays_as_it_was(tmp_path: Path) -> None:
    model = tiny.build("llama")
    before = dict(tree_flatten(model.parameters()))
    classes = {path: type(module) for path, module in model.named_modules()}
    plain = np.array(model(TOKENS))
    folder = write_adapter(tmp_path / "a", model, 1)
    stack, (first,) = _stack(model, folder)
    second = stack.add(read(folder))
    after = dict(tree_flatten(model.parameters()))
    assert before.keys() == after.keys() and all(after[name] is before[name] for name in before)
    np.testing.assert_array_equal(np.array(model(TOKENS)), plain)
    held = stack.nbytes
    stack.remove(first)
    assert 0 < stack.nbytes < held
    with stack.call(np.full(TOKENS.size, second)):
        assert np.abs(np.array(model(TOKENS)) - plain).max() > 0.5
    stack.remove(second)
    assert stack.nbytes == 0
    assert classes == {path: type(module) for path, module in model.named_modules()}


def test_quantised_layers(tmp_path: Path) -> None:
    model = tiny.build("llama")
    folder = write_adapter(tmp_path / "a", model, 1, endings=("self_attn.q_proj",), dora=True)
    dense = tiny.build("llama")
    for one in (model, dense):
        nn.quantize(one, group_size=32, bits=8)
    for layer in dense.model.layers:
        packed = layer.self_attn.q_proj
        layer.self_attn.q_proj = nn.Linear(packed.weight.shape[1] * 4, packed.weight.shape[0], bias=False)
        layer.self_attn.q_proj.weight = mx.dequantize(packed.weight, packed.scales, packed.biases, 32, 8)
    stack, (member,) = _stack(model, folder)
    with stack.call(np.full(TOKENS.size, member)):
        got = np.array(model(TOKENS))
    np.testing.assert_allclose(got, np.array(fuse(dense, folder)(TOKENS)), atol=5e-3, rtol=1e-3)


def test_case_52_every_key_must_match(tmp_path: Path) -> None:
    model = tiny.build("llama")
    good = read(write_adapter(tmp_path / "a", model, 1))
    stack = AdapterStack(model, mx.float32)
    q = "model.layers.0.self_attn.q_proj"

    def refused(match: str, **changes: mx.array | None) -> None:
        arrays = {**good.arrays, **{name: v for name, v in changes.items() if v is not None}}
        gone = [name for name, value in changes.items() if value is None]
        for name in gone:
            del arrays[name]
        with pytest.raises(ModelInvalid, match=match):
            stack.add(Adapter("lora", arrays, good.scales, "org/other"))

    refused("lacks model.layers.0.self_attn.q_proj.lora_b", **{f"{q}.lora_b": None})
    refused(r"lora_a has shape \[4, 64\]", **{f"{q}.lora_a": good.arrays[f"{q}.lora_a"].T})
    with pytest.raises(ModelInvalid, match=r"other\.q_proj does not exist .* made for org/other"):
        stack.add(Adapter("lora", good.arrays, {**good.scales, "other.q_proj": 1.0}, "org/other"))
    with pytest.raises(ModelInvalid, match="adapts no layer"):
        stack.add(Adapter("lora", {}, {}))
    with pytest.raises(Unsupported, match="fuse"):
        stack.add(Adapter("full", good.arrays, {}))
    assert stack.nbytes == 0 and not any(hasattr(m, "_factors") for _, m in model.named_modules())


def test_experts_are_refused_by_name() -> None:
    model = tiny.build("qwen3_moe")
    path = next(p for p, _ in model.named_modules() if p.endswith("switch_mlp.up_proj"))
    arrays = {f"{path}.lora_a": mx.zeros((4, 2, 64)), f"{path}.lora_b": mx.zeros((4, 32, 2))}
    with pytest.raises(Unsupported, match="a layer of experts"):
        AdapterStack(model, mx.float32).add(Adapter("lora", arrays, {path: 1.0}))


def test_a_layer_that_sees_other_rows_is_named(tmp_path: Path) -> None:
    model = tiny.build("llama")
    stack, (member,) = _stack(model, write_adapter(tmp_path / "a", model, 1))
    with stack.call(np.array([0, member])), pytest.raises(ModelUnsupported, match="q_proj sees 48 rows"):
        model(TOKENS)


def test_both_formats_are_the_same_adapter(tmp_path: Path) -> None:
    model = tiny.build("llama")
    for dora in (False, True):
        ours = read(write_adapter(tmp_path / f"m{dora}", model, 5, dora=dora))
        theirs = read(write_adapter(tmp_path / f"p{dora}", model, 5, dora=dora, form="peft"))
        assert ours.scales == theirs.scales
        for name, value in ours.arrays.items():
            np.testing.assert_array_equal(np.array(value), np.array(theirs.arrays[name]))
    assert digest_of(tmp_path / "mTrue") != digest_of(tmp_path / "mFalse")
