// Threads that the core starts itself. They share the cores with the caller's computation, so they
// sleep where a caller's thread would spin; and signals are not theirs.
#pragma once

namespace gradsync {

inline thread_local bool is_background = false;

// Whether such a thread may spin like a caller's after all: there is a core for it.
inline thread_local bool has_free_core = false;

}  // namespace gradsync
