// Telling a forked child from the process that opened something: a data-loader worker inherits its
// parent's mappings and descriptors, but it is not the rank.
#pragma once

#include <cstdint>

namespace gradsync {

// How many forks lie between the first use in an ancestor and this process. Cheaper than getpid().
std::uint32_t fork_generation();

}  // namespace gradsync
