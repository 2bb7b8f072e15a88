// A way for the embedding language to end a wait: Python's Ctrl-C.
#pragma once

#include <atomic>

#include "common/background.h"
#include "common/status.h"

namespace gradsync {

// Asked by waiting threads when a system call was interrupted, and now and then. True ends the
// wait.
inline std::atomic<bool (*)()> interrupt_hook{nullptr};

inline bool interrupted() {
  if (is_background) return false;
  bool (*const hook)() = interrupt_hook.load(std::memory_order_relaxed);
  return hook != nullptr && hook();
}

// Runs something that may block without the embedding language's lock, which whoever we wait for
// may need.
inline std::atomic<void (*)(void (*)(void*), void*)> unlocked_hook{nullptr};

template <typename Function>
void run_unlocked(Function function) {
  auto* const hook = unlocked_hook.load(std::memory_order_relaxed);
  if (hook == nullptr) return function();
  hook([](void* f) { (*static_cast<Function*>(f))(); }, &function);
}

inline Status interrupted_status() {
  return Status::error(Code::interrupted, "interrupted by a signal");
}

}  // namespace gradsync
