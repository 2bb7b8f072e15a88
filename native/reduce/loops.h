// The loops behind find_kernel: plain C++ that compilers vectorise, one template for all of them.
//
// No include guard: dispatch.cc includes this once for each instruction set it chooses from, in a
// namespace of its own that says whether it has `only_sums`. Whatever has to be included is
// included there.

// Elements of a block: with two sources and a destination it stays in a first-level cache.
inline constexpr std::size_t block = 1024;

// How a call goes through its memory: block by block, or in streams (see far_copy.h), asking for
// the next grain of a stream while its present one is worked on. One core, two sources in place, 64
// MiB each: 7.0 GB/s instead of 5.4 GB/s with one stream where memory is slow (more streams and
// larger grains gained less), 27 instead of 45 GB/s where it is fast. A destination that is no
// source may be written past the caches: it need not be fetched first.
class Walk {
 public:
  Walk(std::span<const std::byte* const> sources, std::span<std::byte* const> destinations,
       Access access)
      : sources_(sources),
        destinations_(destinations),
        cold_(destinations.size()),
        in_streams_(access.in_streams) {
    if (!access.past_caches || destinations.size() < 2) return;
    for (std::size_t d = 0; d < destinations.size(); ++d) {
      if (std::find(sources.begin(), sources.end(), destinations[d]) == sources.end()) cold_ = d;
    }
  }

  // Calls visit(start, length) for all of `count` elements.
  // `visit` is not inlined, by force: it would be four times, and all kernels take long to compile.
  template <typename T, typename Visit>
  void go(std::size_t count, const Visit& visit) const {
    constexpr std::size_t grain = grain_bytes / sizeof(T);
    const std::size_t to_line = has_cold() ? to_next_line(destinations_[cold_]) / sizeof(T) : 0;
    const std::size_t head = std::min(count, to_line);
    if (head > 0) visit(std::size_t{0}, head);
    if (in_streams_) {
      in_streams(head, count, grain, [&](std::size_t start, std::size_t length) {
        ask((start + grain) * sizeof(T));
        visit(start, length);
      });
    } else {
      for (std::size_t start = head; start < count; start += block) {
        visit(start, std::min(block, count - start));
      }
    }
    if (has_cold()) end_stream();
  }

  // Writes what `element(i)` says to all destinations.
  template <typename T, typename Element>
  [[gnu::always_inline]] void write(std::size_t start, std::size_t length,
                                    const Element& element) const {
    const auto at = [&](std::size_t d) { return destinations_[d] + start * sizeof(T); };
    const std::size_t hot = cold_ == 0 ? 1 : 0;
    T* const first = reinterpret_cast<T*>(at(hot));
    if (destinations_.size() == 2 && !has_cold()) {
      // What most calls have: writing them together saves reading the first again.
      T* const second = reinterpret_cast<T*>(at(1));
#pragma GCC ivdep
      for (std::size_t i = 0; i < length; ++i) {
        const T value = element(i);
        first[i] = value;
        second[i] = value;
      }
      return;
    }
#pragma GCC ivdep
    for (std::size_t i = 0; i < length; ++i) first[i] = element(i);
    for (std::size_t d = 0; d < destinations_.size(); ++d) {
      if (d == cold_) {
        stream(at(d), at(hot), length * sizeof(T));
      } else if (d != hot) {
        std::memcpy(at(d), first, length * sizeof(T));
      }
    }
  }

 private:
  bool has_cold() const { return cold_ < destinations_.size(); }
  // Inlined by force: GCC takes a function that does nothing else for one without effect and drops
  // the call.
  [[gnu::always_inline]] void ask(std::size_t start) const {
    for (const std::byte* source : sources_) {
      for (std::size_t i = 0; i < grain_bytes; i += line) __builtin_prefetch(source + start + i);
    }
  }

  std::span<const std::byte* const> sources_;
  std::span<std::byte* const> destinations_;
  std::size_t cold_;  // which destination is written past the caches, if there is one
  bool in_streams_;
};

// Works block by block: each source is read once from memory, the running result never leaves the
// core, and the last source is combined on the way to the destinations. A destination may be one of
// the sources: of each block everything is read before or while it is written, at the same index,
// which is what `ivdep` says.
template <typename T, typename Operation, bool Average>
void reduce(std::span<const std::byte* const> sources, std::span<std::byte* const> destinations,
            std::size_t count, Access access) {
  using W = Widening<T>;
  using Wide = typename W::Wide;
  const std::size_t last = sources.size() - 1;
  const auto ranks = static_cast<Scalar<Wide>>(sources.size());
  const auto finished = [ranks](Wide value) {
    if constexpr (Average) value /= ranks;
    (void)ranks;
    return W::narrow(value);
  };
  if (last == 0) {
    for (std::byte* const to : destinations) {
      if (count > 0 && to != sources[0]) std::memcpy(to, sources[0], count * sizeof(T));
    }
    return;
  }
  std::array<Wide, block> running;
  const Walk walk(sources, destinations, access);
  walk.go<T>(count, [&](std::size_t start, std::size_t length) __attribute__((noinline)) {
    const auto source = [&](std::size_t s) {
      return reinterpret_cast<const T*>(sources[s]) + start;
    };
    const T* const first = source(0);
    const T* const final = source(last);
    if (last == 1) {
      walk.write<T>(start, length, [&](std::size_t i) {
        return finished(Operation::combine(W::widen(first[i]), W::widen(final[i])));
      });
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
      walk.write<T>(start, length, [&](std::size_t i) {
        return finished(Operation::combine(running[i], W::widen(final[i])));
      });
    }
  });
}

