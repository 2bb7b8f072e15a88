// The loops behind find_kernel: plain C++ that compilers vectorise, one template for all of them.
//
// No include guard: dispatch.cc includes this once for each instruction set it chooses from, in a
// namespace of its own that says whether it has `only_sums`. Whatever has to be included is
// included there.

// Elements of a block: with two sources and a destination it stays in a first-level cache.
inline constexpr std::size_t block = 1024;

// What comes from main memory is asked for some lines ahead: the processor's own prefetching ends
// with each page, and lines that are only written are fetched late. Measured at 2 ranks: 25 MiB in
// place 2.5 ms against 2.7 ms (4 MiB, in a third-level cache: slower); 32 MiB of which a rank's own
// half lies elsewhere, 3.3 ms against 4.5 ms.
class Ahead {
 public:
  Ahead(std::span<const std::byte* const> sources, std::span<std::byte* const> destinations,
        std::size_t bytes)
      : sources_(sources), is_far_(sources.size() * bytes >= far_bytes) {
    for (std::byte* const destination : destinations) {
      const bool is_read = std::find(sources.begin(), sources.end(), destination) != sources.end();
      if (!is_read && bytes >= cold_bytes) cold_ = destination;
    }
  }

  // How many bytes of each to ask for at a time; 0 when it is not worth asking.
  std::size_t step() const { return is_far_ || cold_ != nullptr ? 1024 : 0; }
  // Inlined by force: GCC takes a function that does nothing else for one without effect and drops
  // the call.
  [[gnu::always_inline]] void ask(std::size_t start) const {
    const std::size_t first = start + step();
    const std::size_t end = first + step();
    if (is_far_) {
      for (const std::byte* source : sources_) {
        for (std::size_t line = first; line < end; line += 64) __builtin_prefetch(source + line);
      }
    }
    if (cold_ == nullptr) return;
    for (std::size_t line = first; line < end; line += 64) __builtin_prefetch(cold_ + line, 1);
  }

 private:
  static constexpr std::size_t far_bytes = 8 * 1024 * 1024;
  static constexpr std::size_t cold_bytes = 64 * 1024;

  std::span<const std::byte* const> sources_;
  bool is_far_;
  std::byte* cold_ = nullptr;  // written without having been read; never more than one
};

// Writes what `element(i)` says to all destinations. Two are what most calls have, and writing them
// together saves reading the first again.
template <typename T, typename Element>
void write_block(std::span<std::byte* const> destinations, std::size_t start, std::size_t length,
                 const Element& element) {
  const auto destination = [&](std::size_t d) {
    return reinterpret_cast<T*>(destinations[d]) + start;
  };
  T* const first = destination(0);
  if (destinations.size() == 2) {
    T* const second = destination(1);
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
  for (std::size_t d = 1; d < destinations.size(); ++d) {
    std::memcpy(destination(d), first, length * sizeof(T));
  }
}

// Works block by block: each source is read once from memory, the running result never leaves the
// core, and the last source is combined on the way to the destinations. A destination may be one of
// the sources: of each block everything is read before or while it is written, at the same index,
// which is what `ivdep` says.
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
  const Ahead ahead(sources, destinations, count * sizeof(T));
  const std::size_t step = ahead.step() == 0 ? block : ahead.step() / sizeof(T);
  std::array<Wide, block> running;
  for (std::size_t start = 0; start < count; start += step) {
    const std::size_t length = std::min(step, count - start);
    if (step != block) ahead.ask(start * sizeof(T));
    const auto source = [&](std::size_t s) {
      return reinterpret_cast<const T*>(sources[s]) + start;
    };
    const T* const first = source(0);
    const T* const final = source(last);
    if (last == 0) {
      write_block<T>(destinations, start, length,
                     [&](std::size_t i) { return finished(W::widen(first[i])); });
    } else if (last == 1) {
      write_block<T>(destinations, start, length, [&](std::size_t i) {
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
      write_block<T>(destinations, start, length, [&](std::size_t i) {
        return finished(Operation::combine(running[i], W::widen(final[i])));
      });
    }
  }
}

// A weighted sum, in the same blocks. A source of weight 0 adds nothing, whatever it holds.
template <typename T>
void weighted_sum(std::span<const std::byte* const> sources, std::span<const double> weights,
                  std::span<std::byte* const> destinations, std::size_t count) {
  using W = Widening<T>;
  using Wide = typename W::Wide;
  const Ahead ahead(sources, destinations, count * sizeof(T));
  const std::size_t step = ahead.step() == 0 ? block : ahead.step() / sizeof(T);
  std::array<Wide, block> accumulated;
  for (std::size_t start = 0; start < count; start += step) {
    const std::size_t length = std::min(step, count - start);
    if (step != block) ahead.ask(start * sizeof(T));
    accumulated.fill(Wide{});
    for (std::size_t s = 0; s < sources.size(); ++s) {
      if (weights[s] == 0.0) continue;
      const T* next = reinterpret_cast<const T*>(sources[s]) + start;
      const auto weight = static_cast<Scalar<Wide>>(weights[s]);
      for (std::size_t i = 0; i < length; ++i) accumulated[i] += W::widen(next[i]) * weight;
    }
    write_block<T>(destinations, start, length,
                   [&](std::size_t i) { return W::narrow(accumulated[i]); });
  }
}

enum class Family : std::uint8_t { real, integer, boolean, complex };

template <typename T, Family family>
ReduceKernel kernel_for(Reduce operation) {
  constexpr bool is_float = family == Family::real || family == Family::complex;
  constexpr bool is_ordered = family != Family::complex;
  constexpr bool is_bits = family == Family::integer || family == Family::boolean;
  switch (operation) {
    case Reduce::sum:
      if constexpr (family == Family::boolean)
        return reduce<T, BitOr, false>;  // for booleans a sum is "any" and a product is "all"
      else
        return reduce<T, Sum, false>;
    case Reduce::premul_sum:
      if constexpr (family != Family::boolean) return reduce<T, Sum, false>;
      break;
    case Reduce::avg:
      if constexpr (is_float) return reduce<T, Sum, true>;
      break;
    case Reduce::product:
      if constexpr (is_ordered && !only_sums) return reduce<T, Product, false>;
      break;
    case Reduce::min:
      if constexpr (is_ordered && !only_sums) return reduce<T, Min, false>;
      break;
    case Reduce::max:
      if constexpr (is_ordered && !only_sums) return reduce<T, Max, false>;
      break;
    case Reduce::band:
      if constexpr (is_bits && !only_sums) return reduce<T, BitAnd, false>;
      break;
    case Reduce::bor:
      if constexpr (is_bits && !only_sums) return reduce<T, BitOr, false>;
      break;
    case Reduce::bxor:
      if constexpr (is_bits && !only_sums) return reduce<T, BitXor, false>;
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
    default: return nullptr;
  }
}
