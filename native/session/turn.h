// Whose turn it is to make a call: a lock that can be waited for with a deadline. (Not a timed
// mutex: the thread sanitizer of GCC 12 does not know pthread_mutex_clocklock.)
#pragma once

#include <atomic>
#include <cstdint>

#include "common/background.h"
#include "common/deadline.h"
#include "common/interrupt.h"
#include "common/status.h"
#include "sync/futex.h"
#include "sync/pause.h"

namespace gradsync {

class Turn {
 public:
  bool try_take() {
    std::uint32_t expected = free;
    return state_.compare_exchange_strong(expected, taken, std::memory_order_acquire,
                                          std::memory_order_relaxed);
  }

  Status take(Deadline deadline) {
    let_go_of_lock();  // who has the turn may need it to come to its end
    for (int i = 0; i < spins && !is_background; ++i) {
      if (try_take()) return Status::success();
      pause_briefly();
    }
    // Whoever comes by this path leaves the word at `contended`: a wake too many is harmless.
    while (state_.exchange(contended, std::memory_order_acquire) != free) {
      if (deadline.expired()) {
        return Status::error(Code::timeout,
                             "another thread of this rank is inside a call; this one was not made, "
                             "and may be made again");
      }
      if (interrupted()) return interrupted_status();
      futex_wait(state_, contended, deadline.remaining_ns(look_around_ns));
    }
    return Status::success();
  }

  void give_back() {
    if (state_.exchange(free, std::memory_order_release) == contended) futex_wake_all(state_);
  }

 private:
  static constexpr std::uint32_t free = 0, taken = 1, contended = 2;
  static constexpr int spins = 100;

  std::atomic<std::uint32_t> state_{free};
};

}  // namespace gradsync
