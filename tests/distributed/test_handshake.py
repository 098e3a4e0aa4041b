"""The handshake: every difference between ranks is refused by name, and equal ranks pass."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import version

import pytest

from mlxserve.distributed.faults import Mismatch
from mlxserve.distributed.handshake import Identity, Versions, same_model, same_versions

NAMES = ["rank 0 (mac1)", "rank 1 (mac2)", "rank 2 (mac3)"]
HERE = Versions("0.1.0", "0.32.4", "0.32.2", "3.11")
MODEL = Identity("tensor:3", "float32", "c1", "t1", {"embed": "aa", "layers.0.q": "bb"})


def test_versions_of_this_process_are_those_of_its_packages() -> None:
    here = Versions.here()
    assert here.mlx == version("mlx") and here.mlx_lm == version("mlx-lm")
    assert Versions.read(here.plain()) == here


def test_equal_ranks_pass() -> None:
    same_versions(NAMES, [HERE] * 3)
    same_model(NAMES, [MODEL] * 3)
    assert Identity.read(MODEL.plain()) == MODEL


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mlxserve": "0.2.0"}, "rank 2 (mac3) has mlxserve 0.2.0, and rank 0 (mac1) has mlxserve 0.1.0"),
        ({"mlx": "0.31.0"}, "has mlx 0.31.0"),
        ({"mlx_lm": ""}, "has no mlx-lm, and rank 0 (mac1) has mlx-lm 0.32.2"),
        ({"python": "3.12"}, "has Python 3.12"),
    ],
)
def test_another_version_is_refused_by_name(change: dict[str, str], words: str) -> None:
    with pytest.raises(Mismatch) as refused:
        same_versions(NAMES, [HERE, HERE, replace(HERE, **change)])
    assert words in refused.value.message
    assert "rank 1" not in refused.value.message


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"split": "pipeline:1,1,1"}, "another split of the model"),
        ({"dtype": "float16"}, "another data type"),
        ({"config": "c2"}, "another config.json"),
        ({"tokenizer": "t2"}, "another tokenizer"),
        ({"tensors": {"embed": "aa", "layers.0.q": "cc"}}, "another tensor layers.0.q"),
    ],
)
def test_another_model_is_refused_by_name(change: dict[str, object], words: str) -> None:
    with pytest.raises(Mismatch) as refused:
        same_model(NAMES, [MODEL, replace(MODEL, **change), MODEL])
    assert f"rank 1 (mac2) has {words} than rank 0 (mac1)" in refused.value.message
    assert "rank 2" not in refused.value.message and refused.value.exit_code == 76


def test_tensors_are_compared_among_those_who_hold_them() -> None:
    """Stages of a pipeline hold different layers; a tied embedding lies at the first and at the last."""
    first = replace(MODEL, tensors={"embed": "aa", "layers.0.q": "bb"})
    middle = replace(MODEL, tensors={"layers.1.q": "cc"})
    last = replace(MODEL, tensors={"layers.2.q": "dd", "embed": "aa"})
    same_model(NAMES, [first, middle, last])
    with pytest.raises(Mismatch, match=r"rank 2 \(mac3\) has another tensor embed than rank 0 \(mac1\)"):
        same_model(NAMES, [first, middle, replace(last, tensors={"embed": "ab"})])


def test_many_differences_are_counted_not_listed() -> None:
    other = replace(MODEL, tensors={f"layers.{i}": "x" for i in range(300)})
    mine = replace(MODEL, tensors={f"layers.{i}": "y" for i in range(300)})
    with pytest.raises(Mismatch) as refused:
        same_model(NAMES[:2], [mine, other])
    assert "and 295 more differences" in refused.value.message
