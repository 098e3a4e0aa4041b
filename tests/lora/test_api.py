"""The Python call: a run from a dict, and how its result looks in a notebook."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from mlxserve.errors import DoesNotFit, UsageError
from mlxserve.lora import RunConfig, finetune
from mlxserve.lora.config import from_dict, write_yaml


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


def test_case_58_refused_before_anything_is_written(tiny_llama: Path, tmp_path: Path) -> None:
    values = _values(tiny_llama, tmp_path)
    with pytest.raises(DoesNotFit, match="--force"):
        finetune(values, budget_bytes=1000)
    assert not (tmp_path / "run <1>").exists()
    finetune(values, budget_bytes=1000, force=True)


@pytest.mark.parametrize("settings", [{"model": ""}, {"lora": {"type": "full"}, "quantize": 4}])
def test_what_makes_no_sense_is_refused(
    tiny_llama: Path, tmp_path: Path, settings: dict[str, object]
) -> None:
    with pytest.raises(UsageError):
        finetune({**_values(tiny_llama, tmp_path), **settings})
