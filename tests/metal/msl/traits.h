// metal_type_traits and metal_limits: questions a template may ask about a type.
#pragma once
#include "types.h"

namespace metal {
template <class T, T v> struct integral_constant {
  typedef T value_type;
  static constexpr T value = v;
  constexpr operator T() const { return v; }
};
template <bool B> using bool_constant = integral_constant<bool, B>;
typedef bool_constant<true> true_type;
typedef bool_constant<false> false_type;

template <class A, class B> struct is_same : false_type {};
template <class A> struct is_same<A, A> : true_type {};
template <class A, class B> constexpr bool is_same_v = is_same<A, B>::value;

template <bool B, class T = void> struct enable_if {};
template <class T> struct enable_if<true, T> {
  typedef T type;
};
template <bool B, class T = void> using enable_if_t = typename enable_if<B, T>::type;

template <bool B, class T, class F> struct conditional {
  typedef T type;
};
template <class T, class F> struct conditional<false, T, F> {
  typedef F type;
};
template <bool B, class T, class F> using conditional_t = typename conditional<B, T, F>::type;

template <class T> using remove_cv_t = __remove_cv(T);
template <class T> struct remove_cv {
  typedef remove_cv_t<T> type;
};
template <class T> using remove_reference_t = __remove_reference_t(T);
template <class T> struct remove_reference {
  typedef remove_reference_t<T> type;
};

template <class T> struct remove_addrspace {
  typedef T type;
};
template <class T> struct remove_addrspace<device T> {
  typedef T type;
};
template <class T> struct remove_addrspace<threadgroup T> {
  typedef T type;
};
template <class T> struct remove_addrspace<T __attribute__((address_space(2)))> {
  typedef T type;
};
template <class T> using remove_addrspace_t = typename remove_addrspace<T>::type;

template <class T>
struct is_floating_point : bool_constant<is_same_v<T, float> || is_same_v<T, half> || is_same_v<T, bfloat>> {
};
template <class T> constexpr bool is_floating_point_v = is_floating_point<T>::value;
template <class T> struct is_integral : bool_constant<__is_integral(T)> {};
template <class T> constexpr bool is_integral_v = is_integral<T>::value;
template <class T> struct is_unsigned : bool_constant<__is_unsigned(T)> {};
template <class T> constexpr bool is_unsigned_v = is_unsigned<T>::value;
template <class T> struct is_signed : bool_constant<is_floating_point_v<T> || __is_signed(T)> {};
template <class T> constexpr bool is_signed_v = is_signed<T>::value;
template <class A, class B> struct is_convertible : bool_constant<__is_convertible(A, B)> {};
template <class A, class B> constexpr bool is_convertible_v = is_convertible<A, B>::value;
template <class T> T&& declval();

template <class T> struct numeric_limits;
#define MSL_INTEGER_LIMITS(T, LOW, HIGH)        \
  template <> struct numeric_limits<T> {        \
    static constexpr T min() { return LOW; }    \
    static constexpr T lowest() { return LOW; } \
    static constexpr T max() { return HIGH; }   \
  };
MSL_INTEGER_LIMITS(bool, false, true)
MSL_INTEGER_LIMITS(uchar, 0, 255)
MSL_INTEGER_LIMITS(ushort, 0, 65535)
MSL_INTEGER_LIMITS(uint, 0, 4294967295u)
MSL_INTEGER_LIMITS(ulong, 0, 18446744073709551615ul)
MSL_INTEGER_LIMITS(signed char, -128, 127)
MSL_INTEGER_LIMITS(char, -128, 127)
MSL_INTEGER_LIMITS(short, -32768, 32767)
MSL_INTEGER_LIMITS(int, -2147483647 - 1, 2147483647)
MSL_INTEGER_LIMITS(long, -9223372036854775807l - 1, 9223372036854775807l)
#define MSL_FLOAT_LIMITS(T, LEAST, HIGH)                             \
  template <> struct numeric_limits<T> {                             \
    static constexpr T min() { return (T)LEAST; }                    \
    static constexpr T lowest() { return (T) - HIGH; }               \
    static constexpr T max() { return (T)HIGH; }                     \
    static constexpr T infinity() { return (T)__builtin_inff(); }    \
    static constexpr T quiet_NaN() { return (T)__builtin_nanf(""); } \
  };
MSL_FLOAT_LIMITS(float, 1.17549435e-38f, 3.402823466e+38f)
MSL_FLOAT_LIMITS(half, 6.103515625e-05f, 65504.0f)
MSL_FLOAT_LIMITS(bfloat, 1.17549435e-38f, 3.38953139e+38f)
} // namespace metal
