"""Each check of the runtime finds what it is for, and lets correct kernels pass."""

from __future__ import annotations

import re

import mlx.core as mx
import numpy as np
import pytest

from tests.metal import harness
from tests.metal.scratch import run_body

SHARED = "threadgroup float t[64]; "
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup); "

# name: (body, words of the failure)
CAUGHT = {
    "read_past_the_end": ("y[i] = x[i + 1];", "out-of-bounds read of 4 bytes at byte 256 of buffer 'x'"),
    "read_before_the_start": ("y[i] = x[int(i) - 1];", "at byte -4 of buffer 'x'"),
    "read_far_away": ("y[i] = x[i + 1000000000u];", "out-of-bounds read"),
    "read_far_before": ("y[i] = x[int(i) - 2000000000];", "out-of-bounds read"),
    "write_past_the_end": ("y[i + 1] = x[i];", "out-of-bounds write of 4 bytes at byte 256 of buffer 'y'"),
    "read_over_the_end": (
        "y[i] = ((const device packed_float4*)(x + min(i, 61u)))[0].x;",
        "runs over the end of buffer 'x'",
    ),
    "null_pointer": ("const device float* p = nullptr; y[i] = i > 99 ? x[i] : p[i];", "null or wild pointer"),
    "past_a_threadgroup_array": (
        SHARED + "t[i + 1] = x[i]; y[i] = 1;",
        "index 64 is out of the bounds of 'threadgroup float[64]'",
    ),
    "from_one_threadgroup_array_into_the_next": (
        "threadgroup float t[64], u[64]; u[i] = 0; threadgroup float* p = t; p[i + 128] = x[i]; y[i] = 1;",
        "out-of-bounds write of 4 bytes at byte 512 of threadgroup array 't'",
    ),
    "past_a_threadgroup_row": (
        "threadgroup float t[4][16]; t[i / 16][i % 17] = x[i]; " + BARRIER + "y[i] = 1;",
        "out of the bounds of",
    ),
    "past_a_local_array": ("float a[4] = {0}; a[int(x[i]) % 6] = 1; y[i] = a[0];", "out of the bounds of"),
    "before_a_local_array": ("float a[4] = {0}; y[i] = a[int(x[i]) - 1];", "out of the bounds of"),
    "past_a_local_array_of_structs": (
        "struct S { int a, b; }; S s[4]; for (int k = 0; k <= 4; k++) { s[k] = S(); s[k].a = int(x[i]); }"
        "y[i] = s[i % 4].a;",
        "index 4 is out of the bounds of",
    ),
    "past_a_local_array_by_pointer": (
        "float a[4] = {0}; thread float* p = a; p[int(x[i]) % 6] = 1; y[i] = a[0];",
        "out of the bounds of a local array",
    ),
    "misaligned": (
        "y[i] = ((const device float4*)(x + min(i, 60u)))[0].x;",
        "an address 4 bytes above a multiple of 16",
    ),
    "misaligned_by_bytes": (
        "y[i] = ((const device float*)((const device uchar*)x + min(i, 240u)))[0];",
        "an address 1 bytes above a multiple of 4",
    ),
    "uninitialised_threadgroup": (
        SHARED + "y[i] = t[i] + x[i];",
        "threadgroup array 't', which nothing has written",
    ),
    "uninitialised_output": (
        "y[i] = y[i] + x[i];",
        "read of byte 0 of output 'y', which nothing has written",
    ),
    "output_not_written": ("if (i != 7) y[i] = x[i];", "4 of 256 bytes of output 'y' were never written"),
    "write_to_input": (
        "((device float*)x)[i] = 1; y[i] = 1;",
        "write to byte 0 of input 'x', which is read-only",
    ),
    "race_read_after_write": (SHARED + "t[i] = x[i]; y[i] = t[i / 2];", "data race: read of byte 0"),
    "race_write_after_read": (
        SHARED + "t[i] = x[i]; " + BARRIER + "y[i] = t[63 - i]; t[i] = 0;",
        "data race",
    ),
    "race_of_writes": (SHARED + "t[i / 2] = x[i]; y[i] = 1;", "data race: write"),
    "race_with_wrong_barrier": (
        SHARED + "t[i] = x[i]; threadgroup_barrier(mem_flags::mem_device); y[i] = t[63 - i];",
        "data race: read of byte 0",
    ),
    "race_with_no_flag": (
        SHARED + "t[i] = x[i]; threadgroup_barrier(mem_flags::mem_none); y[i] = t[63 - i];",
        "data race",
    ),
    "race_with_simdgroup_barrier": (
        SHARED + "t[i] = x[i]; simdgroup_barrier(mem_flags::mem_threadgroup); y[i] = t[i / 2];",
        "data race: read of byte 124",
    ),
    "race_in_output": ("y[i] = x[i]; y[63 - i] = x[i];", "data race: write of byte"),
    "race_with_an_atomic": (
        "threadgroup atomic_uint n; if (i == 0) atomic_store_explicit(&n, 0u, memory_order_relaxed);"
        + BARRIER
        + "atomic_fetch_add_explicit(&n, 1u, memory_order_relaxed); ((threadgroup uint*)&n)[0] = 1;"
        + "y[i] = 1;",
        "an earlier atomic",
    ),
    "atomic_of_uninitialised": (
        "threadgroup atomic_uint n; atomic_fetch_add_explicit(&n, 1u, memory_order_relaxed); y[i] = 1;",
        "atomic update of byte 0 of threadgroup array 'n', which nothing has written",
    ),
    "threadgroup_memory": ("threadgroup float t[8193]; t[i] = x[i]; y[i] = 1;", "32772 bytes with 't'"),
    "integer_overflow": ("int q = int(i) * 100000 * 1000; y[i] = float(q);", "integer overflow: "),
    "integer_overflow_of_sum": (
        "int q = 2147483647 - 5; q += int(x[i]); y[i] = float(q);",
        "does not fit 'int'",
    ),
    "shift": ("y[i] = float(1u << (i + 1));", "shift of 'unsigned int' by 32 bits"),
    "negative_shift": ("y[i] = float(64 >> (int(i) - 1));", "by -1 bits"),
    "division_by_zero": ("y[i] = float(3 / int(i));", "division of 3 by 0"),
    "float_to_integer": ("y[i] = float(int(x[i] * 1e9f));", "does not fit the integer type"),
    "barrier_in_a_branch": ("if (i < 32) { " + BARRIER + " } y[i] = 1;", "32 wait at a threadgroup_barrier"),
    "two_barriers": (
        "if (i < 32) { " + BARRIER + "}\nelse { " + BARRIER + " } y[i] = 1;",
        "barrier divergence: 32 threads wait at the barrier of line 1, this thread comes to that of line 2",
    ),
    "barrier_after_return": (
        "y[i] = 1; if (i == 5) return; " + BARRIER,
        "1 of 64 threads of the threadgroup",
    ),
    "barrier_in_a_loop": (
        "for (uint k = 0; k < 1 + i / 32; k++) { " + BARRIER + " } y[i] = 1;",
        "will never come to this barrier",
    ),
    "simd_in_a_lane_branch": ("float s = 0; if (i % 32 < 16) s = simd_sum(x[i]); y[i] = s;", "divergence"),
    "two_simd_operations": (
        "float s;\nif (i & 1) s = simd_sum(x[i]);\nelse s = simd_max(x[i]);\ny[i] = s;",
        "wait in simd_max at line 3, this lane comes to simd_sum at line 2",
    ),
    "two_simd_operations_in_a_line": (
        "y[i] = (i & 1) ? simd_sum(x[i]) : simd_max(x[i]);",
        "wait in simd_max at line 1, this lane comes to simd_sum at line 1",
    ),
    "two_barriers_in_a_line": (
        "if (i < 32) { " + BARRIER + "} else { " + BARRIER + "} y[i] = 1;",
        "comes to that of line 1 by another call",
    ),
    "simd_after_return": (
        "y[i] = 1; if (i == 3) return; y[i] = simd_sum(x[i]);",
        "lanes 00000008 have returned",
    ),
    "shuffle_from_nowhere": ("y[i] = simd_shuffle(x[i], 32);", "simd_shuffle from a lane that is not there"),
    "endless_loop": ("uint n = i; while (x[n % 64] >= 0) n++; y[i] = n;", "an endless loop?"),
    "endless_loop_of_loads": (
        "float s = 0; for (uint n = 0; s > -1; n++) s += x[n % 64]; y[i] = s;",
        "an endless loop?",
    ),
    "endless_loop_of_registers": (
        "uint n = uint(x[i]); while (n != 1) n ^= 2; y[i] = n;",
        "an endless loop?",
    ),
}

