"""The points of contact with mlx-lm, each by name: what breaks here breaks with a new mlx-lm.

`pyproject.toml` bounds mlx and mlx-lm to the versions that this file passed on.
"""

from __future__ import annotations

import inspect
import subprocess
import sys
import tomllib
from importlib.metadata import version

import mlx.core as mx
import numpy as np
import pytest
from packaging.requirements import Requirement

from mlxserve.models.definitions import REMAPPED, REMAPPED_BY_ARCHITECTURE, find_definition, import_definition
from mlxserve.models.hooks import find_trunk, install_activation, install_attention, on_pages
from tests import tiny
from tests.conftest import ROOT


def test_versions_are_bounded_and_within() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for requirement in map(Requirement, project["dependencies"]):
        if requirement.name in ("mlx", "mlx-lm"):
            operators = {specifier.operator for specifier in requirement.specifier}
            assert operators == {">=", "<"}
            assert requirement.specifier.contains(version(requirement.name))


def test_the_remapping_tables_are_mlx_lms() -> None:
    from mlx_lm import utils

    assert utils.MODEL_REMAPPING == REMAPPED
    assert utils.MODEL_ARCHITECTURE_REMAPPING == REMAPPED_BY_ARCHITECTURE


def test_attention_is_looked_up_by_name_with_this_signature() -> None:
    install_attention()
    base = import_definition("base")
    original = base.scaled_dot_product_attention.original
    names = list(inspect.signature(original).parameters)
    assert names == ["queries", "keys", "values", "cache", "scale", "mask", "sinks"]
    for kind in ("llama", "qwen3", "gpt_oss", "gemma3_text"):
        module = find_definition(tiny.config(kind))
        install_attention()
        assert module.scaled_dot_product_attention is base.scaled_dot_product_attention


def test_the_cache_protocol() -> None:
    cache = import_definition("cache")
    parameters = inspect.signature(cache.RotatingKVCache.make_mask).parameters
    assert set(parameters) == {"self", "N", "window_size", "return_array"}
    assert list(inspect.signature(cache.KVCache.update_and_fetch).parameters) == ["self", "keys", "values"]
    assert cache.KVCache().offset == 0
    rotating = cache.RotatingKVCache(max_size=8)
    assert (rotating.max_size, rotating.keep) == (8, 0)
    assert cache.ArraysCache(2).cache == [None, None]
    assert cache.CacheList(cache.KVCache()).caches[0].empty()


def test_other_caches_still_get_mlx_lms_attention() -> None:
    """A person's own mlx-lm in the same process is not disturbed."""
    model = tiny.build("llama")
    ids = mx.array([[1, 2, 3, 4]])
    before = model(ids)
    install_attention()
    assert mx.allclose(before, model(ids), atol=0, rtol=0).item()


@pytest.mark.parametrize("home", ["llama", "switch_layers"])
def test_swiglu_is_looked_up_by_name_and_right_on_pages(home: str) -> None:
    """Against float64, out to where the exponential overflows; elsewhere mlx-lm's own runs."""
    install_activation()
    swiglu = import_definition(home).swiglu
    draw = np.random.default_rng(0)
    gate = np.concatenate([draw.normal(0, 4, 500), [0, 60, 88, 89, 130, 1e5, -60, -88, -89, -130, -1e20]])
    x = np.concatenate([draw.normal(0, 4, 510), [1e20]])
    gate, x = gate.astype(np.float32), x.astype(np.float32)
    with on_pages():
        out = np.array(swiglu(mx.array(gate), mx.array(x)))
    with np.errstate(over="ignore"):
        truth = gate / (1 + np.exp(-gate.astype(np.float64))) * x
    np.testing.assert_allclose(out, truth, rtol=3e-6, atol=1e-30)
    theirs = swiglu.original(mx.array(gate), mx.array(x))
    assert mx.array_equal(swiglu(mx.array(gate), mx.array(x)), theirs).item()


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt2", "mamba2", "qwen3_5"])
def test_the_trunk_is_found(kind: str) -> None:
    """What comes out of it goes into the head; its parameters keep their names."""
    model = tiny.build(kind)
    trunk = find_trunk(model)
    assert trunk is not None
    hidden = trunk(mx.array([[1, 2, 3]]))
    assert hidden.shape == (1, 3, 64)


def test_definitions_load_without_mlx_lms_start_up() -> None:
    code = (
        "import sys; from mlxserve.models.definitions import import_definition; import_definition('llama');"
        "assert 'transformers' not in sys.modules and 'mlx_lm' not in sys.modules;"
        "import mlx_lm; assert mlx_lm.load and mlx_lm.models.llama is sys.modules['mlx_lm.models.llama']"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
