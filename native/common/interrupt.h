// A way for the embedding language to end a wait: Python's Ctrl-C.
#pragma once

#include <atomic>

#include "common/status.h"

namespace gradsync {

// Asked by waiting threads when a system call was interrupted, and now and then. True ends the
// wait.
inline std::atomic<bool (*)()> interrupt_hook{nullptr};

inline bool interrupted() {
  bool (*const hook)() = interrupt_hook.load(std::memory_order_relaxed);
  return hook != nullptr && hook();
}

inline Status interrupted_status() {
  return Status::error(Code::interrupted, "interrupted by a signal");
}

}  // namespace gradsync
