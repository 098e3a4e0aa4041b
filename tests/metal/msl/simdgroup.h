// metal_simdgroup and metal_compute: barriers, and operations across the 32 lanes of a simdgroup.
// Each operation is one rendezvous (msl_exchange) and then arithmetic over the lanes' operands.
#pragma once
#include "runtime.h"
#include "traits.h"

// The arithmetic below reads the runtime's slots, not a kernel's memory: it is not instrumented.
#define MSL_UNWATCHED no_sanitize("thread", "coverage", "signed-integer-overflow")
#define MSL_QUIET __attribute__((MSL_UNWATCHED, noinline, convergent, nomerge))
#define MSL_QUIET_INLINE inline __attribute__((MSL_UNWATCHED, always_inline))
#define MSL_AT msl_place at = msl_place::here()

namespace metal {
enum class mem_flags {
  mem_none = 0,
  mem_device = 1,
  mem_threadgroup = 2,
  mem_device_and_threadgroup = 3,
  mem_texture = 4
};
inline constexpr mem_flags operator|(mem_flags a, mem_flags b) { return (mem_flags)((int)a | (int)b); }

METAL_FUNC MSL_TOGETHER void threadgroup_barrier(mem_flags flags, MSL_AT) {
  msl_threadgroup_barrier(at, (int)flags);
}
METAL_FUNC MSL_TOGETHER void simdgroup_barrier(mem_flags flags, MSL_AT) {
  msl_simdgroup_barrier(at, (int)flags);
}
} // namespace metal

namespace msl {
template <class T> struct lanes {
  msl_exchange_result result;
  MSL_QUIET_INLINE T operator[](unsigned lane) const {
    T value;
    __builtin_memcpy(&value, result.slots + MSL_SLOT * lane, sizeof(T));
    return value;
  }
  MSL_QUIET_INLINE bool active(unsigned lane) const { return lane < 32 && (result.lanes >> lane & 1); }
};

template <class T>
MSL_QUIET_INLINE MSL_TOGETHER lanes<T> exchange(msl_place at, const char* what, T operand) {
  static_assert(sizeof(T) <= MSL_SLOT, "operand of a simdgroup operation is too large");
  return {msl_exchange(at, __builtin_return_address(0), what, &operand, sizeof(T))};
}

// The operand of lane `from`; reading a lane that is not there is undefined in Metal and a failure here.
template <class T> MSL_QUIET_INLINE T take(msl_place at, const char* what, lanes<T> all, unsigned from) {
  if (!all.active(from)) msl_fail(at, what);
  return all[from & 31];
}

// The operand of lane `from`, or all bits set (NaN, -1) for a lane that is not there: what Metal leaves
// undefined for the edge lanes of a shift must not be used.
template <class T> MSL_QUIET_INLINE T take_or_garbage(lanes<T> all, unsigned from) {
  if (all.active(from)) return all[from];
  T garbage;
  __builtin_memset(&garbage, 0xff, sizeof garbage);
  return garbage;
}
} // namespace msl

