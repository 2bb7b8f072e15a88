// How many cores processes may really use: their affinity masks and their cgroup's quota.
// The machine's core count is not asked: a container with two cores of 64 must not spin like 64.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

namespace gradsync {

// An affinity mask of up to 1024 CPUs as plain data, so that ranks can publish theirs.
struct CpuMask {
  std::array<std::uint64_t, 16> words{};

  int count() const {
    int total = 0;
    for (const std::uint64_t word : words) total += std::popcount(word);
    return total;
  }
  void merge(const CpuMask& other) {
    for (std::size_t i = 0; i < words.size(); ++i) words[i] |= other.words[i];
  }
  void remove(const CpuMask& other) {
    for (std::size_t i = 0; i < words.size(); ++i) words[i] &= ~other.words[i];
  }
  bool has(std::uint32_t cpu) const {
    return cpu / 64 < words.size() && (words[cpu / 64] >> cpu % 64 & 1) != 0;
  }
  void add(std::uint32_t cpu) {
    if (cpu / 64 < words.size()) words[cpu / 64] |= std::uint64_t{1} << cpu % 64;
  }
};

// The calling thread's affinity mask; all of the first CPU when the system does not tell.
CpuMask affinity_mask();

// Moves the calling thread to another of its cores than `taken`, if it has one. Later the scheduler
// may move it again.
void move_off(const CpuMask& taken);

// Cores that processes with the joint affinity `mask` and a quota of `quota` CPUs may use; at
// least 1.
int usable_cores(const CpuMask& mask, double quota);

}  // namespace gradsync
