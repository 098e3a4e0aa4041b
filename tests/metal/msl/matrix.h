// metal_simdgroup_matrix: 8x8 matrices held by the 32 lanes of a simdgroup, two elements a lane.
// Which two is Apple's own map, published by use in MLX's steel/gemm/mma.h.
#pragma once
#include "simdgroup.h"

namespace msl {
MSL_QUIET_INLINE unsigned matrix_row(unsigned lane) { return ((lane >> 2) & 4) + ((lane >> 1) & 3); }
MSL_QUIET_INLINE unsigned matrix_column(unsigned lane) { return ((lane >> 2) & 2) * 2 + (lane & 1) * 2; }
// The lane that holds (row, column) and (row, column + 1), for an even column.
MSL_QUIET_INLINE unsigned matrix_lane(unsigned row, unsigned column) {
  return (row & 4) << 2 | (row & 3) << 1 | (column & 4) << 1 | (column & 2) >> 1;
}
} // namespace msl

namespace metal {
template <class T, int Columns, int Rows> struct simdgroup_matrix {
  static_assert(Columns == 8 && Rows == 8, "simdgroup matrices are 8x8");
  vec<T, 2> elements;
  simdgroup_matrix() = default;
  explicit simdgroup_matrix(T diagonal) {
    unsigned row = msl::matrix_row(msl_lane()), column = msl::matrix_column(msl_lane());
    elements = vec<T, 2>{row == column ? diagonal : T(0), row == column + 1 ? diagonal : T(0)};
  }
  thread vec<T, 2>& thread_elements() { return elements; }
  const thread vec<T, 2>& thread_elements() const { return elements; }
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;

template <class T, int Columns = 8, int Rows = 8>
inline simdgroup_matrix<T, Columns, Rows> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, Columns, Rows> filled;
  filled.elements = vec<T, 2>{value, value};
  return filled;
}

template <class D, class A, class B, class C>
MSL_QUIET void simdgroup_multiply_accumulate(thread simdgroup_matrix<D, 8, 8>& d,
                                             thread simdgroup_matrix<A, 8, 8>& a,
                                             thread simdgroup_matrix<B, 8, 8>& b,
                                             thread simdgroup_matrix<C, 8, 8>& c, MSL_AT) {
  struct operand {
    vec<A, 2> a;
    vec<B, 2> b;
  };
  auto all = msl::exchange(at, "simdgroup_multiply_accumulate", operand{a.elements, b.elements});
  if (all.result.lanes != ~0u) msl_fail(at, "a simdgroup matrix operation needs all 32 lanes");
  unsigned row = msl::matrix_row(msl_lane()), column = msl::matrix_column(msl_lane());
  float a_row[8], b_columns[2][8];
  for (unsigned k = 0; k < 8; k++) {
    a_row[k] = (float)all[msl::matrix_lane(row, k & ~1u)].a[k & 1];
    vec<B, 2> pair = all[msl::matrix_lane(k, column)].b;
    b_columns[0][k] = (float)pair[0];
    b_columns[1][k] = (float)pair[1];
  }
  for (int j = 0; j < 2; j++) {
    float sum = (float)c.elements[j];
    for (int k = 0; k < 8; k++) sum += a_row[k] * b_columns[j][k];
    d.elements[j] = (D)sum;
  }
}
template <class D, class A, class B>
METAL_FUNC MSL_TOGETHER void simdgroup_multiply(thread simdgroup_matrix<D, 8, 8>& d,
                                                thread simdgroup_matrix<A, 8, 8>& a,
                                                thread simdgroup_matrix<B, 8, 8>& b, MSL_AT) {
  auto zero = make_filled_simdgroup_matrix<D, 8, 8>(D(0));
  simdgroup_multiply_accumulate(d, a, b, zero, at);
}

#define MSL_MATRIX_MEMORY(SPACE)                                                             \
  template <class T>                                                                         \
  METAL_FUNC void simdgroup_load(thread simdgroup_matrix<T, 8, 8>& m, const SPACE T* source, \
                                 ulong elements_per_row = 8, ulong2 origin = ulong2{0, 0},   \
                                 bool transpose = false) {                                   \
    for (unsigned k = 0; k < 2; k++) {                                                       \
      ulong row = msl::matrix_row(msl_lane()), column = msl::matrix_column(msl_lane()) + k;  \
      ulong y = transpose ? column : row, x = transpose ? row : column;                      \
      m.elements[k] = source[(origin[1] + y) * elements_per_row + origin[0] + x];            \
    }                                                                                        \
  }                                                                                          \
  template <class T>                                                                         \
  METAL_FUNC void simdgroup_store(thread simdgroup_matrix<T, 8, 8> m, SPACE T* target,       \
                                  ulong elements_per_row = 8, ulong2 origin = ulong2{0, 0},  \
                                  bool transpose = false) {                                  \
    for (unsigned k = 0; k < 2; k++) {                                                       \
      ulong row = msl::matrix_row(msl_lane()), column = msl::matrix_column(msl_lane()) + k;  \
      ulong y = transpose ? column : row, x = transpose ? row : column;                      \
      target[(origin[1] + y) * elements_per_row + origin[0] + x] = m.elements[k];            \
    }                                                                                        \
  }
MSL_MATRIX_MEMORY(device)
MSL_MATRIX_MEMORY(threadgroup)
} // namespace metal
