// The private memory of another rank, where the kernel lets us at it: ranks of one user on one
// kernel, unless Yama, seccomp or a user namespace is in the way (process_vm_readv).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace gradsync {

// A word in a rank's own memory by which the others recognise that they have reached it.
struct Beacon {
  std::uint64_t address = 0;
  std::uint64_t value = 0;
};

// That of this process.
Beacon own_beacon();

class Neighbour {
 public:
  // Tries: a process of this number that has the beacon is the one that we look for. The number
  // may be that of another process, or of none, when its rank lives in another pid namespace.
  static Neighbour find(int pid, const Beacon& beacon);

  bool reachable() const { return way_ != Way::none; }
  // False with errno set when it cannot be done, or only in part. (There is no writing: a rank that
  // gives up on a call could not stop the others from writing to memory that it has freed.)
  bool read(std::byte* to, std::uint64_t from, std::size_t bytes) const;

 private:
  enum class Way : std::uint8_t {
    none,
    same_process,  // ranks that are threads
    kernel,
  };
  Way way_ = Way::none;
  int pid_ = 0;
};

// Whether others can be given these places in our memory, each of so many bytes or null. Not all
// memory can be reached this way: what a device driver has mapped cannot.
bool can_be_reached(std::span<const std::byte* const> places, std::size_t bytes);

}  // namespace gradsync
