// When a rank moves to another core, and how often.
//
// With a core for each rank, one that shares its core loses half of its time, whatever it does:
// it moves as soon as that is seen. With more ranks than cores they share them anyhow, and moving
// is only good for ranks that do nothing but call: a core with few ranks may be busy with something
// else, and a rank that shares it with a program that computes waits for milliseconds in every call
// (4 ranks on 2 cores, one of them busy: 2.5 ms instead of 17 us). Nobody tells beforehand, so the
// next calls decide: when ranks wait long for each other after a move, for that reason or because
// they compute between their calls, it is tried again only after a long while.
#pragma once

#include <algorithm>
#include <chrono>

#include "common/deadline.h"

namespace gradsync {

class Relocation {
 public:
  using Clock = Deadline::Clock;

  // With `crowded`, moves are judged.
  explicit Relocation(bool crowded = false) : crowded_(crowded) {}

  // Whether calls are to be counted.
  bool is_judged() const { return to_judge_ > 0; }
  // Of a call: how long this rank waited for the others.
  void count(std::chrono::nanoseconds waited) {
    waited_ += waited;
    if (--to_judge_ == 0) pause_ = waited_ < slow ? shortest : std::min(8 * pause_, longest);
  }
  // Whether to move now; if so, the caller does.
  bool due(Clock::time_point now = Clock::now()) {
    if (to_judge_ > 0 || now - moved_at_ < pause_) return false;
    moved_at_ = now;
    waited_ = {};
    to_judge_ = crowded_ ? calls_to_judge : 0;
    return true;
  }

 private:
  static constexpr int calls_to_judge = 16;
  // More than ranks that only call wait for each other, less than a turn of another program.
  static constexpr auto slow = std::chrono::microseconds(200) * calls_to_judge;
  // Moving takes some 30 us; if the scheduler insists, it shall not be on every call.
  static constexpr std::chrono::nanoseconds shortest = std::chrono::milliseconds(1);
  static constexpr std::chrono::nanoseconds longest = std::chrono::seconds(4);

  bool crowded_;
  std::chrono::nanoseconds pause_ = shortest;
  Clock::time_point moved_at_{};
  std::chrono::nanoseconds waited_{};
  int to_judge_ = 0;
};

}  // namespace gradsync