namespace metal {
// Sums go in a tree, half the lanes at a time; a GPU's own order is not known.
#define MSL_TREE(NAME, NEUTRAL, EXPRESSION)                                            \
  template <class T> MSL_QUIET T NAME(T value, MSL_AT) {                               \
    auto all = msl::exchange(at, #NAME, value);                                        \
    T tree[32];                                                                        \
    for (unsigned i = 0; i < 32; i++) tree[i] = all.active(i) ? all[i] : (T)(NEUTRAL); \
    for (int width = 16; width; width >>= 1)                                           \
      for (int i = 0; i < width; i++) {                                                \
        T x = tree[i], y = tree[i + width];                                            \
        tree[i] = (T)(EXPRESSION);                                                     \
      }                                                                                \
    return tree[0];                                                                    \
  }
MSL_TREE(simd_sum, 0, x + y)
MSL_TREE(simd_product, 1, x* y)
MSL_TREE(simd_or, 0, x | y)
MSL_TREE(simd_and, ~T(0), x& y)
MSL_TREE(simd_xor, 0, x ^ y)

#define MSL_EXTREME(NAME, EXPRESSION)                    \
  template <class T> MSL_QUIET T NAME(T value, MSL_AT) { \
    auto all = msl::exchange(at, #NAME, value);          \
    T x = value;                                         \
    for (unsigned i = 0; i < 32; i++)                    \
      if (all.active(i)) {                               \
        T y = all[i];                                    \
        x = (EXPRESSION);                                \
      }                                                  \
    return x;                                            \
  }
MSL_EXTREME(simd_max, x < y ? y : x)
MSL_EXTREME(simd_min, y < x ? y : x)

#define MSL_PREFIX(NAME, START, LAST, EXPRESSION)        \
  template <class T> MSL_QUIET T NAME(T value, MSL_AT) { \
    auto all = msl::exchange(at, #NAME, value);          \
    T x = (T)(START);                                    \
    for (unsigned i = 0; i < msl_lane() + (LAST); i++)   \
      if (all.active(i)) {                               \
        T y = all[i];                                    \
        x = (T)(EXPRESSION);                             \
      }                                                  \
    return x;                                            \
  }
MSL_PREFIX(simd_prefix_exclusive_sum, 0, 0, x + y)
MSL_PREFIX(simd_prefix_inclusive_sum, 0, 1, x + y)
MSL_PREFIX(simd_prefix_exclusive_product, 1, 0, x* y)
MSL_PREFIX(simd_prefix_inclusive_product, 1, 1, x* y)

#define MSL_SHUFFLE(NAME, FROM)                                              \
  template <class T> MSL_QUIET T NAME(T value, ushort n, MSL_AT) {           \
    auto all = msl::exchange(at, #NAME, value);                              \
    return msl::take(at, #NAME " from a lane that is not there", all, FROM); \
  }
MSL_SHUFFLE(simd_shuffle, n)
MSL_SHUFFLE(simd_broadcast, n)
MSL_SHUFFLE(simd_shuffle_xor, msl_lane() ^ n)
MSL_SHUFFLE(simd_shuffle_rotate_down, (msl_lane() + n) & 31)
MSL_SHUFFLE(simd_shuffle_rotate_up, (msl_lane() - n) & 31)
MSL_SHUFFLE(quad_shuffle_xor, msl_lane() ^ (n & 3))
MSL_SHUFFLE(quad_broadcast, (msl_lane() & ~3u) + (n & 3))
MSL_SHUFFLE(quad_shuffle, (msl_lane() & ~3u) + (n & 3))

template <class T> MSL_QUIET T simd_shuffle_down(T value, ushort delta, MSL_AT) {
  return msl::take_or_garbage(msl::exchange(at, "simd_shuffle_down", value), msl_lane() + delta);
}
template <class T> MSL_QUIET T simd_shuffle_up(T value, ushort delta, MSL_AT) {
  return msl::take_or_garbage(msl::exchange(at, "simd_shuffle_up", value), msl_lane() - delta);
}
template <class T> MSL_QUIET T simd_shuffle_and_fill_up(T value, T fill, ushort delta, MSL_AT) {
  struct both {
    T value, fill;
  };
  auto all = msl::exchange(at, "simd_shuffle_and_fill_up", both{value, fill});
  return msl_lane() < delta ? all[32 + msl_lane() - delta & 31].fill : all[msl_lane() - delta].value;
}
template <class T> MSL_QUIET T simd_shuffle_and_fill_down(T value, T fill, ushort delta, MSL_AT) {
  struct both {
    T value, fill;
  };
  auto all = msl::exchange(at, "simd_shuffle_and_fill_down", both{value, fill});
  return msl_lane() + delta > 31 ? all[msl_lane() + delta - 32 & 31].fill : all[msl_lane() + delta].value;
}
template <class T> MSL_QUIET T simd_broadcast_first(T value, MSL_AT) {
  auto all = msl::exchange(at, "simd_broadcast_first", value);
  return all[(unsigned)__builtin_ctz(all.result.lanes)];
}
MSL_QUIET inline bool simd_is_first(MSL_AT) {
  auto all = msl::exchange(at, "simd_is_first", (char)0);
  return msl_lane() == (unsigned)__builtin_ctz(all.result.lanes);
}

struct simd_vote {
  ulong bits;
  explicit operator ulong() const { return bits; }
  bool all() const { return bits == 0xfffffffful; }
  bool any() const { return bits != 0; }
};
MSL_QUIET inline simd_vote simd_ballot(bool vote, MSL_AT) {
  auto all = msl::exchange(at, "simd_ballot", vote);
  ulong bits = 0;
  for (unsigned i = 0; i < 32; i++)
    if (all.active(i) && all[i]) bits |= 1ul << i;
  return {bits};
}
METAL_FUNC MSL_TOGETHER bool simd_any(bool vote, MSL_AT) { return simd_ballot(vote, at).bits != 0; }
METAL_FUNC MSL_TOGETHER bool simd_all(bool vote, MSL_AT) { return simd_ballot(!vote, at).bits == 0; }

template <class T> MSL_QUIET T quad_sum(T value, MSL_AT) {
  auto all = msl::exchange(at, "quad_sum", value);
  unsigned base = msl_lane() & ~3u;
  T sum = 0;
  for (unsigned i = base; i < base + 4; i++)
    if (all.active(i)) sum += all[i];
  return sum;
}
template <class T> MSL_QUIET T quad_max(T value, MSL_AT) {
  auto all = msl::exchange(at, "quad_max", value);
  unsigned base = msl_lane() & ~3u;
  for (unsigned i = base; i < base + 4; i++)
    if (all.active(i) && value < all[i]) value = all[i];
  return value;
}
} // namespace metal
