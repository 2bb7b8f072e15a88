// What becomes of memory that the process frees.
#pragma once

#include <malloc.h>

namespace gradsync {

// Lets the process keep it, up to 1 GiB at the end of the heap, for what it allocates next. glibc
// would give it back to the system and take it again page by page: with gradients that are made and
// freed in every step that is up to 8000 page faults of 1 to 2 us each, a tenth of a step and more.
// False where malloc cannot be told.
inline bool keep_freed_memory() {
#ifdef M_TRIM_THRESHOLD
  constexpr int most_kept = 1 << 30;
  constexpr int largest_threshold = 32 << 20;  // what glibc accepts; larger ones are always mapped
  return ::mallopt(M_TRIM_THRESHOLD, most_kept) == 1 &&
         ::mallopt(M_MMAP_THRESHOLD, largest_threshold) == 1;
#else
  return false;
#endif
}

}  // namespace gradsync