# name: (body, y as a NumPy expression of i)
CLEAN = {
    "barrier_orders": (SHARED + "t[i] = x[i]; " + BARRIER + "y[i] = t[63 - i];", lambda i: 63 - i),
    "simdgroup_barrier_orders_its_lanes": (
        SHARED + "t[i] = x[i]; simdgroup_barrier(mem_flags::mem_threadgroup); y[i] = t[i ^ 1];",
        lambda i: i ^ 1,
    ),
    "lanes_read_then_one_writes": (
        SHARED
        + "t[i] = x[i]; simdgroup_barrier(mem_flags::mem_threadgroup); float a = t[i ^ 1];"
        + "simdgroup_barrier(mem_flags::mem_threadgroup); a += t[i ^ 2];"
        + "simdgroup_barrier(mem_flags::mem_threadgroup); t[i] = 0; y[i] = a;",
        lambda i: (i ^ 1) + (i ^ 2),
    ),
    "reuse_between_barriers": (
        SHARED
        + "float s = 0; for (int k = 0; k < 3; k++) { t[i] = x[i] + k; "
        + BARRIER
        + "s += t[63 - i]; "
        + BARRIER
        + "} y[i] = s;",
        lambda i: 3 * (63 - i) + 3,
    ),
    "output_read_back_by_its_thread": ("y[i] = x[i]; y[i] += 1;", lambda i: i + 1),
    "output_through_a_device_barrier": (
        "y[i] = x[i]; threadgroup_barrier(mem_flags::mem_device); float v = y[63 - i];"
        "threadgroup_barrier(mem_flags::mem_device); y[i] = v;",
        lambda i: 63 - i,
    ),
    "atomics": (
        "threadgroup atomic_uint n; if (i == 0) atomic_store_explicit(&n, 0u, memory_order_relaxed);"
        + BARRIER
        + "atomic_fetch_add_explicit(&n, 1u, memory_order_relaxed);"
        + BARRIER
        + "y[i] = float(atomic_load_explicit(&n, memory_order_relaxed));",
        lambda i: 64 + 0 * i,
    ),
    "unsigned_wraps": ("uint q = 0u - 1u - i; y[i] = float(q == 4294967295u - i);", lambda i: 1 + 0 * i),
    "a_whole_simdgroup_returns": (
        "if (i >= 32) { y[i] = 5; return; } y[i] = simd_sum(1.0f);",
        lambda i: np.where(i < 32, 32, 5),
    ),
    "local_array": ("float a[4] = {1, 2, 3, 4}; y[i] = a[i % 4];", lambda i: i % 4 + 1),
    "two_rounds_of_shuffles": (
        "float v = x[i]; for (ushort k = 16; k > 0; k /= 2) v += simd_shuffle_xor(v, k); y[i] = v;",
        lambda i: np.where(i < 32, 496, 1520),
    ),
}


