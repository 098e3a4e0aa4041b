"""What a run needs, before it runs: counts that are exact, an estimate that is near, a clear refusal."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from mlxserve.errors import DoesNotFit
from mlxserve.lora.config import from_dict
from mlxserve.lora.layers import add_adapters
from mlxserve.lora.optim import Optimizer
from mlxserve.lora.plan import Plan, plan_run, plan_within, what_fits
from tests import tiny


def _plan(kind: str = "llama", *, checkpointing: bool = False, **sections: Any) -> Plan:
    config = from_dict(sections)
    return plan_run(config, tiny.config(kind), weight_bytes=1000, float_bytes=4, checkpointing=checkpointing)


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
@pytest.mark.parametrize(
    "lora",
    [
        {},
        {"type": "full"},
        {"type": "full", "layers": 1},
        {"targets": ["q_proj"], "layers": 2, "type": "dora"},
    ],
)
def test_trainable_tensors_are_counted_exactly(kind: str, lora: dict[str, Any]) -> None:
    config = from_dict({"lora": lora})
    model = tiny.build(kind)
    add_adapters(model, config.lora)
    real = {name: tuple(value.shape) for name, value in tree_flatten(model.trainable_parameters())}
    plan = _plan(kind, lora=lora)
    assert dict(plan.tensors) == real
    assert plan.trainable == sum(value.size for _, value in tree_flatten(model.trainable_parameters()))


@pytest.mark.parametrize("name", ["adamw", "adamw8bit", "lion", "muon", "adafactor"])
def test_optimizer_bytes(name: str) -> None:
    shapes = {"a": mx.zeros((512, 256)), "b": mx.zeros((256, 512))}
    real = Optimizer(from_dict({"train": {"optimizer": name}}), shapes).nbytes
    from mlxserve.lora.plan import STATE_BYTES

    assert STATE_BYTES[name] * 2 * 512 * 256 == pytest.approx(real, rel=0.05, abs=0.12 * 2 * 512 * 256)


def test_checkpointing_and_short_rows_need_less() -> None:
    assert _plan(checkpointing=True).activation_bytes < _plan().activation_bytes
    assert _plan(train={"max_seq": 256}).activation_bytes < _plan().activation_bytes
    assert _plan(quantize=4).trainable == _plan().trainable


def test_case_58_what_cannot_fit_is_refused_with_both_numbers() -> None:
    plan = _plan()
    plan.require(plan.needed_bytes)
    with pytest.raises(DoesNotFit) as caught:
        plan.require(plan.needed_bytes - 1)
    assert caught.value.needed_bytes == caught.value.available_bytes + 1
    assert "--force" in caught.value.message


def test_what_fits_grows_with_memory() -> None:
    config = from_dict({})

    def rows(budget: int) -> int:
        found = what_fits(config, tiny.config("llama"), budget, weight_bytes=0, float_bytes=4)
        return sum(row["rows"] for row in found)

    assert rows(0) == 0 < rows(2**27) < rows(2**30)


def test_a_pair_is_counted_whole() -> None:
    settings = {"tokens_per_batch": 64, "max_seq": 129}
    assert _plan(train=settings).tokens == 128
    assert _plan(train={**settings, "objective": "dpo"}).tokens == 256
    assert (
        _plan(train={**settings, "objective": "dpo", "tokens_per_batch": 9999, "rows_per_batch": 2}).tokens
        == 512
    )


def test_checkpointing_by_itself_is_planned_as_it_is_trained() -> None:
    def planned(budget_bytes: int, **train: Any) -> bool:
        config = from_dict({"train": train})
        return plan_within(
            budget_bytes, lambda on: _plan(checkpointing=on, train=train), config
        ).checkpointing

    plain = _plan().needed_bytes
    assert not planned(10 * plain)
    assert planned(plain) and not planned(plain, checkpointing=False)
