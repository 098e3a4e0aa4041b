"""Names of models that are not on this disk: the Hub is asked for headers, and a known shape stands in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mlxserve.distributed.hosts import parse_hosts
from mlxserve.distributed.plan import make_plan
from mlxserve.distributed.sources import facts_of
from mlxserve.errors import ModelInvalid, ModelNotFound
from tests import tiny
from tests.models.fake_hub import FakeHub, serve, use


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    with serve() as running:
        use(monkeypatch, running.url, tmp_path / "cache")
        yield running


def test_of_a_model_on_the_hub_only_headers_travel(hub: FakeHub, tmp_path: Path) -> None:
    folder = tiny.write(tmp_path / "llama", "llama")
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    hub.add("org/model", files)
    facts = facts_of("org/model", sizes=(2,))
    local = facts_of(str(folder), sizes=(2,))
    assert facts.tensors == local.tensors and facts.tensor_parallel == local.tensor_parallel
    assert "" not in hub.transfers("model.safetensors")  # never the whole file
    assert not (tmp_path / "cache").exists() or not list((tmp_path / "cache").rglob("*.safetensors"))
    plan = make_plan(facts, parse_hosts(["2x16GB"]), 100, "pipeline")
    assert plan.shares[0].files == ("model.safetensors",)


def test_a_known_shape_stands_in_for_a_model_that_the_hub_does_not_show(hub: FakeHub) -> None:
    hub.add("org/Llama-3.2-1B-Instruct-4bit", {"config.json": b"{}", "model.safetensors": b"-"}, gated=True)
    facts = facts_of("org/Llama-3.2-1B-Instruct-4bit")
    assert facts.parameters == 1_235_814_400 and facts.form == "4 bits in groups of 64"
    assert any("built-in table" in note and "gated" in note for note in facts.notes)
    with pytest.raises(ModelNotFound, match="no model 'org/unheard-of'"):
        facts_of("org/unheard-of")


def test_damaged_files_are_not_glossed_over(hub: FakeHub) -> None:
    hub.add("org/Llama-3.2-1B", {"config.json": b"{}", "model.safetensors.index.json": b"{}"})
    with pytest.raises(ModelInvalid, match="weight_map"):
        facts_of("org/Llama-3.2-1B")
