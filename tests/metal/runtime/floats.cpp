// Conversions between float32 and 16-bit floats, round to nearest even, that the compiler calls by name.
#include "libc.h"

static u32 bits_of(float f) { return __builtin_bit_cast(u32, f); }

// The quotient of m / 2^shift, ties to even.
static u32 shift_to_even(u32 m, u32 shift) {
  u32 quotient = m >> shift, rest = m & ((1u << shift) - 1), half = 1u << (shift - 1);
  return quotient + (rest > half || (rest == half && (quotient & 1)));
}

static u16 to_half(float f) {
  u32 sign = bits_of(f) >> 16 & 0x8000, a = bits_of(f) & 0x7fffffff;
  if (a > 0x7f800000) return (u16)(sign | 0x7e00);  // NaN
  if (a >= 0x477ff000) return (u16)(sign | 0x7c00); // rounds to infinity
  if (a < 0x33000000) return (u16)sign;             // rounds to zero
  if (a < 0x38800000)                               // subnormal half
    return (u16)(sign | shift_to_even((a & 0x7fffff) | 0x800000, 126 - (a >> 23)));
  return (u16)(sign | shift_to_even(a - 0x38000000, 13));
}

static float from_half(u16 h) {
  u32 sign = (u32)(h & 0x8000) << 16, exponent = h >> 10 & 31, mantissa = h & 0x3ff;
  if (exponent == 31) return __builtin_bit_cast(float, sign | 0x7f800000 | mantissa << 13);
  if (exponent) return __builtin_bit_cast(float, sign | (exponent + 112) << 23 | mantissa << 13);
  float magnitude = (float)mantissa * 0x1p-24f; // subnormal: exact in float32
  return __builtin_bit_cast(float, sign | bits_of(magnitude));
}

static u16 to_bfloat(float f) {
  u32 x = bits_of(f);
  if ((x & 0x7fffffff) > 0x7f800000) return (u16)(x >> 16 | 0x40); // NaN stays NaN
  return (u16)((x + 0x7fff + (x >> 16 & 1)) >> 16);
}

extern "C" float __extendhfsf2(_Float16 h) { return from_half(__builtin_bit_cast(u16, h)); }
extern "C" _Float16 __truncsfhf2(float f) { return __builtin_bit_cast(_Float16, to_half(f)); }
extern "C" __bf16 __truncsfbf2(float f) { return __builtin_bit_cast(__bf16, to_bfloat(f)); }
