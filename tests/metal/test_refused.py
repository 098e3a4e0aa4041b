"""What Apple's compiler refuses is refused here, and what it takes is taken."""

from __future__ import annotations

import numpy as np
import pytest

from tests.metal import harness
from tests.metal.scratch import run_body

# name: (header, body, a word of the refusal)
REFUSED = {
    "expf": ("", "y[i] = expf(x[i]);", "expf"),
    "fabsf": ("", "y[i] = fabsf(x[i]);", "fabsf"),
    "printf": ("", 'printf("%d", i); y[i] = 1;', "printf"),
    "std": ("", "y[i] = std::max(x[i], 0.0f);", "std"),
    "double": ("", "double d = x[i]; y[i] = d;", "double"),
    "double_cast": ("", "y[i] = (double)x[i];", "double"),
    "lambda": ("", "auto f = [&](float v) { return v + 1; }; y[i] = f(x[i]);", "lambda"),
    "builtin": ("", "y[i] = __builtin_sqrtf(x[i]);", "compiler's own"),
    "new": ("", "y[i] = *new float(1);", "not in MSL"),
    "goto": ("", "y[i] = 0; goto end; end: y[i] = 1;", "not in MSL"),
    "structured_binding": ("", "float2 v = float2(1, 2); auto [a, b] = v; y[i] = a;", "structured"),
    "concept": ("template <class T> concept any = true;\n", "y[i] = 1;", "later than the C++"),
    "bare_pointer_parameter": (
        "inline float f(float* p) { return p[0]; }\n",
        "float a[2] = {x[i], 1}; y[i] = f(a);",
        "address space",
    ),
    "bare_reference_parameter": (
        "inline void f(float& p) { p += 1; }\n",
        "float a = x[i]; f(a); y[i] = a;",
        "address space",
    ),
    "bare_struct_parameter": (
        "struct S { float v; };\ninline float f(const S& s) { return s.v; }\n",
        "S s; s.v = x[i]; y[i] = f(s);",
        "address space",
    ),
    "bare_template_parameter": (
        "template <typename U>\ninline float f(U* p) { return p[0]; }\n",
        "float a[2] = {x[i], 1}; y[i] = f(a);",
        "address space",
    ),
    "bare_array_parameter": (
        "inline float f(float (&a)[2]) { return a[0]; }\n",
        "float a[2] = {x[i], 1}; y[i] = f(a);",
        "address space",
    ),
    "bare_pointer_returned": (
        "inline const float* f(const device float* p) { return nullptr; }\n",
        "y[i] = f(x) ? 1 : 2;",
        "address space",
    ),
    "bare_pointer_member": (
        "struct S { float* p; };\n",
        "S s; s.p = nullptr; y[i] = s.p ? 1 : 2;",
        "address space",
    ),
    "bare_local_pointer": ("", "float a[2] = {x[i], 1}; float* p = a; y[i] = p[1];", "address space"),
    "bare_local_reference": ("", "float a = x[i]; float& p = a; y[i] = p;", "address space"),
    "bare_cast": ("", "y[i] = ((float*)x)[i];", "address space"),
    "bare_static_cast": ("", "y[i] = static_cast<const float*>(x)[i];", "address space"),
    "bare_pointer_to_device": ("", "const float* p = x; y[i] = p[i];", "address space"),
    "threadgroup_pointer_to_device": (
        "",
        "const threadgroup float* p = x; y[i] = p[i];",
        "device float const",
    ),
    "device_helper_of_constant_input": (
        "constant float t[2] = {1, 2};\ninline float f(const device float* p) { return p[0]; }\n",
        "y[i] = f(t);",
        "no matching function",
    ),
    "write_through_const": ("", "x[i] = 1; y[i] = 1;", "read-only"),
    "recursion": (
        "inline float f(int n) { return n < 1 ? 1.0f : n * f(n - 1); }\n",
        "y[i] = f(3);",
        "recursion",
    ),
    "static_local": ("", "static int c = 0; y[i] = c;", "static"),
    "global_variable": ("float g = 1.0f;\n", "y[i] = g;", "constant"),
    "global_table_without_space": ("const float g[2] = {1, 2};\n", "y[i] = g[1];", "constant"),
    "global_constexpr_without_space": ("constexpr int N = 4;\n", "y[i] = N;", "constant"),
    "shared_in_helper": (
        "inline float f(float v) { threadgroup float t[64]; t[0] = v; return v; }\n",
        "y[i] = f(x[i]);",
        "threadgroup variable",
    ),
    "function_pointer": (
        "inline float f(float v) { return v; }\n",
        "float (*p)(float) = f; y[i] = p(x[i]);",
        "function pointer",
    ),
    "variable_length_array": (
        "",
        "int n = int(x[3]) + 1; float a[n]; a[0] = x[i]; y[i] = a[0];",
        "variable length",
    ),
    "narrowing_braces": ("", "half h{x[i]}; y[i] = float(h);", "narrow"),
    "float_to_bfloat": ("", "bfloat b = x[i]; y[i] = float(b);", "bfloat"),
    "bfloat_to_half": ("", "bfloat b = bfloat(x[i]); half h = b; y[i] = float(h);", "half"),
    "min_of_mixed_signs": ("", "y[i] = float(min(i, 3));", "no matching function"),
    "max_of_float_and_half": ("", "y[i] = max(x[i], half(1));", "no matching function"),
    "uninitialised_local": ("", "float s; if (i > 99) s = 1; y[i] = s;", "uninitialized"),
    "no_return": ("inline float f(float v) { if (v > 0) return v; }\n", "y[i] = f(x[i]);", "return"),
    "constant_shift_too_far": ("", "y[i] = float(1u << 32);", "shift"),
    "short_vector_constructor": ("", "float4 v = float4(1, 2); y[i] = v.x;", "one value an element"),
    "wide_load": ("", "ulong4 v = ((const device ulong4*)x)[i / 8]; y[i] = v.x + v.w;", "more than 16 bytes"),
    "float_atomic_max": (
        "",
        "threadgroup atomic<float> a; atomic_fetch_max_explicit(&a, 1.0f, memory_order_relaxed); y[i] = 1;",
        "no atomic minimum or maximum of floats",
    ),
}

