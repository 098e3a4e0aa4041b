"""What a rank keeps of each matrix, against dividing real weights; and what of an adapter goes with it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlxserve.distributed import sharding
from mlxserve.distributed.division import Division, divide, linear_shapes
from mlxserve.distributed.sharding import shard_model
from mlxserve.distributed.trace import FakeGroup
from mlxserve.errors import ModelInvalid, Unsupported
from mlxserve.models.adapters import Adapter, read
from mlxserve.models.multilora import AdapterStack
from tests import tiny
from tests.adapters import write_adapter

KINDS = ("llama", "qwen3_moe", "gpt_oss", "deepseek_v3", "glm4_moe", "mixtral", "qwen3_5")


def divided(kind: str, rank: int, size: int = 2) -> nn.Module:
    model = tiny.build(kind)
    shard_model(model, FakeGroup(rank, size), kind)
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_rows_and_columns_are_those_of_the_divided_weights(kind: str) -> None:
    """Layers by outputs, by inputs, whole, in place, and of several matrices side by side."""
    config, whole = tiny.config(kind), dict(tiny.build(kind).named_modules())
    shapes = linear_shapes(tiny.build(kind))
    parts = set()
    for rank in (0, 1):
        mine = dict(divided(kind, rank).named_modules())
        for path, kept in divide(config, shapes, rank, 2).items():
            assert kept is not None
            expected = np.array(whole[path].weight)[np.ix_(kept.rows, kept.columns)]
            assert np.array_equal(np.array(mine[path].weight), expected), path
            parts.add((len(kept.rows) < shapes[path][1], len(kept.columns) < shapes[path][0]))
    assert {(True, False), (False, True)} <= parts and (True, True) not in parts


def test_an_adapters_parts_add_up_to_it(tmp_path: Path) -> None:
    """The rank's own delta of each matrix is that part of the whole delta; a DoRA's lengths go with rows."""
    folder = write_adapter(tmp_path / "a", tiny.build("llama"), 1, dora=True)
    adapter = read(folder)
    for rank in (0, 1):
        model = divided("llama", rank)
        part = Division(model, tiny.config("llama"), rank, 2).part(adapter)
        for path, layer in model.named_modules():
            if path not in adapter.scales:
                continue
            delta = part.arrays[f"{path}.lora_a"] @ part.arrays[f"{path}.lora_b"]
            full = adapter.arrays[f"{path}.lora_a"] @ adapter.arrays[f"{path}.lora_b"]
            outputs, inputs = layer.weight.shape
            by_rows = outputs < full.shape[1]
            place = slice(rank * outputs, None) if by_rows else slice(None)
            expected = full[:, place][:, :outputs] if by_rows else full[rank * inputs :][:inputs]
            assert mx.allclose(delta, expected, atol=1e-6)
            assert mx.array_equal(part.arrays[f"{path}.m"], adapter.arrays[f"{path}.m"][place][:outputs])
        AdapterStack(model, mx.float32).add(part)


def _shuffled(model: nn.Module, group: Any) -> None:
    """A division that trace.py cannot follow: every other row by an index array."""
    for layer in model.layers:
        projection = layer.mlp.up_proj
        projection.weight = projection.weight[mx.arange(group.rank(), projection.weight.shape[0], 2)]


def test_what_does_not_fit_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    division = Division(divided("qwen3_moe", 0), tiny.config("qwen3_moe"), 0, 2)
    small = write_adapter(tmp_path / "small", tiny.build("llama", hidden_size=32), 1)
    with pytest.raises(ModelInvalid, match=r"mlp\.down_proj does not exist in this model"):
        division.part(read(small))
    experts = read(small)
    experts.scales = {"model.layers.0.mlp.switch_mlp.up_proj": 1.0}
    with pytest.raises(Unsupported, match=r"layers\.0\.mlp\.switch_mlp\.up_proj, a layer of experts"):
        division.part(experts)
    monkeypatch.setitem(sharding.OWN_RULES, "gemma2", _shuffled)
    model = tiny.build("gemma2")
    shard_model(model, FakeGroup(1, 2), "gemma2")
    odd = Division(model, tiny.config("gemma2"), 1, 2)
    changes: Callable[[str], Adapter] = lambda ending: read(
        write_adapter(tmp_path / ending, tiny.build("gemma2"), 1, endings=(ending,))
    )
    with pytest.raises(Unsupported, match=r"model\.layers\.0\.mlp\.up_proj, which this .*--split pipeline:N"):
        odd.part(changes("up_proj"))
    assert odd.part(changes("down_proj")).paths, "layers beside it are served"
