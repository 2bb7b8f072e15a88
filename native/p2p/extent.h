// How much of what: the size of a message as sender and receiver compare it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "reduce/types.h"

namespace gradsync {

struct Extent {
  std::size_t count = 0;
  Dtype dtype = Dtype::u8;

  bool operator==(const Extent&) const = default;
  std::size_t bytes() const { return count * size_of(dtype); }

  // One word: counts stay below 2^56, which is more memory than a machine can address.
  std::uint64_t pack() const { return count << 8 | static_cast<std::uint64_t>(dtype); }
  static Extent unpack(std::uint64_t word) {
    return {static_cast<std::size_t>(word >> 8), static_cast<Dtype>(word & 0xFF)};
  }
  // "float32[10], 40 bytes"
  std::string text() const {
    return std::string(name_of(dtype)) + "[" + std::to_string(count) + "], " +
           std::to_string(bytes()) + " bytes";
  }
};

}  // namespace gradsync
