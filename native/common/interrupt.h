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

// The embedding language's lock, where a call keeps it until it has to wait: to give it up and take
// it back is a tenth of the time of the smallest calls.
class HeldLock {
 public:
  virtual void let_go() = 0;

 protected:
  ~HeldLock() = default;
};
inline thread_local HeldLock* held_lock = nullptr;

// To be called before anything that takes more than a microsecond or two, or that depends on
// another thread of this process.
inline void let_go_of_lock() {
  if (held_lock != nullptr) held_lock->let_go();
}

inline Status interrupted_status() {
  return Status::error(Code::interrupted, "interrupted by a signal");
}

}  // namespace gradsync
