// Trying for a moment before going to sleep.
//
// Putting a thread to sleep and waking it costs more than a whole round trip on one host, most of
// all in a virtual machine, where it may also wake up on the core of the one that woke it. So both
// sides try a few times first, and let others run in between.
#pragma once

#include <sched.h>

#include <chrono>

namespace gradsync {

// Repeats `attempt` until it returns true or the moment is over; returns the last result.
template <typename Attempt>
bool try_for_a_moment(Attempt attempt, std::chrono::microseconds moment) {
  using Clock = std::chrono::steady_clock;
  const auto end = Clock::now() + moment;
  while (!attempt()) {
    if (Clock::now() >= end) return false;
    ::sched_yield();
  }
  return true;
}

}  // namespace gradsync
