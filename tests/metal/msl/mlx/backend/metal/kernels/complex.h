// In place of the header of the same name in MLX, whose members are qualified by address space, which clang
// lacks. Only what MLX's utils.h needs to compile: no kernel of ours calculates with complex numbers.
#pragma once
#include <metal_stdlib>

template <class T> struct complex_t {
  T real, imag;
  constexpr complex_t() : real(0), imag(0) {}
  constexpr complex_t(T r, T i) : real(r), imag(i) {}
  constexpr complex_t(T r) : real(r), imag(0) {}
  constexpr complex_t operator+(complex_t o) const { return {real + o.real, imag + o.imag}; }
};
typedef complex_t<float> complex64_t;
