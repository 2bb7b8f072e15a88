// What is done to an element: how it is widened and narrowed, and the operations. The loops are in
// reduce/loops.h.
#pragma once

#include <algorithm>
#include <array>
#include <complex>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <type_traits>

#include "reduce/float8.h"
#include "reduce/half.h"

namespace gradsync::kernels {

// -- how an element is widened for arithmetic and narrowed back ---------------------------------

template <typename T>
struct Widening {
  using Wide = T;
  static Wide widen(T value) { return value; }
  static T narrow(Wide value) { return value; }
};

template <typename Half>
struct HalfWidening {
  using Wide = float;
  static Wide widen(Half value) { return value.to_float(); }
  static Half narrow(Wide value) { return Half::from(value); }
};
template <>
struct Widening<Float16> : HalfWidening<Float16> {};
template <>
struct Widening<Bfloat16> : HalfWidening<Bfloat16> {};
template <>
struct Widening<Float8E4M3fn> : HalfWidening<Float8E4M3fn> {};
template <>
struct Widening<Float8E5M2> : HalfWidening<Float8E5M2> {};
template <>
struct Widening<Float8E4M3fnuz> : HalfWidening<Float8E4M3fnuz> {};
template <>
struct Widening<Float8E5M2fnuz> : HalfWidening<Float8E5M2fnuz> {};
template <>
struct Widening<Complex32> {
  using Wide = std::complex<float>;
  static Wide widen(Complex32 value) { return value.to_complex(); }
  static Complex32 narrow(Wide value) { return Complex32::from(value); }
};

// Booleans are bytes in memory; any value but zero counts as true, and results are 0 or 1.
struct Boolean {
  std::uint8_t byte;
};
template <>
struct Widening<Boolean> {
  using Wide = std::uint8_t;
  static Wide widen(Boolean value) { return value.byte != 0 ? 1 : 0; }
  static Boolean narrow(Wide value) { return {value != 0 ? std::uint8_t{1} : std::uint8_t{0}}; }
};

// -- operations ----------------------------------------------------------------------------------

// Integers wrap around: computed as unsigned, where that is defined.
template <typename W, typename F>
W wrapping(W a, W b, F operation) {
  if constexpr (std::is_integral_v<W>) {
    using U = std::conditional_t<(sizeof(W) < sizeof(unsigned)), unsigned, std::make_unsigned_t<W>>;
    return static_cast<W>(operation(static_cast<U>(a), static_cast<U>(b)));
  } else {
    return operation(a, b);
  }
}

struct Sum {
  template <typename W>
  static W combine(W a, W b) {
    return wrapping(a, b, [](auto x, auto y) { return x + y; });
  }
};
struct Product {
  template <typename W>
  static W combine(W a, W b) {
    return wrapping(a, b, [](auto x, auto y) { return x * y; });
  }
};
// NaN wins: a comparison with it is false both ways, so the test must be for "not ordered" too.
struct Min {
  template <typename W>
  static W combine(W a, W b) {
    return (a < b || a != a) ? a : b;
  }
};
struct Max {
  template <typename W>
  static W combine(W a, W b) {
    return (a > b || a != a) ? a : b;
  }
};
struct BitAnd {
  template <typename W>
  static W combine(W a, W b) {
    return static_cast<W>(a & b);
  }
};
struct BitOr {
  template <typename W>
  static W combine(W a, W b) {
    return static_cast<W>(a | b);
  }
};
struct BitXor {
  template <typename W>
  static W combine(W a, W b) {
    return static_cast<W>(a ^ b);
  }
};

template <typename T>
struct ScalarOf {
  using type = T;
};
template <typename T>
struct ScalarOf<std::complex<T>> {
  using type = T;
};
template <typename T>
using Scalar = typename ScalarOf<T>::type;

}  // namespace gradsync::kernels
