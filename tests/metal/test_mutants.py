"""The tests of our own kernels against mutants of them: at least 96 in 100 must be caught.

A sample runs always; MLXSERVE_SOAK (what `make soak` sets) runs every mutant of every file. Those that survive are
listed in survivors.toml with the reason, and nothing else may survive.
"""

from __future__ import annotations

import os
import tomllib
from functools import cache, partial
from pathlib import Path

import pytest

from tests.kernels_metal import test_paged_mutants
from tests.metal.judges import JUDGES, judge_all
from tests.metal.mutate import Mutant, judge, mutants, sample
from tests.metal.sources import KERNELS

HERE = Path(__file__).parent
SOAK = bool(os.environ.get("MLXSERVE_SOAK"))
SAMPLE = 2  # mutants of each file in an ordinary run
FILES = list(JUDGES)
PAGED = [f"{name}.metal" for name in test_paged_mutants.RUNS]  # judged there


@cache
def every_mutant(name: str) -> list[Mutant]:
    return mutants((KERNELS / name).read_text())


@cache
def survivors() -> dict[str, set[tuple[str, str, str]]]:
    """File -> (rule, line before, line after) of the mutants that may survive."""
    found: dict[str, set[tuple[str, str, str]]] = {}
    for entry in tomllib.loads((HERE / "survivors.toml").read_text())["survivor"]:
        assert entry["reason"].strip()
        found.setdefault(entry["file"], set()).add((entry["rule"], entry["before"], entry["after"]))
    return found


def key(mutant: Mutant) -> tuple[str, str, str]:
    return mutant.rule, mutant.before, mutant.after


def unexpected(name: str, chosen: list[Mutant]) -> list[str]:
    """Names of the mutants that survive and are not listed."""
    listed = survivors().get(name, set())
    judges = partial(judge_all, name)
    left = [mutant for mutant in chosen if key(mutant) not in listed]
    return [m.name for m in left if judge(KERNELS / name, m, judges) == "survived"]


def test_every_kernel_file_has_judges() -> None:
    present = {str(path.relative_to(KERNELS)) for path in KERNELS.rglob("*.metal")}
    assert present == {*FILES, *PAGED}, "name the tests of each kernel file in tests/metal/judges.py"


@pytest.mark.parametrize("name", FILES)
def test_sampled_mutants_are_caught(name: str) -> None:
    assert unexpected(name, sample(every_mutant(name), SAMPLE)) == []


@pytest.mark.skipif(not SOAK, reason="runs with MLXSERVE_SOAK, minutes long")
@pytest.mark.parametrize("name", FILES)
def test_every_mutant_is_caught(name: str) -> None:
    assert unexpected(name, every_mutant(name)) == []


def test_survivors_are_few_and_real() -> None:
    listed = {(name, *entry) for name, entries in survivors().items() for entry in entries}
    real = {(name, *key(mutant)) for name in FILES for mutant in every_mutant(name)}
    assert listed <= real, f"no longer mutants: {sorted(listed - real)}"
    total = sum(len(every_mutant(name)) for name in [*FILES, *PAGED])
    surviving = len(listed) + len(test_paged_mutants.SAME)
    assert total >= 50 and surviving <= 0.04 * total, f"{surviving} of {total} survive"