# name: (header, body, value of y[3])
TAKEN = {
    "plain": ("", "y[i] = x[i] * 2;", 6),
    "literals_are_single_precision": ("", "y[i] = sizeof(1.0) == 4 ? 1.0 : 0.0;", 1),
    "thread_reference": (
        "inline void f(thread float& p) { p += 1; }\n",
        "float a = x[i]; f(a); y[i] = a;",
        4,
    ),
    "thread_pointer": (
        "inline float f(thread const float* p) { return p[1]; }\n",
        "float a[2] = {x[i], 5}; thread float* p = a; y[i] = f(p);",
        5,
    ),
    "constant_table": ("constant float g[2] = {1, 2};\n", "y[i] = g[1];", 2),
    "constexpr_constant": ("constexpr constant int N = 4;\n", "y[i] = N;", 4),
    "static_constexpr_in_struct": ("struct S { static constant constexpr int n = 7; };\n", "y[i] = S::n;", 7),
    "vector_constructor": ("", "float4 v = float4(x[i], float2(1, 2), 3.0f); y[i] = v.zyx.x + v.w;", 5),
    "vector_template": ("", "vec<float, 4> v = vec<float, 4>(2.0f); y[i] = dot(v, v);", 16),
    "packed_vector": ("", "y[i] = i < 60 ? ((const device packed_float4*)(x + i))[0].y : 0.0f;", 4),
    "as_type": ("", "y[i] = as_type<float>(as_type<uint>(x[i]));", 3),
    "half_literal": ("", "half h = 1.5h; y[i] = sizeof(2.0h) == 2 ? float(h * 2.0h) : 0.0f;", 3),
    "half_rounds": ("", "half h = half(2049.0f); y[i] = float(h);", 2048),
    "bfloat_rounds": ("", "bfloat b = bfloat(257.0f); y[i] = float(b);", 256),
    "if_constexpr": ("", "if constexpr (sizeof(half) == 2) { y[i] = 1; } else { y[i] = 2; }", 1),
    "template_helper": (
        "template <typename U, int N>\ninline U f(const device U* p) {"
        " U s = 0; for (int k = 0; k < N; k++) s += p[k]; return s; }\n",
        "y[i] = f<float, 3>(x);",
        3,
    ),
    "fast_math": ("", "y[i] = fast::exp2(x[i]) + precise::floor(0.5f);", 8),
    "int32_t": ("", "int32_t q = int32_t(x[i]); y[i] = float(q);", 3),
    "simd_sum": ("", "y[i] = simd_sum(x[i] < 32 ? 1.0f : 0.0f);", 32),
    "simd_in_a_uniform_branch": ("", "float s = 7; if (i < 32) s = simd_max(x[i]); y[i] = s;", 31),
    "shuffles": ("", "y[i] = simd_shuffle_xor(x[i], 1) + simd_broadcast(x[i], 0);", 2),
    "prefix": ("", "y[i] = simd_prefix_exclusive_sum(1.0f);", 3),
    "ballot": ("", "y[i] = float(popcount(uint(ulong(simd_ballot(i < 5)))));", 5),
    "matrix_product": (
        "",
        "simdgroup_float8x8 a(2.0f), b = make_filled_simdgroup_matrix<float, 8, 8>(3.0f), c(0.0f);"
        "simdgroup_multiply_accumulate(c, a, b, c); y[i] = c.thread_elements()[0];",
        6,
    ),
    "comment_before_shared": (
        "",
        "{ // a comment\n threadgroup float t[64]; /* another */ threadgroup float u[2], v;"
        " t[i] = x[i]; simdgroup_barrier(mem_flags::mem_threadgroup); y[i] = t[i]; }",
        3,
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    header, body, word = REFUSED[name]
    with pytest.raises(harness.CompileError, match=word):
        run_body(body, header)


@pytest.mark.parametrize("name", TAKEN)
def test_taken(name: str) -> None:
    header, body, value = TAKEN[name]
    (y,) = run_body(body, header).outputs
    assert y.dtype == np.float32 and y[3] == value


def test_refusal_names_file_and_line() -> None:
    with pytest.raises(harness.CompileError, match=r"<body of scratch>:2:"):
        run_body("\n  y[i] = expf(x[i]);")
