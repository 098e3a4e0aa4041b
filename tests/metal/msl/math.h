// metal_math, metal_common, metal_integer: element-wise functions. Transcendentals are libm's in float32.
#pragma once
#include "types.h"
#include "traits.h"

extern "C" {
float msl_exp(float) __asm__("expf");
float msl_exp2(float) __asm__("exp2f");
float msl_exp10(float) __asm__("exp10f");
float msl_log(float) __asm__("logf");
float msl_log2(float) __asm__("log2f");
float msl_log10(float) __asm__("log10f");
float msl_pow(float, float) __asm__("powf");
float msl_fmod(float, float) __asm__("fmodf");
float msl_sin(float) __asm__("sinf");
float msl_cos(float) __asm__("cosf");
float msl_tan(float) __asm__("tanf");
float msl_asin(float) __asm__("asinf");
float msl_acos(float) __asm__("acosf");
float msl_atan(float) __asm__("atanf");
float msl_atan2(float, float) __asm__("atan2f");
float msl_sinh(float) __asm__("sinhf");
float msl_cosh(float) __asm__("coshf");
float msl_tanh(float) __asm__("tanhf");
float msl_asinh(float) __asm__("asinhf");
float msl_acosh(float) __asm__("acoshf");
float msl_atanh(float) __asm__("atanhf");
}

// Each unary function for float, half, bfloat and their vectors; half and bfloat round once, at the end.
#define MSL_UNARY(NAME, EXPRESSION)                                                                \
  METAL_FUNC float NAME(float x) { return EXPRESSION; }                                            \
  METAL_FUNC half NAME(half h) {                                                                   \
    float x = (float)h;                                                                            \
    return (half)(EXPRESSION);                                                                     \
  }                                                                                                \
  METAL_FUNC bfloat NAME(bfloat b) {                                                               \
    float x = (float)b;                                                                            \
    return (bfloat)(EXPRESSION);                                                                   \
  }                                                                                                \
  template <class T, int N>                                                                        \
  METAL_FUNC T __attribute__((ext_vector_type(N))) NAME(T __attribute__((ext_vector_type(N))) v) { \
    for (int i = 0; i < N; i++) v[i] = NAME((T)v[i]);                                              \
    return v;                                                                                      \
  }
// clang-format off
#define MSL_ALL_UNARY(X)                                                                  \
  X(exp, msl_exp(x)) X(exp2, msl_exp2(x)) X(exp10, msl_exp10(x))                          \
  X(log, msl_log(x)) X(log2, msl_log2(x)) X(log10, msl_log10(x))                          \
  X(sin, msl_sin(x)) X(cos, msl_cos(x)) X(tan, msl_tan(x))                                \
  X(asin, msl_asin(x)) X(acos, msl_acos(x)) X(atan, msl_atan(x))                          \
  X(sinh, msl_sinh(x)) X(cosh, msl_cosh(x)) X(tanh, msl_tanh(x))                          \
  X(asinh, msl_asinh(x)) X(acosh, msl_acosh(x)) X(atanh, msl_atanh(x))                    \
  X(sqrt, __builtin_sqrtf(x)) X(rsqrt, 1.0f / __builtin_sqrtf(x))                         \
  X(floor, __builtin_floorf(x)) X(ceil, __builtin_ceilf(x)) X(trunc, __builtin_truncf(x)) \
  X(round, __builtin_roundf(x)) X(rint, __builtin_rintf(x)) X(fabs, __builtin_fabsf(x))   \
  X(fract, x - __builtin_floorf(x))
#define MSL_ALL_BINARY(X)                                                                 \
  X(pow, msl_pow(x, y)) X(powr, msl_pow(x, y))                                            \
  X(fmod, msl_fmod(x, y)) X(atan2, msl_atan2(x, y))                                       \
  X(fmin, __builtin_fminf(x, y)) X(fmax, __builtin_fmaxf(x, y))                           \
  X(copysign, __builtin_copysignf(x, y))
// clang-format on

#define MSL_BINARY(NAME, EXPRESSION)                             \
  METAL_FUNC float NAME(float x, float y) { return EXPRESSION; } \
  METAL_FUNC half NAME(half h, half g) {                         \
    float x = (float)h, y = (float)g;                            \
    return (half)(EXPRESSION);                                   \
  }                                                              \
  METAL_FUNC bfloat NAME(bfloat b, bfloat c) {                   \
    float x = (float)b, y = (float)c;                            \
    return (bfloat)(EXPRESSION);                                 \
  }

