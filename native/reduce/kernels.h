// The loops behind find_kernel: plain C++ that compilers vectorise, one template for all of them.
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

// -- the loop
// --------------------------------------------------------------------------------------

// Elements of a block: with two sources and a destination it stays in a first-level cache.
inline constexpr std::size_t block = 1024;

template <typename T>
void copy_block(std::span<std::byte* const> destinations, std::size_t start, std::size_t length) {
  for (std::size_t d = 1; d < destinations.size(); ++d) {
    std::memcpy(destinations[d] + start * sizeof(T), destinations[0] + start * sizeof(T),
                length * sizeof(T));
  }
}

// Works block by block: each source is read once from memory, the running result never leaves the
// core, and the last source is combined on the way to the first destination. A destination may be
// one of the sources: of each block everything is read before or while it is written, at the same
// index, which is what `ivdep` says.
template <typename T, typename Operation, bool Average>
void reduce(std::span<const std::byte* const> sources, std::span<std::byte* const> destinations,
            std::size_t count) {
  using W = Widening<T>;
  using Wide = typename W::Wide;
  const std::size_t last = sources.size() - 1;
  const auto ranks = static_cast<Scalar<Wide>>(sources.size());
  const auto finished = [ranks](Wide value) {
    if constexpr (Average) value /= ranks;
    (void)ranks;
    return W::narrow(value);
  };
  std::array<Wide, block> running;
  for (std::size_t start = 0; start < count; start += block) {
    const std::size_t length = std::min(block, count - start);
    const auto source = [&](std::size_t s) {
      return reinterpret_cast<const T*>(sources[s]) + start;
    };
    T* const out = reinterpret_cast<T*>(destinations[0]) + start;
    const T* const first = source(0);
    const T* const final = source(last);
    if (last == 0) {
#pragma GCC ivdep
      for (std::size_t i = 0; i < length; ++i) out[i] = finished(W::widen(first[i]));
    } else if (last == 1) {
#pragma GCC ivdep
      for (std::size_t i = 0; i < length; ++i) {
        out[i] = finished(Operation::combine(W::widen(first[i]), W::widen(final[i])));
      }
    } else {
      const T* const second = source(1);
      for (std::size_t i = 0; i < length; ++i) {
        running[i] = Operation::combine(W::widen(first[i]), W::widen(second[i]));
      }
      for (std::size_t s = 2; s < last; ++s) {
        const T* const next = source(s);
        for (std::size_t i = 0; i < length; ++i) {
          running[i] = Operation::combine(running[i], W::widen(next[i]));
        }
      }
#pragma GCC ivdep
      for (std::size_t i = 0; i < length; ++i) {
        out[i] = finished(Operation::combine(running[i], W::widen(final[i])));
      }
    }
    copy_block<T>(destinations, start, length);
  }
}

// A weighted sum, in the same blocks. A source of weight 0 adds nothing, whatever it holds.
template <typename T>
void weighted_sum(std::span<const std::byte* const> sources, std::span<const double> weights,
                  std::span<std::byte* const> destinations, std::size_t count) {
  using Wide = typename Widening<T>::Wide;
  std::array<Wide, block> accumulated;
  for (std::size_t start = 0; start < count; start += block) {
    const std::size_t length = std::min(block, count - start);
    accumulated.fill(Wide{});
    for (std::size_t s = 0; s < sources.size(); ++s) {
      if (weights[s] == 0.0) continue;
      const T* next = reinterpret_cast<const T*>(sources[s]) + start;
      const auto weight = static_cast<Scalar<Wide>>(weights[s]);
      for (std::size_t i = 0; i < length; ++i) {
        accumulated[i] += Widening<T>::widen(next[i]) * weight;
      }
    }
    T* const out = reinterpret_cast<T*>(destinations[0]) + start;
    for (std::size_t i = 0; i < length; ++i) out[i] = Widening<T>::narrow(accumulated[i]);
    copy_block<T>(destinations, start, length);
  }
}

}  // namespace gradsync::kernels
