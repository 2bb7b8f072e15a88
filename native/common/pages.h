// Pages of memory, and sizes rounded to whole ones.
#pragma once

#include <cstddef>

namespace gradsync {

inline constexpr std::size_t page_bytes = 4096;

inline constexpr std::size_t round_up(std::size_t bytes, std::size_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

}  // namespace gradsync
