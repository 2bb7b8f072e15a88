#include "common/cores.h"

#include <sched.h>

#include <algorithm>
#include <fstream>
#include <limits>
#include <sstream>

namespace gradsync {
namespace {

constexpr double unlimited = std::numeric_limits<double>::infinity();

// cgroup v2: "max 100000" or "150000 100000".
double read_v2(const std::string& folder) {
  std::ifstream file(folder + "/cpu.max");
  std::string quota;
  double period = 0;
  if (!(file >> quota >> period) || quota == "max" || period <= 0) return unlimited;
  std::istringstream number(quota);
  double value = 0;
  return (number >> value) && value > 0 ? value / period : unlimited;
}

// cgroup v1: two files, -1 for no limit.
double read_v1(const std::string& folder) {
  std::ifstream quota_file(folder + "/cpu.cfs_quota_us");
  std::ifstream period_file(folder + "/cpu.cfs_period_us");
  double quota = 0;
  double period = 0;
  if (!(quota_file >> quota) || !(period_file >> period)) return unlimited;
  return quota > 0 && period > 0 ? quota / period : unlimited;
}

// A limit may sit on any ancestor: take the least from the leaf up to the root.
template <typename Reader>
double least_up(const std::string& root, std::string path, Reader read) {
  double least = unlimited;
  while (true) {
    least = std::min(least, read(root + path));
    if (path.empty() || path == "/") return least;
    path.erase(path.find_last_of('/'));
  }
}

}  // namespace

CpuMask affinity_mask() {
  CpuMask mask;
  if (sched_getaffinity(0, sizeof(mask.words), reinterpret_cast<cpu_set_t*>(mask.words.data())) !=
      0) {
    mask.words[0] = 1;
  }
  return mask;
}

double cgroup_quota(const std::string& root, const std::string& self) {
  double least = unlimited;
  std::ifstream file(self);
  std::string line;  // "hierarchy:controllers:path"
  while (std::getline(file, line)) {
    const auto first = line.find(':');
    const auto second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const std::string path = line.substr(second + 1);
    if (controllers.empty()) {
      least = std::min(least, least_up(root, path, read_v2));
    } else if (("," + controllers + ",").find(",cpu,") != std::string::npos) {
      least = std::min(least, least_up(root + "/" + controllers, path, read_v1));
      least = std::min(least, least_up(root + "/cpu", path, read_v1));
    }
  }
  return least;
}

int usable_cores(const CpuMask& mask, double quota) {
  const int by_mask = std::max(mask.count(), 1);
  // Rounded down: with 1.5 CPUs' worth of time, two spinning ranks would starve each other.
  const double by_quota = std::max(quota, 1.0);
  return by_quota < by_mask ? static_cast<int>(by_quota) : by_mask;
}

}  // namespace gradsync
