// MSL's address spaces, scalar types and vectors, spelled in clang's terms.
#pragma once

#define device __attribute__((address_space(1)))
#define constant const __attribute__((address_space(2)))
#define threadgroup __attribute__((address_space(3)))
#define thread
#define kernel
#define METAL_FUNC inline __attribute__((always_inline))
#define __METAL_VERSION__ 310

typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long int64_t;
typedef unsigned long uint64_t;
typedef unsigned long size_t;
typedef long ptrdiff_t;
typedef unsigned long uintptr_t;
typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef _Float16 half;
typedef __bf16 bfloat;

#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define HUGE_VALF __builtin_inff()
#define FLT_MAX 3.402823466e+38f
#define FLT_MIN 1.17549435e-38f
#define FLT_EPSILON 1.19209290e-07f
#define HALF_MAX 65504.0f16
#define INT_MAX 2147483647
#define INT_MIN (-2147483647 - 1)
#define UINT_MAX 4294967295u
#define M_PI_F 3.14159265358979323846f
#define M_LN2_F 0.69314718055994530942f
#define M_LOG2E_F 1.44269504088896340736f
#define M_SQRT2_F 1.41421356237309504880f

namespace metal {
template <class T, int N> using vec = T __attribute__((ext_vector_type(N)));
}

// A packed vector has its element's alignment. Three elements need a struct: clang pads such vectors to four.
template <class T> struct msl_packed3 {
  T x, y, z;
  msl_packed3() = default;
  msl_packed3(metal::vec<T, 3> v) : x(v[0]), y(v[1]), z(v[2]) {}
  operator metal::vec<T, 3>() const { return metal::vec<T, 3>{x, y, z}; }
};

#define MSL_VECTORS(T)           \
  typedef metal::vec<T, 2> T##2; \
  typedef metal::vec<T, 3> T##3; \
  typedef metal::vec<T, 4> T##4;
#define MSL_PACKED(T)                                                              \
  typedef T packed_##T##2 __attribute__((ext_vector_type(2), aligned(sizeof(T)))); \
  typedef msl_packed3<T> packed_##T##3;                                            \
  typedef T packed_##T##4 __attribute__((ext_vector_type(4), aligned(sizeof(T))));
#define MSL_ALL_SCALARS(X) \
  X(float) X(half) X(bfloat) X(int) X(uint) X(short) X(ushort) X(char) X(uchar) X(long) X(ulong)
MSL_ALL_SCALARS(MSL_VECTORS)
MSL_ALL_SCALARS(MSL_PACKED)
MSL_VECTORS(bool)

// Vector constructors: edit.py turns `float4(a, b.xy, c)` into `msl::make<float4>(a, b.xy, c)`.
namespace msl {
template <class V> struct vector_of;
template <class T, int N> struct vector_of<T __attribute__((ext_vector_type(N)))> {
  typedef T element;
  static constexpr int size = N;
};
template <class V>
concept is_vector = requires { vector_of<V>::size; };

template <class V, class Part> inline void append(V& v, int& at, Part part) {
  typedef typename vector_of<V>::element Element;
  if constexpr (is_vector<Part>) {
    for (int k = 0; k < vector_of<Part>::size; k++) v[at++] = (Element)part[k];
  } else {
    v[at++] = (Element)part;
  }
}

template <class Part> constexpr int width() {
  if constexpr (is_vector<Part>)
    return vector_of<Part>::size;
  else
    return 1;
}

template <class V, class First, class... Rest> inline V make(First first, Rest... rest) {
  typedef typename vector_of<V>::element Element;
  V v{};
  if constexpr (sizeof...(Rest) == 0 && !is_vector<First>) {
    for (int k = 0; k < vector_of<V>::size; k++) v[k] = (Element)first;
  } else {
    static_assert((width<First>() + ... + width<Rest>()) == vector_of<V>::size,
                  "a vector constructor needs one value an element");
    int at = 0;
    append(v, at, first);
    (append(v, at, rest), ...);
  }
  return v;
}
} // namespace msl

template <class T, class F> inline T as_type(F value) {
  static_assert(sizeof(T) == sizeof(F), "as_type needs equal sizes");
  return __builtin_bit_cast(T, value);
}
