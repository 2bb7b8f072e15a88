// Copies of what is too large to stay in a cache.
#pragma once

#include <cstddef>

namespace gradsync {

// From how many bytes on a result is not kept in the caches: written past them it need not be
// fetched first, and what is staged stays there.
inline constexpr std::size_t far_copy_bytes = 4 * 1024 * 1024;

// Like memcpy, to memory that is not read again soon.
void far_copy(std::byte* to, const std::byte* from, std::size_t bytes);

}  // namespace gradsync