@pytest.mark.parametrize("name", CAUGHT)
def test_caught(name: str) -> None:
    body, words = CAUGHT[name]
    with pytest.raises(harness.KernelFailure, match=re.escape(words)):
        run_body(body, block_limit=100_000)


@pytest.mark.parametrize("name", CLEAN)
@pytest.mark.parametrize("order", harness.ORDERS)
def test_clean(name: str, order: harness.Order) -> None:
    body, expected = CLEAN[name]
    (y,) = run_body(body, order=order).outputs
    np.testing.assert_array_equal(y, expected(np.arange(64)))


@pytest.mark.parametrize("order", harness.ORDERS)
def test_race_is_found_in_any_order(order: harness.Order) -> None:
    with pytest.raises(harness.KernelFailure, match="data race|nothing has written"):
        run_body(
            SHARED + "t[i] = x[i]; simdgroup_barrier(mem_flags::mem_threadgroup); y[i] = t[(i + 32) % 64];",
            order=order,
        )


def test_failure_names_place_and_both_threads() -> None:
    body = "\n  threadgroup float t[64];\n  t[i] = x[i];\n  t[i ^ 32] = 0;\n  y[i] = 0;\n"
    with pytest.raises(harness.KernelFailure) as caught:
        run_body(body, order="reverse")
    failure = caught.value
    assert failure.where is not None and failure.other is not None
    assert (failure.where.file, failure.where.line, failure.where.thread) == ("<body of scratch>", 3, 31)
    assert (failure.other.line, failure.other.thread, failure.other.simdgroup) == (4, 63, 1)
    assert failure.where.threadgroup == (0, 0, 0) and failure.order == "reverse"
    assert "thread 31 of threadgroup (0, 0, 0) (simdgroup 0, lane 31)" in str(failure)


