// Python's lock: letting go of it while the core works, taking it for callbacks, and what to do
// when the interpreter ends meanwhile.
#pragma once

#include <nanobind/nanobind.h>
#include <unistd.h>

#include <optional>
#include <utility>

#include "common/interrupt.h"
#include "common/status.h"

namespace gradsync {

inline bool is_finalizing() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsFinalizing() != 0;
#else
  return _Py_IsFinalizing() != 0;
#endif
}

// Takes the GIL for a call into Python, from whichever thread; not once the interpreter is going.
// Threads of the core stay away from the end of the program on: one that is inside when the
// interpreter is torn down would be unwound through C++ frames, which ends the process at once.
class Visit {
 public:
  Visit() : allowed_(begin()) {
    if (allowed_) locked_.emplace();
  }
  ~Visit() {
    locked_.reset();
    if (allowed_) end();
  }
  Visit(const Visit&) = delete;
  Visit& operator=(const Visit&) = delete;
  explicit operator bool() const { return allowed_; }

 private:
  static bool begin();
  static void end();

  bool allowed_;
  std::optional<nanobind::gil_scoped_acquire> locked_;
};

// Lets go of the GIL. A thread that comes back while the interpreter is being torn down stays here
// until the process ends: Python before 3.14 would unwind it through C++ frames and crash.
class Unlocked {
 public:
  Unlocked() : at_end_(is_finalizing()), state_(PyEval_SaveThread()) {}
  ~Unlocked() {
    while (!at_end_ && is_finalizing()) ::pause();
    PyEval_RestoreThread(state_);
  }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  bool at_end_;  // we are the thread that tears down
  PyThreadState* state_;
};

// Keeps the GIL while a small call does not have to wait.
class UnlockedToWait final : private HeldLock {
 public:
  UnlockedToWait() : outer_(std::exchange(held_lock, static_cast<HeldLock*>(this))) {}
  ~UnlockedToWait() { held_lock = outer_; }
  UnlockedToWait(const UnlockedToWait&) = delete;
  UnlockedToWait& operator=(const UnlockedToWait&) = delete;

 private:
  void let_go() override {
    if (!unlocked_) unlocked_.emplace();
  }

  HeldLock* outer_;
  std::optional<Unlocked> unlocked_;
};

// Runs a call without the GIL and returns what it returns.
template <typename Call>
Status released(Call call) {
  const Unlocked unlocked;
  return call();
}

}  // namespace gradsync
