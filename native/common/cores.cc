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

void move_off(const CpuMask& taken) {
  CpuMask before;
  if (sched_getaffinity(0, sizeof(before.words),
                        reinterpret_cast<cpu_set_t*>(before.words.data())) != 0) {
    return;
  }
  CpuMask left = before;
  left.remove(taken);
  if (left.count() == 0) return;
  // The first call moves the thread, the second lets the scheduler have its say again.
  for (const CpuMask& mask : {left, before}) {
    (void)sched_setaffinity(0, sizeof(mask.words),
                            reinterpret_cast<const cpu_set_t*>(mask.words.data()));
  }
}

int usable_cores(const CpuMask& mask, double quota) {
  const int by_mask = std::max(mask.count(), 1);
  // Rounded down: with 1.5 CPUs' worth of time, two spinning ranks would starve each other.
  const double by_quota = std::max(quota, 1.0);
  return by_quota < by_mask ? static_cast<int>(by_quota) : by_mask;
}

}  // namespace gradsync
