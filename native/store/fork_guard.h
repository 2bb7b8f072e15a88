// What a forked child inherits from a store: nothing that works. Its copies of the sockets are
// closed at the fork, so that the peers see the parent's end when the parent ends, and the objects
// can tell that they are copies.
#pragma once

#include <cstdint>

namespace gradsync::store {

// Counts the forks between the first process that used a store and this one.
std::uint64_t fork_generation();

// Have `fd` closed in every child forked from now on / no longer.
void close_in_children(int fd);
void forget_in_children(int fd);

}  // namespace gradsync::store
