#include "common/fork.h"

#include <pthread.h>

#include <atomic>

namespace gradsync {
namespace {

std::atomic<std::uint32_t> generation{0};

// A child starts with one thread, so relaxed order is enough.
void count_fork() { generation.fetch_add(1, std::memory_order_relaxed); }

}  // namespace

std::uint32_t fork_generation() {
  static const int registered = ::pthread_atfork(nullptr, nullptr, count_fork);
  (void)registered;
  return generation.load(std::memory_order_relaxed);
}

}  // namespace gradsync
