"""`mlxserve kernels`: the list, and the self-test where there is no Metal."""

from __future__ import annotations

import json
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxserve.cli import kernels
from mlxserve.errors import DependencyMissing, UsageError
from mlxserve.kernels_metal import selftest, switch
from tests.cli.conftest import Run
from tests.conftest import require
from tests.metal import harness

elsewhere = pytest.mark.skipif(mx.metal.is_available(), reason="this machine has Metal")


@pytest.fixture
def compiler() -> None:
    reason = harness.why_unavailable()
    require(reason is None, reason or "")


@elsewhere
def test_list_says_what_runs_here(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(switch.OFF_VARIABLE, "sample")
    said = run("kernels", "list")
    lines = {line.split()[0]: line for line in said.out.splitlines()}
    assert said.code == 0 and set(lines) == {"kernel", *switch.KERNELS}
    assert "turned off" in lines["sample"] and "no Metal" in lines["gguf"]


@elsewhere
@pytest.mark.usefixtures("compiler")
def test_selftest_runs_the_kernels_text_on_this_cpu(run: Run) -> None:
    said = run("kernels", "selftest", "--kernel", "paged_decode", "--json")
    rows = [json.loads(line) for line in said.out.splitlines()]
    assert said.code == 0 and "No Metal here" in said.err
    assert {row["case"].split(",")[0] for row in rows} == {"bfloat16", "8 bits", "4 bits"}
    assert all(row["right"] and row["gigabytes_per_s"] is None for row in rows)


def test_a_wrong_kernel_fails_the_selftest(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(large: bool, chosen: frozenset[str]) -> Any:
        x = mx.ones((3,))
        yield selftest.Case("sample", "right", (x,), lambda x: x + 1, lambda x: x + 1, 1, 1)
        yield selftest.Case("sample", "wrong", (x,), lambda x: x + 2, lambda x: x + 1, 1, 1)

    monkeypatch.setattr(selftest, "cases", broken)
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)
    said = run("kernels", "selftest")
    assert said.code == 1 and "1 of 2 cases are wrong, sample (wrong) first" in said.err
    assert [line.split()[-1] for line in said.out.splitlines()[1:]] == ["right", "WRONG"]


def test_on_metal_speeds_are_told(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def one(large: bool, chosen: frozenset[str]) -> Any:
        assert large and chosen == {"sample"}
        yield selftest.Case("sample", "sum", (mx.ones((64,)),), mx.sum, mx.sum, 256, 64, own_call=mx.sum)

    monkeypatch.setattr(selftest, "cases", one)
    monkeypatch.setattr(selftest, "bandwidth", lambda: 100.0)
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    (row,) = [
        json.loads(line)
        for line in run("kernels", "selftest", "--kernel", "sample", "--json").out.splitlines()
    ]
    assert row["right"] and row["times_mlx"] > 0
    assert row["of_bandwidth"] == pytest.approx(row["gigabytes_per_s"] / 100)


def test_an_unknown_kernel_is_refused(run: Run) -> None:
    said = run("kernels", "selftest", "--kernel", "smaple")
    assert said.code == UsageError.exit_code and "There is no kernel 'smaple'; there are" in said.err


@elsewhere
def test_without_metal_and_harness_it_says_what_is_needed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels.mlxserve, "__file__", "/nowhere/site-packages/mlxserve/__init__.py")
    said = run("kernels", "selftest")
    assert said.code == DependencyMissing.exit_code and "needs a Mac's GPU" in said.err


@pytest.mark.parametrize(("ours", "error"), [([1.0, 2.0], 0.0), ([1.5, 2.0], 0.25), ([np.nan, 2.0], np.inf)])
def test_error_is_of_the_largest_value(ours: list[float], error: float) -> None:
    assert selftest.error([np.array(ours)], [np.array([1.0, 2.0])]) == error


def test_error_of_integers_is_the_share_that_differs() -> None:
    assert selftest.error([np.array([1, 2, 3, 4])], [np.array([1, 2, 3, 5])]) == 0.25


def test_every_case_has_its_kernel_and_honest_bytes() -> None:
    every = list(selftest.cases(False, frozenset(switch.KERNELS)))
    assert {case.kernel for case in every} == set(switch.KERNELS)
    packed = {case.label.split(",")[0]: case.least_bytes for case in every if case.kernel == "paged_decode"}
    keys, values_each = 70 + 1 + 33, 2 * 2 * 64  # K and V of two heads of 64
    assert packed["bfloat16"] == keys * values_each * 2
    assert packed["4 bits"] == keys * values_each * 5 // 8  # and 4 bytes for each group of 32
