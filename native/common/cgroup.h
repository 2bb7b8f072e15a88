// What the process's control groups grant: a container's share is not the machine's.
// `root` is the cgroup file system and `self` the list of the process's groups; tests pass their
// own.
#pragma once

#include <string>

namespace gradsync {

// CPUs' worth of run time, infinity when there is no limit.
double cgroup_cpus(const std::string& root, const std::string& self);
// Those of this process, read once: every group asks, and reading takes 60 us.
double cgroup_cpus();

// Bytes of memory that are still free below the limit, infinity when there is none.
double cgroup_memory_left(const std::string& root = "/sys/fs/cgroup",
                          const std::string& self = "/proc/self/cgroup");

}  // namespace gradsync
