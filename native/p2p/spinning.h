// How long somebody who waits for messages stays on its core before it sleeps.
#pragma once

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>

#include "common/deadline.h"
#include "sync/pause.h"
#include "sync/team.h"

namespace gradsync {

class Perseverance {
 public:
  // Polls for as long as it seems worth while; returns whether there are news.
  template <typename News>
  bool spin(const Patience& patience, News news) {
    // Less and less while it is in vain: on a core that others want too, whoever sleeps is woken
    // sooner than whoever has used up its share by spinning.
    const int spins = std::min(patience.spins, spins_.load(std::memory_order_relaxed));
    for (int i = 0; i < spins; ++i) {
      if (news()) {
        spins_.store(std::min(2 * spins + least, most), std::memory_order_relaxed);
        return true;
      }
      pause_briefly();
    }
    spins_.store(std::max(spins / 2, least), std::memory_order_relaxed);
    const auto end = Deadline::Clock::now() + patience.yielding;
    for (int i = 0; i < patience.yields; ++i) {
      if (news()) return true;
      const auto start = Deadline::Clock::now();
      ::sched_yield();
      const auto now = Deadline::Clock::now();
      if (now - start > long_yield || now > end) break;  // somebody else wants the core
    }
    return news();
  }

 private:
  static constexpr int least = 50, most = 100'000;
  static constexpr std::chrono::microseconds long_yield{20};
  std::atomic<int> spins_{2000};  // that seem worth while
};

}  // namespace gradsync
