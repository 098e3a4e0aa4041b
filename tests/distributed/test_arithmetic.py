"""Counting: the golden values, and tiny models of which every tensor is really there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from mlxserve.distributed.arithmetic import count, divide, maker_from_config, maker_from_headers
from mlxserve.distributed.facts import Facts, bytes_read, load_bytes
from mlxserve.errors import Unsupported
from mlxserve.models.files import inspect
from tests import tiny

# Counted elsewhere, tensor by tensor: 4 bits in groups of 64. GB are 10^9 bytes, KiB 1024.
GOLDEN = {
    "llama-3.3-70b": (39.688, {2: 20.437, 4: 10.811}, 320),
    "qwen3-235b-a22b": (132.266, {2: 66.510, 4: 33.632}, 188),
    "llama-3.1-405b": (228.298, {2: 115.335, 4: 58.854}, 504),
    "deepseek-v3": (377.607, {2: 189.692, 4: 95.734}, 68.625),
}
# Every kind of tensor-parallel definition that the tiny models have.
DIVISIBLE = [
    "llama",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "gpt_oss",
    "deepseek_v3",
    "glm4_moe",
    "deepseek_v2",
    "mixtral",
]


def config_of(name: str, data: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((data / "configs" / f"{name}.json").read_text())
    return loaded


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_values(name: str, data: Path) -> None:
    config = config_of(name, data)
    total, shares, kv_kib = GOLDEN[name]
    mx.reset_peak_memory()
    before = mx.get_active_memory()  # what other tests left
    facts = count(name, config, maker_from_config(config), (2, 4))
    assert mx.get_peak_memory() - before < 2**20, "something was given memory"
    assert facts.replicated_kv == (name == "deepseek-v3")
    assert facts.kv_bytes(1000, size=2) * (1 if facts.replicated_kv else 2) == facts.kv_bytes(1000)
    assert round(facts.total_bytes / 1e9, 3) == total
    for size, share in shares.items():
        assert round(load_bytes(facts.tensor_load(size)) / 1e9, 3) == share
    assert facts.kv_bytes(1) / 1024 == kv_kib


def facts_of(kind: str, sizes: tuple[int, ...] = (2,)) -> Facts:
    config = tiny.config(kind)
    return count(kind, config, maker_from_config(config), sizes)


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "gpt2", "gemma2", "lfm2", "deepseek_v3", "glm4_moe"])
def test_counted_is_what_a_real_model_weighs(kind: str) -> None:
    model = tiny.build(kind)
    model.set_dtype(mx.bfloat16)
    real = {name: value.nbytes for name, value in tree_flatten(model.parameters())}
    facts = facts_of(kind, ())
    assert {tensor.name: tensor.nbytes for tensor in facts.tensors} == real
    assert facts.layers == len(model.layers)
    assert facts.parameters == sum(value.size for _, value in tree_flatten(model.parameters()))


@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen3_moe", "lfm2", "deepseek_v3"])
def test_stages_hold_everything_once_but_a_tied_embedding(kind: str) -> None:
    facts = facts_of(kind, ())
    cut = facts.layers // 2
    stages = [range(cut), range(cut, facts.layers)]
    held = [{t.name for t in facts.tensors if facts.holds(t, stage)} for stage in stages]
    tied = {tensor.name for tensor in facts.tensors if tensor.place == "ends"}
    assert held[0] | held[1] == {tensor.name for tensor in facts.tensors}
    assert held[0] & held[1] == tied
    assert load_bytes(facts.stage_load(range(facts.layers))) == facts.total_bytes
    assert any("embed" in name or "wte" in name for name in held[0])


def test_a_head_of_its_own_is_on_the_last_rank_only() -> None:
    config = {**tiny.config("llama"), "tie_word_embeddings": False}
    facts = count("untied", config, maker_from_config(config))
    place = {tensor.name: tensor.place for tensor in facts.tensors if tensor.layer is None}
    assert place == {
        "model.embed_tokens.weight": "first",
        "model.norm.weight": "last",
        "lm_head.weight": "last",
    }
    read = {tensor.name: tensor.share for tensor in facts.tensors}
    assert (read["model.embed_tokens.weight"], read["lm_head.weight"]) == (0.0, 1.0)


@pytest.mark.parametrize("kind", DIVISIBLE)
def test_every_rank_of_a_tensor_split_holds_as_much(kind: str) -> None:
    config = tiny.config(kind)
    make = maker_from_config(config)
    shares = [divide(make, config, 2, rank) for rank in range(2)]
    assert shares[0] == shares[1] and isinstance(shares[0], dict), shares[0]
    whole = facts_of(kind, ())
    assert sum(shares[0].values()) < whole.total_bytes < 2 * sum(shares[0].values())


def test_heads_that_do_not_divide_are_refused() -> None:
    facts = facts_of("llama", (2, 3, 4))
    assert facts.refusal(2) is None
    assert "4 attention heads" in str(facts.refusal(3))
    assert "2 K/V heads cannot be divided over 4 ranks" in str(facts.refusal(4))
    assert "gpt2 is not divided by tensors" in str(facts_of("gpt2").refusal(2))
    assert "over 5 ranks" in str(facts.refusal(5))


def test_a_folder_is_counted_as_it_is_stored(tmp_path: Path) -> None:
    folder = tiny.write(tmp_path / "llama", "llama")
    stored = inspect(folder)
    make = maker_from_headers(stored.config, stored.tensors, "llama")
    facts = count("llama", stored.config, make, (2,))
    assert facts.total_bytes == sum(tensor.nbytes for tensor in stored.tensors.values())
    assert facts.form == "float32"
    packed = count(
        "llama", stored.config, maker_from_headers(stored.config, stored.tensors, "llama", 4), (2,)
    )
    assert packed.form == "4 bits in groups of 64" and packed.parameters == facts.parameters
    assert packed.total_bytes < 0.25 * facts.total_bytes


def test_another_toolkits_packing_is_refused() -> None:
    config = {**tiny.config("llama"), "quantization_config": {"quant_method": "awq", "bits": 4}}
    with pytest.raises(Unsupported, match=r"packed by awq; convert it for MLX"):
        maker_from_headers(config, {}, "some-model")


def test_experts_that_are_read() -> None:
    facts = facts_of("qwen3_moe")
    expert = next(tensor for tensor in facts.tensors if "switch_mlp" in tensor.name)
    assert expert.share == 0.5 and facts.has_experts
    load = {0.5: 100, 1.0: 10, 0.0: 7}
    assert [bytes_read(load, tokens) for tokens in (1, 2)] == [60.0, 85.0]
    assert bytes_read(load, 1000) == 110.0


def test_a_digest_names_configuration_and_tensors() -> None:
    config = tiny.config("llama")
    one = count("a", config, maker_from_config(config))
    assert one.digest == count("b", config, maker_from_config(config), (2,)).digest
    assert one.digest != count("a", config, maker_from_config(config, 4)).digest