namespace metal {
MSL_ALL_UNARY(MSL_UNARY)
MSL_ALL_BINARY(MSL_BINARY)
namespace fast {
MSL_ALL_UNARY(MSL_UNARY)
MSL_ALL_BINARY(MSL_BINARY)
} // namespace fast
namespace precise {
MSL_ALL_UNARY(MSL_UNARY)
MSL_ALL_BINARY(MSL_BINARY)
} // namespace precise

METAL_FUNC float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
METAL_FUNC half fma(half a, half b, half c) { return (half)__builtin_fmaf((float)a, (float)b, (float)c); }
template <int N> METAL_FUNC vec<float, N> fma(vec<float, N> a, vec<float, N> b, vec<float, N> c) {
  for (int i = 0; i < N; i++) a[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return a;
}
METAL_FUNC float ldexp(float x, int e) { return __builtin_ldexpf(x, e); }

// One type for all arguments, as Metal's overloads demand: there max(float, half) is ambiguous.
template <class T>
concept scalar = is_integral_v<T> || is_floating_point_v<T>;
template <scalar T> METAL_FUNC T min(T a, T b) { return b < a ? b : a; }
template <scalar T> METAL_FUNC T max(T a, T b) { return a < b ? b : a; }
template <scalar T> METAL_FUNC T clamp(T x, T low, T high) { return min(max(x, low), high); }
template <scalar T> METAL_FUNC T abs(T x) { return x < T(0) ? T(-x) : x; }
template <scalar T> METAL_FUNC T sign(T x) { return x > T(0) ? T(1) : (x < T(0) ? T(-1) : T(0)); }
template <scalar T> METAL_FUNC T select(T no, T yes, bool which) { return which ? yes : no; }
template <scalar T> METAL_FUNC T mix(T a, T b, T t) { return a + (b - a) * t; }
template <class T, int N>
METAL_FUNC T __attribute__((ext_vector_type(N))) min(T __attribute__((ext_vector_type(N))) a,
                                                     T __attribute__((ext_vector_type(N))) b) {
  for (int i = 0; i < N; i++) a[i] = min((T)a[i], (T)b[i]);
  return a;
}
template <class T, int N>
METAL_FUNC T __attribute__((ext_vector_type(N))) max(T __attribute__((ext_vector_type(N))) a,
                                                     T __attribute__((ext_vector_type(N))) b) {
  for (int i = 0; i < N; i++) a[i] = max((T)a[i], (T)b[i]);
  return a;
}
template <class T, int N>
METAL_FUNC T __attribute__((ext_vector_type(N))) abs(T __attribute__((ext_vector_type(N))) v) {
  for (int i = 0; i < N; i++) v[i] = abs((T)v[i]);
  return v;
}
template <class T, int N>
METAL_FUNC T dot(T __attribute__((ext_vector_type(N))) a, T __attribute__((ext_vector_type(N))) b) {
  T sum = a[0] * b[0];
  for (int i = 1; i < N; i++) sum += a[i] * b[i];
  return sum;
}

template <class T> METAL_FUNC bool isnan(T x) { return __builtin_isnan((float)x); }
template <class T> METAL_FUNC bool isinf(T x) { return __builtin_isinf((float)x); }
template <class T> METAL_FUNC bool isfinite(T x) { return __builtin_isfinite((float)x); }
template <class T> METAL_FUNC bool signbit(T x) { return __builtin_signbit((float)x); }

METAL_FUNC uint popcount(uint x) { return (uint)__builtin_popcount(x); }
METAL_FUNC ulong popcount(ulong x) { return (ulong)__builtin_popcountl(x); }
METAL_FUNC uint clz(uint x) { return x ? (uint)__builtin_clz(x) : 32u; }
METAL_FUNC uint ctz(uint x) { return x ? (uint)__builtin_ctz(x) : 32u; }
METAL_FUNC uint reverse_bits(uint x) { return __builtin_bitreverse32(x); }
METAL_FUNC uint rotate(uint x, uint n) { return (x << (n & 31)) | (x >> ((32 - n) & 31)); }
METAL_FUNC uint extract_bits(uint x, uint offset, uint bits) {
  return bits >= 32 ? x >> offset : (x >> offset) & ((1u << bits) - 1);
}
METAL_FUNC int extract_bits(int x, uint offset, uint bits) {
  return bits == 0 ? 0 : (int)((uint)x << (32 - offset - bits)) >> (32 - bits);
}
METAL_FUNC uint mulhi(uint a, uint b) { return (uint)(((ulong)a * b) >> 32); }
METAL_FUNC ulong mulhi(ulong a, ulong b) { return (ulong)(((unsigned __int128)a * b) >> 64); }
METAL_FUNC int mad24(int a, int b, int c) { return a * b + c; }
METAL_FUNC uint mad24(uint a, uint b, uint c) { return a * b + c; }
} // namespace metal
