"""Mistakes made on purpose in the paged attention kernels, and that small runs of them notice.

A sample of the mutants that the rules make is judged in every run, the same one each time; with
MLXSERVE_ALL_MUTANTS=1 all are.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlxserve.kernels_metal import paged_attention as paged
from mlxserve.kernels_metal.source import FOLDER
from tests.kernels_metal.paged import Problem, attend, check_traffic, pack, problem
from tests.metal import harness
from tests.metal.mutate import Mutant, judge, mutants, sample

SCALE = 0.3
SIZE = 32  # the kernels' smallest; wrappers refuse it, launches do not
SINKS = np.array([-1.0, 0.5, 2.0, 0.0], np.float32)
SAMPLES = {"pages": 4, "attention": 8, "paged_decode": 10, "paged_prefill": 8, "paged_reduce": 4}
# What no run can tell apart, and why.
SAME: dict[str, str] = {
    "attention: start value:90: query.total[i] = 0.0f; -> query.total[i] = 1.0f;": (
        "what stands there before the first key is scaled by 2^(MASKED - top), which is zero"
    ),
    **{
        f"paged_reduce: bound:{line}: for (int i = 0; i < HELD; i++) {{ -> for (int i = 0; i <= HELD; i++) {{": (
            "d < DV stops the round too many"
        )
        for line in (26, 35)
    },
}


@cache
def cases() -> dict[str, Problem]:
    """Ragged, off page and block boundaries; with windows in the middle of pages."""
    few = {"size": SIZE, "page_size": 5}
    return {
        "decode": problem([36, 0, 4, 69], [1, 1, 1, 2], seed=1, **few),
        "windowed": problem([50, 9, 20], [2, 1, 1], window=13, seed=2, **few),
        "split": problem([90, 3], [1, 2], seed=3, **few),
        "chunk": problem([3, 0, 30], [17, 39, 6], seed=4, **few),
        "windowed chunk": problem([40, 0], [21, 20], window=13, seed=5, **few),
    }


def check(
    launch: Callable[..., mx.array],
    name: str,
    order: harness.Order,
    bits: int = 0,
    splits: int = 1,
    sinks: np.ndarray | None = None,
    softcap: float | None = None,
    scale: float = SCALE,
) -> None:
    case, plan = cases()[name], cases()[name].plan
    (keys, k_values), (values, v_values) = (
        pack(pages, bits) if bits else (mx.array(pages), pages) for pages in (case.k_pages, case.v_pages)
    )
    sinks_ = None if sinks is None else mx.array(sinks)
    table = paged._table(plan)
    operands = paged.Operands(mx.array(case.q), keys, values, table, scale, sinks_, softcap)
    queries = paged.DECODE_QUERIES if launch is paged.decode else paged.TILE_QUERIES
    tasks = paged._tasks(plan, list(range(len(plan.counts))), 2, queries)
    result = harness.run(launch, operands, tasks, splits, order=order)
    truth = attend(case.q, k_values, v_values, plan, scale, sinks, softcap)
    np.testing.assert_allclose(result.outputs[0], truth, atol=1e-5 if scale < 1 else 1e-3)
    check_traffic(result, plan, case.q.shape[1], keys, values)


def decode_runs() -> None:
    check(paged.decode, "decode", "forward")
    check(paged.decode, "windowed", "reverse", bits=8, sinks=SINKS)
    check(paged.decode, "split", "rotating", bits=4, splits=2, softcap=2.0)


def prefill_runs() -> None:
    check(paged.prefill, "chunk", "forward")
    check(paged.prefill, "windowed chunk", "reverse", bits=4, splits=3, sinks=SINKS)


def reduce_runs() -> None:
    """Shares made up: tops far apart, rows where some or all shares had no keys."""
    rng = np.random.default_rng(6)
    out = rng.standard_normal((3, 4, 35, 48)).astype(np.float32)
    top = (rng.standard_normal((3, 4, 35)) * 99).astype(np.float32)
    total = rng.uniform(1, 2, (3, 4, 35)).astype(np.float32)
    for empty in (np.s_[1, :, 5:], np.s_[2]):
        out[empty], top[empty], total[empty] = 0.0, -1e37, 0.0
    high = top.max(axis=-1, keepdims=True)
    shrink = np.exp2(top - high)  # [rows, HQ, P]
    for sinks, order in ((None, "forward"), (SINKS * 100, "reverse")):
        weight = (total * shrink).sum(axis=-1)
        if sinks is not None:
            weight[:2] += np.exp2(sinks * np.log2(np.e) - high[:2, :, 0])
        weight[2] = 1.0
        truth = (out * shrink[..., None]).sum(axis=2) / weight[..., None]
        given = None if sinks is None else mx.array(sinks)
        shares = [mx.array(part) for part in (out, top, total)]
        result = harness.run(paged.reduce, *shares, given, mx.float32, order=order)
        np.testing.assert_allclose(result.outputs[0], truth, atol=1e-5)


def all_runs() -> None:
    decode_runs()
    prefill_runs()
    reduce_runs()


RUNS = {
    "pages": all_runs,
    "attention": all_runs,
    "paged_decode": decode_runs,
    "paged_prefill": prefill_runs,
    "paged_reduce": reduce_runs,
}


def path(file: str) -> Path:
    return FOLDER / f"{file}.metal"


def chosen(file: str) -> list[Mutant]:
    every = mutants(path(file).read_text())
    return every if os.environ.get("MLXSERVE_ALL_MUTANTS") == "1" else sample(every, SAMPLES[file])


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("file", RUNS)
def test_the_kernels_themselves_pass(file: str) -> None:
    RUNS[file]()


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("file", RUNS)
def test_mutants_are_caught(file: str) -> None:
    verdicts = {f"{file}: {m.name}": judge(path(file), m, RUNS[file]) for m in chosen(file)}
    survivors = {name for name, verdict in verdicts.items() if verdict == "survived"}
    assert survivors <= set(SAME), sorted(survivors - set(SAME))
