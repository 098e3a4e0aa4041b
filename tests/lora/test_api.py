"""The Python call: a run from a dict, and how its result looks in a notebook."""

from __future__ import annotations

import builtins
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
from mlx.utils import tree_flatten

from mlxserve.errors import DependencyMissing, DoesNotFit, UsageError
from mlxserve.lora import RunConfig, api, finetune
from mlxserve.lora.base import open_base, write_model
from mlxserve.lora.config import from_dict, write_yaml
from mlxserve.lora.plan import sizes_of
from mlxserve.models.describe import describe
from tests import tiny


def _values(tiny_llama: Path, folder: Path) -> dict[str, object]:
    (folder / "rows.jsonl").write_text('{"text": "abc"}\n' * 6)
    return {
        "model": str(tiny_llama),
        "data": {"train": str(folder / "rows.jsonl"), "valid": 0.2},
        "train": {"steps": 2, "tokens_per_batch": 64, "max_seq": 32},
        "save": {"dir": str(folder / "run <1>")},
    }


def test_a_result_shows_itself(tiny_llama: Path, tmp_path: Path) -> None:
    events: list[str] = []
    result = finetune(_values(tiny_llama, tmp_path), watch=lambda event: events.append(event["kind"]))
    assert result.adapter == tmp_path / "run <1>" / "final" and result.adapter.is_dir()
    assert events.count("step") == 2 and "eval" in events and "save" in events
    page = result._repr_html_()
    assert "finished after 2 steps" in page and "run &lt;1&gt;" in page
    ElementTree.fromstring(page[page.index("<svg") :])
    assert "best held-out loss" in repr(result)


def test_a_run_is_a_dict_a_config_or_a_file(tiny_llama: Path, tmp_path: Path) -> None:
    config = from_dict(_values(tiny_llama, tmp_path))
    assert isinstance(config, RunConfig)
    (tmp_path / "run.yaml").write_text(write_yaml(config))
    first = finetune(config)
    second = finetune(tmp_path / "run.yaml", settings=[f"save.dir={tmp_path / 'other'}"])
    assert [e["loss"] for e in first.history] == [e["loss"] for e in second.history]
    with pytest.raises(UsageError, match="already holds a run"):
        finetune(config)


def test_case_58_refused_before_anything_is_written(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the weights alone are too large, they are not even loaded."""
    values = _values(tiny_llama, tmp_path)
    with pytest.raises(DoesNotFit, match="--force"):
        finetune(values, budget_bytes=1_600_000)
    with monkeypatch.context() as patched, pytest.raises(DoesNotFit, match="--force"):
        patched.setattr(api, "open_base", lambda *_, **__: pytest.fail("the model was loaded"))
        finetune(values, budget_bytes=1000)
    assert not (tmp_path / "run <1>").exists()
    finetune(values, budget_bytes=1000, force=True)


@pytest.mark.parametrize("settings", [{"model": ""}, {"lora": {"type": "full"}, "quantize": 4}])
def test_what_makes_no_sense_is_refused(
    tiny_llama: Path, tmp_path: Path, settings: dict[str, object]
) -> None:
    with pytest.raises(UsageError):
        finetune({**_values(tiny_llama, tmp_path), **settings})


def test_settings_lie_over_a_dict_too(tiny_llama: Path, tmp_path: Path) -> None:
    values = _values(tiny_llama, tmp_path)
    other = tmp_path / "other"
    assert finetune(values, settings=[f"save.dir={other}", "train.steps=1"]).outcome.steps == 1
    assert finetune(from_dict(values), settings=["train.steps=1"]).outcome.steps == 1
    assert values["train"] == {"steps": 2, "tokens_per_batch": 64, "max_seq": 32}


@pytest.mark.parametrize("name", ["config.yaml", "best", "final"])
def test_a_persons_own_files_are_not_replaced(tiny_llama: Path, tmp_path: Path, name: str) -> None:
    """A run would write over a config.yaml, and rename away folders of its names."""
    values = {**_values(tiny_llama, tmp_path), "save": {"dir": str(tmp_path)}}
    if name == "config.yaml":
        (tmp_path / name).write_text("mine")
    else:
        (tmp_path / name).mkdir()
    before = sorted(tmp_path.iterdir())
    with pytest.raises(UsageError, match=f"already holds {name}"):
        finetune(values)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"save": {"dir": "FOLDER/rows.jsonl"}}, "is no folder"),
        ({"save": {"dir": "FOLDER/rows.jsonl/run"}}, "is no folder"),
        ({"data": {"train": "FOLDER/none.jsonl"}}, "no file .*none.jsonl"),
        ({"data": {"train": "FOLDER/rows.jsonl", "valid": "FOLDER/none.jsonl"}}, "data.valid"),
        ({"eval": {"samples": "FOLDER/none.txt"}}, "eval.samples cannot be read"),
        ({"eval": {"samples": "FOLDER/empty.txt"}}, "holds no prompt"),
        ({"log": {"to": ["wandb"]}}, "pip install wandb"),
    ],
)
def test_what_is_wrong_is_told_before_the_model_is_loaded(
    tmp_path: Path, settings: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    monkeypatch.setattr(api, "open_base", lambda *_, **__: pytest.fail("the model was loaded"))
    values = _values(tmp_path, tmp_path)
    (tmp_path / "empty.txt").write_text("\n")
    there = json.loads(json.dumps({**values, **settings}).replace("FOLDER", str(tmp_path)))
    with pytest.raises((UsageError, DependencyMissing), match=words):
        finetune(there)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty.txt", "rows.jsonl"]


def test_patience_needs_something_held_out(tiny_llama: Path, tmp_path: Path) -> None:
    values = {**_values(tiny_llama, tmp_path), "eval": {"patience": 2}}
    with pytest.raises(UsageError, match="set data.valid"):
        finetune({**values, "data": {"train": str(tmp_path / "rows.jsonl")}})


def test_samples_need_nothing_held_out(tiny_llama: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("one?\n")
    values = _values(tiny_llama, tmp_path)
    values["data"] = {"train": str(tmp_path / "rows.jsonl")}
    values["eval"] = {"samples": str(tmp_path / "prompts.txt"), "every": 1, "sample_tokens": 3}
    result = finetune(values)
    lines = (result.adapter.parent / "samples.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]


def test_a_notebook_sees_the_run_while_it_trains(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stand-ins for IPython's shell and its display handle."""
    import IPython.display

    pages: list[str] = []
    handle = SimpleNamespace(update=lambda shown: pages.append(shown._repr_html_()))
    monkeypatch.setattr(builtins, "get_ipython", lambda: SimpleNamespace(kernel=1), raising=False)
    monkeypatch.setattr(IPython.display, "display", lambda shown, display_id: handle)
    finetune(_values(tiny_llama, tmp_path))
    assert "1 of 2" in pages[0] and "<svg" in pages[0] and pages[-1] == ""


def test_packing_a_packed_model_otherwise_is_refused(tmp_path: Path) -> None:
    base = open_base(str(tiny.write(tmp_path / "float", "llama")), quantize=4, group_size=32)
    write_model(tmp_path / "packed", base, base.model)
    values = _values(tmp_path / "packed", tmp_path)
    with pytest.raises(UsageError, match="packed in 4 bits already"):
        finetune({**values, "quantize": 8})
    result = finetune({**values, "quantize": 4})
    planned = sizes_of(result.config, describe(str(tmp_path / "packed")), on_cpu=True)["weight_bytes"]
    loaded = sum(value.nbytes for _, value in tree_flatten(base.model.parameters()))
    assert planned == pytest.approx(loaded, rel=0.3)  # a quarter of what floats would take
