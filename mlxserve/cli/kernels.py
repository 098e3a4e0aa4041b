"""`mlxserve kernels`: which of our own Metal kernels run here, and whether they are right and fast.

Knows: the table of kernels and of results. On a CPU the self-test runs the kernels' text by the harness of the
repository's tests, where that and its compiler are there; on an NVIDIA GPU it runs them as CUDA.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import mlx.core as mx

import mlxserve
from mlxserve.cli.common import say, table
from mlxserve.errors import DependencyMissing, MlxServeError, UsageError
from mlxserve.kernels_metal import cuda, selftest, switch


@dataclass
class Row:
    """One case's result. error is of the largest value; speeds are None where nothing was timed."""

    kernel: str
    case: str
    error: float
    right: bool
    gigabytes_per_s: float | None = None
    of_bandwidth: float | None = None
    teraflops: float | None = None
    times_mlx: float | None = None


@click.group()
def kernels() -> None:
    """List and test this program's Metal kernels."""


@kernels.command("list")
def list_kernels() -> None:
    """Which kernels there are, and whether they run here."""
    rows = [(name, _state(name), does) for name, does in switch.KERNELS.items()]
    click.echo(table([("kernel", "state", "what it does"), *rows]))
    say(f"{switch.OFF_VARIABLE}=NAME,… turns kernels off, {switch.OFF_VARIABLE}=all turns off all.")


def _state(name: str) -> str:
    if switch.turned_off(name):
        return "turned off"
    return "on" if switch.enabled(name) else "no Metal"


@kernels.command("selftest")
@click.option("--kernel", "names", multiple=True, metavar="NAME", help="Only this kernel; may be repeated.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a case.")
def run_selftest(names: tuple[str, ...], as_json: bool) -> None:
    """Hold every kernel to its reference, and measure it where there is a GPU.

    Without one, and from a checkout with the package ziglang, the kernels' text runs on this CPU under
    checks: right or wrong, no speed.
    """
    unknown = [name for name in names if name not in switch.KERNELS]
    if unknown:
        raise UsageError(f"There is no kernel {unknown[0]!r}; there are {', '.join(switch.KERNELS)}.")
    chosen = frozenset(names or switch.KERNELS)
    rows = _rows(chosen)
    if as_json:
        for row in rows:
            click.echo(json.dumps(asdict(row)))
    else:
        click.echo(_as_table(rows))
    wrong = [row for row in rows if not row.right]
    if wrong:
        raise MlxServeError(
            f"{len(wrong)} of {len(rows)} cases are wrong, {wrong[0].kernel} ({wrong[0].case}) first."
        )


def _rows(chosen: frozenset[str]) -> list[Row]:
    if mx.metal.is_available():
        return _on_gpu(chosen)
    if mx.cuda.is_available():
        say("No Metal here: the kernels run as CUDA, as a check of their text more than of their speed.")
        with cuda.in_place_of_metal():
            return _on_gpu(chosen)
    return _on_this_cpu(chosen)


def _on_gpu(chosen: frozenset[str]) -> list[Row]:
    """Every case on the GPU: right or wrong, then speed beside MLX's own and the device's bandwidth."""
    rows, gigabytes_per_s = [], selftest.bandwidth()
    say(f"{mx.device_info().get('device_name', 'GPU')}: {gigabytes_per_s:.0f} GB/s when copying.")
    for case in selftest.cases(True, chosen):
        row = _judge(case, lambda call, *operands: selftest.arrays(call(*operands)))
        timing = selftest.measure(case, case.kernel_call)
        row.gigabytes_per_s, row.teraflops = timing.gigabytes_per_s, timing.teraflops
        row.of_bandwidth = timing.gigabytes_per_s / gigabytes_per_s
        if case.own_call is not None:
            row.times_mlx = selftest.measure(case, case.own_call).seconds / timing.seconds
        rows.append(row)
    return rows


def _on_this_cpu(chosen: frozenset[str]) -> list[Row]:
    harness = _harness()
    say("No Metal here: the kernels' text runs on this CPU under checks, without speeds.")
    return [
        _judge(case, lambda call, *operands: harness.run(call, *operands).outputs)
        for case in selftest.cases(False, chosen)
    ]


def _judge(case: selftest.Case, run: Callable[..., list[Any]]) -> Row:
    ours = run(case.kernel_call, *case.operands)
    error = selftest.error(ours, selftest.arrays(case.reference_call(*case.operands)))
    return Row(case.kernel, case.label, error, error <= selftest.tolerance(case))


def _harness() -> Any:
    """The tests' harness. Raises DependencyMissing where it or its compiler is not there."""
    root = Path(mlxserve.__file__).parents[1]
    if not (root / "tests" / "metal" / "harness.py").is_file():
        raise DependencyMissing(
            "The self-test needs a Mac's GPU, or a checkout of the repository with the package ziglang."
        )
    if str(root) not in sys.path:
        sys.path.append(str(root))
    harness = importlib.import_module("tests.metal.harness")
    missing = harness.why_unavailable()
    if missing:
        raise DependencyMissing(f"The self-test cannot run without Metal here: {missing}.")
    return harness


def _as_table(rows: list[Row]) -> str:
    head = ("kernel", "case", "error", "", "GB/s", "of bandwidth", "TFLOP/s", "x MLX")
    lines = [
        (
            row.kernel,
            row.case,
            f"{row.error:.1e}",
            "right" if row.right else "WRONG",
            _number(row.gigabytes_per_s, "{:.0f}"),
            _number(row.of_bandwidth, "{:.0%}"),
            _number(row.teraflops, "{:.2f}"),
            _number(row.times_mlx, "{:.2f}"),
        )
        for row in rows
    ]
    return table([head, *lines])


def _number(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)
