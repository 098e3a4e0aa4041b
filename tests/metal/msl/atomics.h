// metal_atomic: relaxed atomics on int, uint and (add, exchange) float.
// Lanes are fibers of one thread, so plain arithmetic is atomic; the runtime is told of each access.
#pragma once
#include "simdgroup.h"

namespace metal {
enum memory_order { memory_order_relaxed = 0 };
enum thread_scope { thread_scope_threadgroup, thread_scope_device, thread_scope_simdgroup };

template <class T> struct atomic {
  T value;
};
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
typedef atomic<float> atomic_float;
typedef atomic<bool> atomic_bool;
} // namespace metal

namespace msl {
template <class T, class Change> MSL_QUIET T update(msl_place at, void* address, bool reads, Change change) {
  msl_atomic_access(at, address, sizeof(T), reads);
  T before, after;
  __builtin_memcpy(&before, address, sizeof(T));
  after = change(before);
  __builtin_memcpy(address, &after, sizeof(T));
  return before;
}
} // namespace msl

#define MSL_ATOMIC_UPDATE(SPACE, NAME, READS, EXPRESSION)                                  \
  template <class T, class U>                                                              \
  inline T NAME(volatile SPACE atomic<T>* object, U operand, memory_order, MSL_AT) {       \
    T y = (T)operand;                                                                      \
    return msl::update<T>(at, (void*)object, READS, [y](T x) { return (T)(EXPRESSION); }); \
  }
#define MSL_ATOMICS(SPACE)                                                                                \
  template <class T>                                                                                      \
  inline T atomic_load_explicit(const volatile SPACE atomic<T>* object, memory_order, MSL_AT) {           \
    return msl::update<T>(at, (void*)object, true, [](T x) { return x; });                                \
  }                                                                                                       \
  template <class T, class U>                                                                             \
  inline void atomic_store_explicit(volatile SPACE atomic<T>* object, U value, memory_order, MSL_AT) {    \
    T y = (T)value;                                                                                       \
    msl::update<T>(at, (void*)object, false, [y](T) { return y; });                                       \
  }                                                                                                       \
  MSL_ATOMIC_UPDATE(SPACE, atomic_exchange_explicit, true, y)                                             \
  MSL_ATOMIC_UPDATE(SPACE, atomic_fetch_add_explicit, true, x + y)                                        \
  MSL_ATOMIC_UPDATE(SPACE, atomic_fetch_sub_explicit, true, x - y)                                        \
  MSL_ATOMIC_UPDATE(SPACE, atomic_fetch_or_explicit, true, x | y)                                         \
  MSL_ATOMIC_UPDATE(SPACE, atomic_fetch_and_explicit, true, x& y)                                         \
  MSL_ATOMIC_UPDATE(SPACE, atomic_fetch_xor_explicit, true, x ^ y)                                        \
  MSL_ATOMIC_UPDATE(SPACE, atomic_fetch_max_explicit, true, msl::integer_only(x) < y ? y : x)             \
  MSL_ATOMIC_UPDATE(SPACE, atomic_fetch_min_explicit, true, msl::integer_only(y) < x ? y : x)             \
  template <class T>                                                                                      \
  inline bool atomic_compare_exchange_weak_explicit(volatile SPACE atomic<T>* object, thread T* expected, \
                                                    T desired, memory_order, memory_order, MSL_AT) {      \
    T wanted = *expected;                                                                                 \
    T before = msl::update<T>(at, (void*)object, true, [=](T x) { return x == wanted ? desired : x; });   \
    *expected = before;                                                                                   \
    return before == wanted;                                                                              \
  }

namespace msl {
template <class T> inline T integer_only(T value) {
  static_assert(!metal::is_floating_point_v<T>, "Metal has no atomic minimum or maximum of floats");
  return value;
}
} // namespace msl

namespace metal {
MSL_ATOMICS(device)
MSL_ATOMICS(threadgroup)
} // namespace metal
