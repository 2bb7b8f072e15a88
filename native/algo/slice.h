// How ranks share the work on one tensor.
#pragma once

#include <algorithm>
#include <cstddef>

#include "sync/slots.h"

namespace gradsync {

struct Slice {
  std::size_t begin;  // elements
  std::size_t count;
};

// The part of `count` elements that `rank` works on. Slices begin at multiples of a cache line, so
// two ranks never write the same one.
inline Slice slice_of(std::size_t count, int rank, int ranks, std::size_t element) {
  const std::size_t unit = std::max<std::size_t>(cache_line / element, 1);
  const std::size_t units = (count + unit - 1) / unit;
  const auto cut = [&](int r) {
    return std::min(count,
                    units * static_cast<std::size_t>(r) / static_cast<std::size_t>(ranks) * unit);
  };
  return {cut(rank), cut(rank + 1) - cut(rank)};
}

}  // namespace gradsync
