// What a forked child inherits: nothing that works. A data-loader worker has its parent's mappings
// and descriptors, but it is not the rank. Sockets are closed in it, so that peers see the parent's
// end when the parent ends, and every object can tell that it is a copy.
#pragma once

#include <cstdint>

namespace gradsync {

// Counts the forks between the first process that asked and this one. Cheaper than getpid().
std::uint64_t fork_generation();

// Have `fd` closed in every child forked from now on / no longer.
void close_in_children(int fd);
void forget_in_children(int fd);

}  // namespace gradsync
