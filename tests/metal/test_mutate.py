"""The rules that make mutants, and the judge, on a kernel small enough to see through."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from tests.metal import harness
from tests.metal.mutate import RULES, judge, mutants, sample

# Sums of rows of up to 128 values, one threadgroup of two simdgroups a row; every second value counts twice.
ROW_SUMS = """// Body of row_sums: y [R] = weighted sums of the rows of x [R, K].
const int lane = int(thread_index_in_simdgroup);
const int part = int(simdgroup_index_in_threadgroup);
const int row = int(threadgroup_position_in_grid.y);
const int columns = x_shape[1];
threadgroup float partial[2];
float sum = 0.0f;
for (int column = part * 32 + lane; column < columns; column += 64) {
  float value = float(x[row * columns + column]);
  if (column % 2 == 1 && value != 0.0f) {
    value = value * 2;
  }
  sum += value;
}
sum = simd_sum(sum);
if (lane == 0) {
  partial[part] = sum;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
if (lane == 0 && part == 0) {
  y[row] = T(partial[0] + partial[1]);
}
"""
# What no test can tell apart, and why.
SAME = {
    "condition:20: if (lane == 0 && part == 0) { -> if (lane == 0 && part != 0) {": "either may write it",
}


def run_row_sums(order: harness.Order, columns: int) -> None:
    kernel = mx.fast.metal_kernel(name="row_sums", input_names=["x"], output_names=["y"], source=ROW_SUMS)
    x = np.random.default_rng(columns).integers(-8, 9, (3, columns)).astype(np.float32) / 4

    def launch(values: mx.array) -> list[mx.array]:
        return kernel(
            inputs=[values],
            grid=(32, 3 * 2, 1),
            threadgroup=(32, 2, 1),
            template=[("T", mx.float16)],
            output_shapes=[(3,)],
            output_dtypes=[mx.float16],
        )

    (y,) = harness.run(launch, mx.array(x), order=order).outputs
    np.testing.assert_array_equal(y, x @ (1 + np.arange(columns) % 2))


def all_runs() -> None:
    run_row_sums("forward", 99)
    run_row_sums("reverse", 64)
    run_row_sums("rotating", 5)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "row_sums.metal"
    path.write_text(ROW_SUMS)
    return path


def test_a_judge_that_never_runs_the_file_is_refused(file: Path) -> None:
    with pytest.raises(AssertionError, match="no kernel of the test holds"):
        judge(file, mutants(ROW_SUMS)[0], lambda: None)


def test_the_kernel_itself_survives(file: Path) -> None:
    assert judge(file, replace(mutants(ROW_SUMS)[0], text=ROW_SUMS), all_runs) == "survived"


def test_every_mutant_is_caught(file: Path) -> None:
    every = mutants(ROW_SUMS)
    verdicts = {mutant.name: judge(file, mutant, all_runs) for mutant in every}
    survivors = [name for name, verdict in verdicts.items() if verdict == "survived"]
    assert len(every) > 35 and {"check", "result"} <= set(verdicts.values())
    assert survivors == list(SAME)


def made(rule: str, text: str) -> list[str]:
    return [mutant.text for mutant in mutants(text) if mutant.rule == rule]


@pytest.mark.parametrize(
    ("rule", "before", "after"),
    [
        ("bound", "if (a < b) {", "if (a <= b) {"),
        ("bound", "while (a >= b) {", "while (a > b) {"),
        ("loop start", "for (int i = 0; i != n; i++) {", "for (int i = 1; i != n; i++) {"),
        ("loop step", "for (int i = k; i != n; i += 32) {", "for (int i = k; i != n; i += 33) {"),
        ("clamp", "int m = min(a, b);", "int m = max(a, b);"),
        ("no barrier", "threadgroup_barrier(mem_flags::mem_threadgroup);", ";"),
        (
            "weak barrier",
            "threadgroup_barrier(mem_flags::mem_threadgroup);",
            "threadgroup_barrier(mem_flags::mem_none);",
        ),
        (
            "barrier of a simdgroup",
            "threadgroup_barrier(mem_flags::mem_threadgroup);",
            "simdgroup_barrier(mem_flags::mem_threadgroup);",
        ),
        ("index", "float f = x[i];", "float f = x[i + 1];"),
        ("small array", "threadgroup float t[N * 2];", "threadgroup float t[(N * 2) / 2];"),
        ("axis", "int row = place.x;", "int row = place.y;"),
        ("lane", "uint l = thread_index_in_simdgroup;", "uint l = simdgroup_index_in_threadgroup;"),
        ("cast", "float f = float(x);", "float f = bool(x);"),
        ("operator", "int i = a * b;", "int i = a + b;"),
        ("operator", "int i = a / b;", "int i = a % b;"),
        ("mask", "int i = w & 0x0f;", "int i = w & 7;"),
        ("shift", "int i = w >> 4;", "int i = w >> 5;"),
        ("condition", "if (a && b) {", "if (a || b) {"),
        ("reduction", "float s = simd_sum(v);", "float s = simd_max(v);"),
        ("no assignment", "  s += v;", "  ;"),
        ("no exit", "  if (done) return;", "  if (done) ;"),
        ("start value", "float m = -INFINITY;", "float m = 1.0f;"),
    ],
)
def test_rule(rule: str, before: str, after: str) -> None:
    assert after in made(rule, before)


def test_comments_directives_and_templates_are_left_alone() -> None:
    text = "// a < b\n#define N 4 * 3\ntemplate <int N = 0>\n/* x[i] */\ntypedef float F;\n"
    assert mutants(text) == []


def test_every_mutant_differs_in_one_line() -> None:
    for mutant in mutants(ROW_SUMS):
        pairs = zip(ROW_SUMS.split("\n"), mutant.text.split("\n"), strict=True)
        assert [n for n, (a, b) in enumerate(pairs, 1) if a != b] == [mutant.line]


def test_sample_takes_rules_in_turn_and_is_stable() -> None:
    every = mutants(ROW_SUMS)
    chosen = sample(every, 12)
    assert chosen == sample(list(reversed(every)), 12) and len({m.rule for m in chosen}) == 12
    assert len(sample(every, 10_000)) == len(every)


def test_rule_names_say_what_they_imitate() -> None:
    assert {"bound", "no barrier", "index", "cast", "reduction"} <= {rule.name for rule in RULES}
