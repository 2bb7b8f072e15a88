// (dtype, reduce) -> kernel: the only place where a version for a certain instruction set is
// chosen. All versions are the same loops, vectorised by the compiler for what it may use, and give
// the same bits: no operation is fused with another.
#include <algorithm>
#include <array>
#include <complex>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "reduce/far_copy.h"
#include "reduce/kernels.h"
#include "reduce/reduce.h"

namespace gradsync {
namespace {

constexpr std::size_t line = 64;

std::size_t to_next_line(const std::byte* place) {
  return -reinterpret_cast<std::uintptr_t>(place) % line;
}

#ifdef __SSE2__

// Copies past the caches. Whole lines to the beginning of a line; anything else in the plain way.
[[gnu::always_inline]] inline void stream(std::byte* to, const std::byte* from, std::size_t bytes) {
  if (to_next_line(to) != 0 || bytes % line != 0) {
    std::memcpy(to, from, bytes);
    return;
  }
  for (std::size_t at = 0; at < bytes; at += 16) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(to + at),
                     _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + at)));
  }
}
// Such stores may be seen later than those after them, but for this.
inline void end_stream() { _mm_sfence(); }

#else

inline void stream(std::byte* to, const std::byte* from, std::size_t bytes) {
  std::memcpy(to, from, bytes);
}
inline void end_stream() {}

#endif

}  // namespace
namespace kernels::baseline {
constexpr bool only_sums = false;
#include "reduce/loops.h"
}  // namespace kernels::baseline

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define GRADSYNC_AVX2 1
#pragma GCC push_options
#pragma GCC target("avx2")
namespace kernels::avx2 {
constexpr bool only_sums = true;  // and means: the others are rare, and each takes long to compile
#include "reduce/loops.h"
}  // namespace kernels::avx2
#pragma GCC pop_options
#endif

namespace {

struct Kernels {
  ReduceKernel (*plain)(Dtype, Reduce);
  WeightedKernel (*weighted)(Dtype);
};

// What is in a cache goes by the width of a register: 256 KiB in place at 2 ranks take 5.3 us with
// AVX2, 6.4 us without.
const Kernels& best() {
  static const Kernels chosen = [] {
#ifdef GRADSYNC_AVX2
    if (__builtin_cpu_supports("avx2")) {
      return Kernels{kernels::avx2::plain, kernels::avx2::weighted};
    }
#endif
    return Kernels{kernels::baseline::plain, kernels::baseline::weighted};
  }();
  return chosen;
}

}  // namespace

Status find_kernel(Dtype dtype, Reduce reduce, ReduceKernel& out) {
  out = best().plain(dtype, reduce);
  if (out == nullptr) out = kernels::baseline::plain(dtype, reduce);
  if (out != nullptr) return Status::success();
  return Status::error(Code::invalid, "this reduction is not defined for elements of this type");
}

void far_copy(std::byte* to, const std::byte* from, std::size_t bytes) {
  const std::size_t head = std::min(bytes, to_next_line(to));
  stream(to, from, head);
  in_streams(head, bytes, grain_bytes, [&](std::size_t start, std::size_t length) {
    stream(to + start, from + start, length);
  });
  end_stream();
}

WeightedKernel find_weighted_kernel(Dtype dtype) { return best().weighted(dtype); }

}  // namespace gradsync
