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
        ({"log": {"to": "wandb"}}, "a list, in brackets, of tensorboard, wandb"),
        ({"train": {"seed": -1}}, "train.seed"),
        ({"train": {"beta": 0}}, "train.beta"),
        ({"lora": {"alpha": 0}}, "lora.alpha"),
        ({"lora": {"targets": []}}, "names no layer"),
        ({"quantize": 7}, "one of 2, 3, 4, 5, 6, 8"),
        ({"eval": {"sample_tokens": 0}}, "at least 1"),
        ({"lora": {"type": "full", "dropout": 0.1}}, "no effect"),
        ({"lora": {"type": "full", "plus_ratio": 4}}, "no effect"),
        ({"train": {"objective": "dpo"}, "data": {"loss_on": "all"}}, "data.loss_on"),
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


def test_a_key_that_stands_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("model: a\nlora: {rank: 2, rank: 3}\n")
    with pytest.raises(UsageError, match="'rank' stands there twice"):
        read_config(tmp_path / "run.yaml")


def test_what_people_write(tmp_path: Path) -> None:
    """A folder named after a day, a share in YAML's other notation, a section that is still empty."""
    (tmp_path / "run.yaml").write_text("model: a\ndata:\n")
    config = read_config(tmp_path / "run.yaml", ["save.dir=2026-11-30", "data.valid=5e-2"])
    assert (config.save.dir, config.data.valid) == ("2026-11-30", 0.05)


def test_scales() -> None:
    assert from_dict({"lora": {"rank": 16, "alpha": 32}}).lora.scale == 2.0
    assert from_dict({"lora": {"rank": 16, "alpha": 32, "rslora": True}}).lora.scale == 8.0


def test_every_setting_is_a_plain_value() -> None:
    assert yaml.safe_load(yaml.safe_dump(to_dict(RunConfig()))) == to_dict(RunConfig())