def test_a_fault_ends_the_launch_and_not_the_process() -> None:
    """Functions that call each other run out of stack, which no check foresees."""
    header = """inline float odd(float v);
        inline float even(float v) { return v == 0 ? 1.0f : 1.0f + odd(v - 1); }
        inline float odd(float v) { return v == 0 ? 0.0f : 2.0f * even(v - 1); }
        """
    with pytest.raises(harness.KernelFailure, match="the thread faulted"):
        run_body("y[i] = even(x[i] + 1e6f);", header)
    assert run_body("y[i] = even(x[i]);", header).outputs[0][0] == 1


def test_a_helper_called_from_two_places_holds_two_barriers() -> None:
    header = "inline float meet(float v) { threadgroup_barrier(mem_flags::mem_none); return v; }\n"
    with pytest.raises(harness.KernelFailure, match="by another call"):
        run_body("if (i < 32) { y[i] = meet(1); } else { y[i] = meet(2); }", header)
    header = "inline float total(float v) { return simd_sum(v); }\n"
    with pytest.raises(harness.KernelFailure, match="by another call"):
        run_body("if (i & 1) { y[i] = total(1); } else { y[i] = total(2); }", header)


def two_threadgroups(body: str, **options: object) -> harness.Result:
    return run_body(body, threads=128, **options)


@pytest.mark.parametrize("order", ["forward", "reverse"])
@pytest.mark.parametrize(
    "body",
    [
        "y[i] = x[i]; y[(i + 64) % 128] = 1;",
        "y[i] = x[i]; threadgroup_barrier(mem_flags::mem_device); y[i / 2] = 1;",
        "if (i < 64) y[i] = x[i]; else y[i] = y[i - 64];",
    ],
)
def test_race_across_threadgroups(body: str, order: harness.Order) -> None:
    with pytest.raises(harness.KernelFailure, match="data race|nothing has written"):
        two_threadgroups(body, order=order)


def test_last_threadgroup_may_be_partial() -> None:
    body = "y[i] = threads_per_threadgroup.x * 1000 + threadgroups_per_grid.x + simd_sum(1.0f);"
    (y,) = run_body(body, threads=70).outputs
    np.testing.assert_array_equal(y, np.where(np.arange(70) < 64, 64034, 6008))


def test_too_many_threads() -> None:
    kernel = mx.fast.metal_kernel(name="wide", input_names=["x"], output_names=["y"], source="y[0] = x[0];")

    def launch(x: mx.array) -> list[mx.array]:
        shape = (1025, 1, 1)
        return kernel(
            inputs=[x], grid=shape, threadgroup=shape, output_shapes=[(1,)], output_dtypes=[mx.float32]
        )

    with pytest.raises(harness.KernelFailure, match="1025 threads, more than the limit of 1024"):
        harness.run(launch, mx.zeros(8))


