#include "common/cores.h"

#include <sched.h>

#include <algorithm>

namespace gradsync {

CpuMask affinity_mask() {
  CpuMask mask;
  if (sched_getaffinity(0, sizeof(mask.words), reinterpret_cast<cpu_set_t*>(mask.words.data())) !=
      0) {
    mask.words[0] = 1;
  }
  return mask;
}

int usable_cores(const CpuMask& mask, double quota) {
  const int by_mask = std::max(mask.count(), 1);
  // Rounded down: with 1.5 CPUs' worth of time, two spinning ranks would starve each other.
  const double by_quota = std::max(quota, 1.0);
  return by_quota < by_mask ? static_cast<int>(by_quota) : by_mask;
}

}  // namespace gradsync
