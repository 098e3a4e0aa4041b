"""Settings: YAML, overrides, and a clear sentence for everything that is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from mlxserve.errors import UsageError
from mlxserve.lora.config import RunConfig, from_dict, read_config, to_dict, write_yaml


def test_defaults_survive_a_round_trip() -> None:
    assert from_dict(yaml.safe_load(write_yaml(RunConfig()))) == RunConfig()


def test_settings_lie_over_the_file(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("model: a\nlora: {rank: 4, alpha: 8}\ntrain: {lr: 1e-4}\n")
    config = read_config(tmp_path / "run.yaml", ["lora.rank=16", "train.schedule=linear", "data.valid=0.1"])
    assert (config.model, config.lora.rank, config.lora.alpha) == ("a", 16, 8.0)
    assert (config.train.lr, config.train.schedule, config.data.valid) == (1e-4, "linear", 0.1)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"lora": {"ranc": 4}}, "did you mean 'rank'"),
        ({"modell": "x"}, "did you mean 'model'"),
        ({"lora": {"rank": "four"}}, "lora.rank must be a whole number"),
        ({"lora": {"rank": True}}, "lora.rank"),
        ({"lora": {"rank": 0}}, "at least 1"),
        ({"lora": {"type": "lore"}}, "one of lora, dora, full"),
        ({"data": {"valid": 1.5}}, "share in (0, 1)"),
        ({"train": {"lr": -1}}, "above 0"),
        ({"train": {"lr": "nan"}}, "train.lr"),
        ({"log": {"to": ["mlflow"]}}, "log.to"),
        ({"train": [1]}, "keys and values"),
        ({"train": {"packing": True, "objective": "dpo"}}, "packing"),
    ],
)
def test_wrong_settings_are_refused_by_name(values: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        from_dict(values)
    assert words in caught.value.message


@pytest.mark.parametrize("setting", ["rank", "=3", "model.rank.a=3", "lora.rank=[1"])
def test_malformed_overrides_are_refused(tmp_path: Path, setting: str) -> None:
    (tmp_path / "run.yaml").write_text("model: a\n")
    with pytest.raises(UsageError):
        read_config(tmp_path / "run.yaml", [setting])


def test_scales() -> None:
    assert from_dict({"lora": {"rank": 16, "alpha": 32}}).lora.scale == 2.0
    assert from_dict({"lora": {"rank": 16, "alpha": 32, "rslora": True}}).lora.scale == 8.0


def test_every_setting_is_a_plain_value() -> None:
    assert yaml.safe_load(yaml.safe_dump(to_dict(RunConfig()))) == to_dict(RunConfig())
