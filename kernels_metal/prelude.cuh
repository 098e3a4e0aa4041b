// Metal's names for CUDA: goes before the text that cuda.py translates. A simdgroup is a warp, threadgroup
// memory is shared memory. Simdgroup matrices are put together from shuffles: right, not fast.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef __half half;
typedef __nv_bfloat16 bfloat;

#define INFINITY __int_as_float(0x7f800000)
#define ALL_LANES 0xffffffffu

// ---- vectors: constructors by name, and the operators that kernels use
#define float2(...) make_float2(__VA_ARGS__)
#define ulong2(...) make_ulong2(__VA_ARGS__)
__device__ inline float2 operator*(float2 a, float b) { return make_float2(a.x * b, a.y * b); }
__device__ inline float2 operator+(float2 a, float b) { return make_float2(a.x + b, a.y + b); }

template <class To, class From>
__device__ inline To as_type(From value) {
  static_assert(sizeof(To) == sizeof(From), "as_type keeps the size");
  To result;
  memcpy(&result, &value, sizeof(To));
  return result;
}

namespace precise {
__device__ inline float tanh(float x) { return tanhf(x); }
}  // namespace precise

// ---- barriers
enum class mem_flags { mem_none, mem_device, mem_threadgroup };
__device__ inline void threadgroup_barrier(mem_flags) { __syncthreads(); }
__device__ inline void simdgroup_barrier(mem_flags) { __syncwarp(); }

// ---- across the lanes of a simdgroup
template <class T>
__device__ inline T simd_shuffle(T value, ushort lane) { return __shfl_sync(ALL_LANES, value, lane); }
template <class T>
__device__ inline T simd_shuffle_xor(T value, ushort mask) { return __shfl_xor_sync(ALL_LANES, value, mask); }

template <class T>
__device__ inline T simd_sum(T value) {
  for (int step = 16; step; step /= 2) value += simd_shuffle_xor(value, ushort(step));
  return value;
}
template <class T>
__device__ inline T simd_max(T value) {
  for (int step = 16; step; step /= 2) {
    const T other = simd_shuffle_xor(value, ushort(step));
    value = value < other ? other : value;
  }
  return value;
}
template <class T>
__device__ inline T simd_min(T value) {
  for (int step = 16; step; step /= 2) {
    const T other = simd_shuffle_xor(value, ushort(step));
    value = other < value ? other : value;
  }
  return value;
}
__device__ inline int prelude_lane() {
  return (threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) & 31;
}
template <class T>
__device__ inline T simd_prefix_inclusive_sum(T value) {
  for (int step = 1; step < 32; step *= 2) {
    const T before = __shfl_up_sync(ALL_LANES, value, step);
    if (prelude_lane() >= step) value += before;
  }
  return value;
}
template <class T>
__device__ inline T simd_prefix_exclusive_sum(T value) { return simd_prefix_inclusive_sum(value) - value; }

// ---- 8 x 8 matrices, two elements a lane, by the map that attention.metal states
template <class T, int Columns, int Rows>
struct simdgroup_matrix {
  T held[2];
  simdgroup_matrix() = default;
  __device__ explicit simdgroup_matrix(T diagonal);
  __device__ T* thread_elements() { return held; }
};

__device__ inline int prelude_row() { return ((prelude_lane() >> 2) & 4) + ((prelude_lane() >> 1) & 3); }
__device__ inline int prelude_column() { return ((prelude_lane() >> 2) & 2) * 2 + (prelude_lane() & 1) * 2; }
__device__ inline int prelude_holder(int row, int column) {
  return (row & 4) << 2 | (row & 3) << 1 | (column & 4) << 1 | (column & 2) >> 1;
}

template <class T, int Columns, int Rows>
__device__ inline simdgroup_matrix<T, Columns, Rows>::simdgroup_matrix(T diagonal) {
  for (int i = 0; i < 2; i++) held[i] = prelude_row() == prelude_column() + i ? diagonal : T(0.0f);
}
template <class T, int Columns, int Rows>
__device__ inline simdgroup_matrix<T, Columns, Rows> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, Columns, Rows> filled;
  filled.held[0] = filled.held[1] = value;
  return filled;
}
template <class D, class A, class B, class C>
__device__ inline void simdgroup_multiply_accumulate(
    simdgroup_matrix<D, 8, 8>& d, simdgroup_matrix<A, 8, 8>& a, simdgroup_matrix<B, 8, 8>& b,
    simdgroup_matrix<C, 8, 8>& c) {
  float sums[2] = {float(c.held[0]), float(c.held[1])};
  for (int k = 0; k < 8; k++) {
    const int left = prelude_holder(prelude_row(), k & ~1);
    const int right = prelude_holder(k, prelude_column());
    const float even = simd_shuffle(float(a.held[0]), ushort(left));
    const float odd = simd_shuffle(float(a.held[1]), ushort(left));
    const float term = k & 1 ? odd : even;
    sums[0] += term * simd_shuffle(float(b.held[0]), ushort(right));
    sums[1] += term * simd_shuffle(float(b.held[1]), ushort(right));
  }
  d.held[0] = D(sums[0]);
  d.held[1] = D(sums[1]);
}
template <class T>
__device__ inline void simdgroup_load(
    simdgroup_matrix<T, 8, 8>& matrix, const T* source, ulong pitch = 8, ulong2 origin = make_ulong2(0, 0),
    bool transposed = false) {
  for (int i = 0; i < 2; i++) {
    const int row = prelude_row(), column = prelude_column() + i;
    const int y = transposed ? column : row, x = transposed ? row : column;
    matrix.held[i] = source[(origin.y + y) * pitch + origin.x + x];
  }
}
template <class T>
__device__ inline void simdgroup_store(simdgroup_matrix<T, 8, 8> matrix, T* target, ulong pitch = 8) {
  for (int i = 0; i < 2; i++) target[prelude_row() * pitch + prelude_column() + i] = matrix.held[i];
}
