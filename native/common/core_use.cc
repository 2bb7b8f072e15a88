#include "common/core_use.h"

#include <ctime>

namespace gradsync {
namespace {

std::int64_t clock_ns(clockid_t clock) {
  timespec time{};
  ::clock_gettime(clock, &time);
  return static_cast<std::int64_t>(time.tv_sec) * 1'000'000'000 + time.tv_nsec;
}

}  // namespace

CoreUse::Times CoreUse::read() {
  return {clock_ns(CLOCK_MONOTONIC),
          clock_ns(CLOCK_PROCESS_CPUTIME_ID) - clock_ns(CLOCK_THREAD_CPUTIME_ID)};
}

}  // namespace gradsync