// A weighted sum, in the same blocks. A source of weight 0 adds nothing, whatever it holds.
template <typename T>
void weighted_sum(std::span<const std::byte* const> sources, std::span<const double> weights,
                  std::span<std::byte* const> destinations, std::size_t count, Access access) {
  using W = Widening<T>;
  using Wide = typename W::Wide;
  std::array<Wide, block> accumulated;
  const Walk walk(sources, destinations, access);
  walk.go<T>(count, [&](std::size_t start, std::size_t length) __attribute__((noinline)) {
    accumulated.fill(Wide{});
    for (std::size_t s = 0; s < sources.size(); ++s) {
      if (weights[s] == 0.0) continue;
      const T* next = reinterpret_cast<const T*>(sources[s]) + start;
      const auto weight = static_cast<Scalar<Wide>>(weights[s]);
      for (std::size_t i = 0; i < length; ++i) accumulated[i] += W::widen(next[i]) * weight;
    }
    walk.write<T>(start, length, [&](std::size_t i) { return W::narrow(accumulated[i]); });
  });
}

enum class Family : std::uint8_t { real, integer, boolean, complex };

// Signed and unsigned integers have the same sums, products and bits: one loop serves both.
template <typename T, Family family>
struct Bits {
  using type = T;
};
template <typename T>
struct Bits<T, Family::integer> {
  using type = std::make_unsigned_t<T>;
};

template <typename T, Family family>
ReduceKernel kernel_for(Reduce operation) {
  using B = typename Bits<T, family>::type;
  constexpr bool is_float = family == Family::real || family == Family::complex;
  constexpr bool is_ordered = family != Family::complex;
  constexpr bool is_bits = family == Family::integer || family == Family::boolean;
  switch (operation) {
    case Reduce::sum:
      if constexpr (family == Family::boolean)
        return reduce<T, BitOr, false>;  // for booleans a sum is "any" and a product is "all"
      else
        return reduce<B, Sum, false>;
    case Reduce::premul_sum:
      if constexpr (family != Family::boolean) return reduce<B, Sum, false>;
      break;
    case Reduce::avg:
      if constexpr (is_float) return reduce<T, Sum, true>;
      break;
    case Reduce::product:
      if constexpr (is_ordered && !only_sums) return reduce<B, Product, false>;
      break;
    case Reduce::min:
      if constexpr (is_ordered && !only_sums) return reduce<T, Min, false>;
      break;
    case Reduce::max:
      if constexpr (is_ordered && !only_sums) return reduce<T, Max, false>;
      break;
    case Reduce::band:
      if constexpr (is_bits && !only_sums) return reduce<B, BitAnd, false>;
      break;
    case Reduce::bor:
      if constexpr (is_bits && !only_sums) return reduce<B, BitOr, false>;
      break;
    case Reduce::bxor:
      if constexpr (is_bits && !only_sums) return reduce<B, BitXor, false>;
      break;
  }
  return nullptr;
}

inline ReduceKernel plain(Dtype dtype, Reduce operation) {
  switch (dtype) {
    case Dtype::f64: return kernel_for<double, Family::real>(operation);
    case Dtype::f32: return kernel_for<float, Family::real>(operation);
    case Dtype::f16: return kernel_for<Float16, Family::real>(operation);
    case Dtype::bf16: return kernel_for<Bfloat16, Family::real>(operation);
    case Dtype::i64: return kernel_for<std::int64_t, Family::integer>(operation);
    case Dtype::i32: return kernel_for<std::int32_t, Family::integer>(operation);
    case Dtype::i16: return kernel_for<std::int16_t, Family::integer>(operation);
    case Dtype::i8: return kernel_for<std::int8_t, Family::integer>(operation);
    case Dtype::u64: return kernel_for<std::uint64_t, Family::integer>(operation);
    case Dtype::u32: return kernel_for<std::uint32_t, Family::integer>(operation);
    case Dtype::u16: return kernel_for<std::uint16_t, Family::integer>(operation);
    case Dtype::u8: return kernel_for<std::uint8_t, Family::integer>(operation);
    case Dtype::boolean: return kernel_for<Boolean, Family::boolean>(operation);
    case Dtype::c128: return kernel_for<std::complex<double>, Family::complex>(operation);
    case Dtype::c64: return kernel_for<std::complex<float>, Family::complex>(operation);
    case Dtype::f8e4m3fn: return kernel_for<Float8E4M3fn, Family::real>(operation);
    case Dtype::f8e5m2: return kernel_for<Float8E5M2, Family::real>(operation);
    case Dtype::f8e4m3fnuz: return kernel_for<Float8E4M3fnuz, Family::real>(operation);
    case Dtype::f8e5m2fnuz: return kernel_for<Float8E5M2fnuz, Family::real>(operation);
    case Dtype::c32: return kernel_for<Complex32, Family::complex>(operation);
    case Dtype::f8e8m0fnu:
    case Dtype::f4e2m1fn_x2: break;
  }
  return nullptr;
}

inline WeightedKernel weighted(Dtype dtype) {
  switch (dtype) {
    case Dtype::f64: return weighted_sum<double>;
    case Dtype::f32: return weighted_sum<float>;
    case Dtype::f16: return weighted_sum<Float16>;
    case Dtype::bf16: return weighted_sum<Bfloat16>;
    case Dtype::c128: return weighted_sum<std::complex<double>>;
    case Dtype::c64: return weighted_sum<std::complex<float>>;
    case Dtype::c32: return weighted_sum<Complex32>;
    default: return nullptr;
  }
}