def test_more_than_31_buffers() -> None:
    names = [f"x{k}" for k in range(31)]
    body = "y[0] = " + " + ".join(f"{name}[0]" for name in names) + ";"
    kernel = mx.fast.metal_kernel(name="many", input_names=names, output_names=["y"], source=body)

    def launch() -> list[mx.array]:
        inputs, one = [mx.ones(1)] * 31, (1, 1, 1)
        return kernel(
            inputs=inputs, grid=one, threadgroup=one, output_shapes=[(1,)], output_dtypes=[mx.float32]
        )

    with pytest.raises(harness.CompileError, match="at most 31 buffers"):
        harness.run(launch)


def test_seven_elements_are_constant_and_eight_are_device() -> None:
    """MLX passes small inputs in the constant address space: a helper for `device` fails there."""
    kernel = mx.fast.metal_kernel(
        name="small",
        input_names=["lens"],
        output_names=["y"],
        header="inline int f(const device int* p, int i) { return p[i]; }\n",
        source="uint i = thread_position_in_grid.x; y[i] = f(lens, int(i));",
    )

    def launch(lens: mx.array) -> list[mx.array]:
        n = lens.size
        return kernel(
            inputs=[lens],
            grid=(n, 1, 1),
            threadgroup=(n, 1, 1),
            output_shapes=[(n,)],
            output_dtypes=[mx.int32],
        )

    (y,) = harness.run(launch, mx.arange(8)).outputs
    np.testing.assert_array_equal(y, np.arange(8))
    with pytest.raises(harness.CompileError, match="no matching function"):
        harness.run(launch, mx.arange(7))


def histogram(x: mx.array, init_value: float | None) -> list[mx.array]:
    kernel = mx.fast.metal_kernel(
        name="histogram",
        input_names=["x"],
        output_names=["h"],
        atomic_outputs=True,
        source="""uint i = thread_position_in_grid.x;
            if (i < uint(x_shape[0])) atomic_fetch_add_explicit(&h[x[i] % 7], 1, memory_order_relaxed);""",
    )
    return kernel(
        inputs=[x],
        grid=(100, 1, 1),
        threadgroup=(48, 1, 1),
        output_shapes=[(7,)],
        output_dtypes=[mx.int32],
        init_value=init_value,
    )


def test_atomic_outputs() -> None:
    (h,) = harness.run(histogram, mx.arange(100, dtype=mx.uint32), 0).outputs
    np.testing.assert_array_equal(h, np.bincount(np.arange(100) % 7))
    with pytest.raises(harness.KernelFailure, match="nothing has written"):
        harness.run(histogram, mx.arange(100, dtype=mx.uint32), None)


def test_shape_strides_and_rank() -> None:
    kernel = mx.fast.metal_kernel(
        name="strided",
        input_names=["a"],
        output_names=["o"],
        source="uint e = thread_position_in_grid.x; o[e] = a[elem_to_loc(e, a_shape, a_strides, a_ndim)];",
    )

    def launch(a: mx.array) -> list[mx.array]:
        return kernel(
            inputs=[a.T],
            grid=(12, 1, 1),
            threadgroup=(12, 1, 1),
            output_shapes=[(4, 3)],
            output_dtypes=[mx.int32],
        )

    (o,) = harness.run(launch, mx.arange(12).reshape(3, 4)).outputs
    np.testing.assert_array_equal(o, np.arange(12).reshape(3, 4).T)


def test_alignment_can_be_promised() -> None:
    body = "y[i] = ((const device float4*)x)[i / 4].y;"
    with pytest.raises(harness.KernelFailure, match="misaligned"):
        run_body(body)
    (y,) = run_body(body, alignment={"x": 16}).outputs
    assert y[5] == 5
