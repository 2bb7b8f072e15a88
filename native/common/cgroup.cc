#include "common/cgroup.h"

#include <algorithm>
#include <fstream>
#include <limits>
#include <sstream>

namespace gradsync {
namespace {

constexpr double unlimited = std::numeric_limits<double>::infinity();
// Bytes. Where version 2 says "max", version 1 says the largest number of whole pages.
constexpr double no_machine_has = 1e18;

// The number a file begins with; `fallback` when there is no file or it says "max".
double number_in(const std::string& path, double fallback) {
  std::ifstream file(path);
  double value = 0;
  return (file >> value) ? value : fallback;
}

double cpus_v2(const std::string& folder) {  // "max 100000" or "150000 100000"
  std::ifstream file(folder + "/cpu.max");
  double quota = 0;
  double period = 0;
  return (file >> quota >> period) && quota > 0 && period > 0 ? quota / period : unlimited;
}

double cpus_v1(const std::string& folder) {  // two files, -1 for no limit
  const double quota = number_in(folder + "/cpu.cfs_quota_us", -1);
  const double period = number_in(folder + "/cpu.cfs_period_us", -1);
  return quota > 0 && period > 0 ? quota / period : unlimited;
}

// What a group uses counts the files it has read, which the kernel gives up when it must.
double page_cache(const std::string& folder) {
  std::ifstream file(folder + "/memory.stat");
  std::string name;
  double value = 0;
  double cached = 0;
  while (file >> name >> value) {
    if (name == "active_file" || name == "inactive_file") cached += value;
  }
  return cached;
}

double memory_left(const std::string& folder, const char* limit, const char* usage) {
  const double most = number_in(folder + limit, unlimited);
  if (most > no_machine_has) return unlimited;  // the usual case, and the rest is slow to read
  const double used = number_in(folder + usage, 0) - page_cache(folder);
  return std::max(0.0, most - std::max(0.0, used));
}

double memory_v2(const std::string& folder) {
  return memory_left(folder, "/memory.max", "/memory.current");
}

double memory_v1(const std::string& folder) {
  return memory_left(folder, "/memory.limit_in_bytes", "/memory.usage_in_bytes");
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

template <typename V2, typename V1>
double least_limit(const std::string& root, const std::string& self, const std::string& controller,
                   V2 read_v2, V1 read_v1) {
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
    } else if (("," + controllers + ",").find("," + controller + ",") != std::string::npos) {
      least = std::min(least, least_up(root + "/" + controllers, path, read_v1));
      if (controllers == controller) continue;
      least = std::min(least, least_up(root + "/" + controller, path, read_v1));
    }
  }
  return least;
}

}  // namespace

double cgroup_cpus(const std::string& root, const std::string& self) {
  return least_limit(root, self, "cpu", cpus_v2, cpus_v1);
}

double cgroup_cpus() {
  static const double granted = cgroup_cpus("/sys/fs/cgroup", "/proc/self/cgroup");
  return granted;
}

double cgroup_memory_left(const std::string& root, const std::string& self) {
  return least_limit(root, self, "memory", memory_v2, memory_v1);
}

}  // namespace gradsync
