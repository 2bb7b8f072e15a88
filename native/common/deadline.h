// Monotonic deadlines. Every wait in the core takes one.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <limits>

namespace gradsync {

// A sleeper looks at its peers' pidfds this often: a SIGKILL is known well within 100 ms, and an
// idle rank costs 40 system calls a second.
inline constexpr std::int64_t look_around_ns = 25'000'000;

class Deadline {
 public:
  using Clock = std::chrono::steady_clock;

  // Seconds from now; infinity and very large values mean "never".
  static Deadline after(double seconds) {
    Deadline deadline;
    deadline.start_ = Clock::now();
    if (seconds < 1e9) {
      deadline.at_ = deadline.start_ + std::chrono::duration_cast<Clock::duration>(
                                           std::chrono::duration<double>(std::max(seconds, 0.0)));
    }
    return deadline;
  }
  static Deadline never() { return after(std::numeric_limits<double>::infinity()); }

  Clock::time_point start() const { return start_; }
  // As much time again, counted from `start` if that is later.
  Deadline counted_from(Clock::time_point start) const {
    Deadline later = *this;
    if (start > start_) {
      later.start_ = start;
      if (at_ != Clock::time_point::max()) later.at_ += start - start_;
    }
    return later;
  }

  bool is_never() const { return at_ == Clock::time_point::max(); }
  bool expired() const { return at_ != Clock::time_point::max() && Clock::now() >= at_; }

  // Nanoseconds left, at most `cap`, never negative.
  std::int64_t remaining_ns(std::int64_t cap = std::numeric_limits<std::int64_t>::max()) const {
    if (at_ == Clock::time_point::max()) return cap;
    const auto left =
        std::chrono::duration_cast<std::chrono::nanoseconds>(at_ - Clock::now()).count();
    return std::clamp<std::int64_t>(left, 0, cap);
  }

 private:
  Clock::time_point start_{};
  Clock::time_point at_ = Clock::time_point::max();
};

}  // namespace gradsync
