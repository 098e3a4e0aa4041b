"""The table of short names."""

from __future__ import annotations

import re

import pytest

from mlxserve.config import DEFAULT_MODEL
from mlxserve.models.aliases import HUB, PACKAGED, is_alias, near
from mlxserve.models.cached import parse_hub_name


def test_the_default_model_is_an_alias() -> None:
    assert is_alias(DEFAULT_MODEL) and DEFAULT_MODEL in PACKAGED


@pytest.mark.parametrize("alias", sorted(HUB))
def test_an_alias_is_plain_and_means_a_hub_name(alias: str) -> None:
    assert re.fullmatch(r"[a-z0-9][a-z0-9.-]*", alias)  # never mistaken for a path or a Hub name
    name = parse_hub_name(HUB[alias])
    assert name is not None and str(name) == HUB[alias] and name.file is None


def test_every_packaged_model_has_a_hub_name_to_fall_back_on() -> None:
    assert set(PACKAGED) <= set(HUB)


@pytest.mark.parametrize(
    ("typed", "meant"), [("smolm2", "smollm2"), ("QWEN3-8b", "qwen3-8b"), ("lama3.2", "llama3.2")]
)
def test_near_names(typed: str, meant: str) -> None:
    assert near(typed)[0] == meant
    assert near("xxxxxxxx") == []


def test_near_names_include_those_given() -> None:
    assert near("org/modle", ["org/model"]) == ["org/model"]
