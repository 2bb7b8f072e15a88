// Threads that the core starts itself. They share the cores with the caller's computation, so they
// sleep where a caller's thread would spin; and signals are not theirs.
#pragma once

#include <pthread.h>
#include <signal.h>

#include <memory>
#include <thread>
#include <utility>

namespace gradsync {

inline thread_local bool is_background = false;

// Whether such a thread may spin like a caller's after all: there is a core for it.
inline thread_local bool has_free_core = false;

template <typename Function>
std::unique_ptr<std::thread> start_background(Function function) {
  sigset_t every, before;
  sigfillset(&every);
  pthread_sigmask(SIG_SETMASK, &every, &before);
  const auto restore = [](const sigset_t* mask) { pthread_sigmask(SIG_SETMASK, mask, nullptr); };
  const std::unique_ptr<const sigset_t, decltype(restore)> at_end(&before, restore);
  return std::make_unique<std::thread>([function = std::move(function)] {
    is_background = true;
    function();
  });
}

}  // namespace gradsync
