// Tensors that come again and again, known by where they lie.
#pragma once

#include <cstddef>
#include <cstdint>
#include <unordered_map>

namespace gradsync {

class Familiar {
 public:
  enum class Due : std::uint8_t {
    no,
    yes,
    // There were tensors of other sizes at this place: perhaps other ones, now gone, perhaps parts
    // of one buffer that serves them all and is to grow and shrink. Such a buffer has room left,
    // except at its largest.
    if_it_fills_its_memory
  };

  // Whether a tensor has come so often that something should be done about it: not `no` once. A
  // tensor that is made anew in every step may lie where the last one did, so nothing is done
  // twice.
  Due is_due(const std::byte* data, std::size_t bytes) {
    if (bytes < least_bytes) return Due::no;
    if (visits_.size() >= most_known) visits_.clear();
    Visits& visits = visits_.try_emplace(data, Visits{bytes, 0, 0}).first->second;
    if (visits.bytes != bytes) {
      visits.bytes = bytes;
      visits.count = ++visits.changes <= most_changes ? 0 : often;
    }
    if (++visits.count != often) return Due::no;
    return visits.changes == 0 ? Due::yes : Due::if_it_fills_its_memory;
  }
  // Begins to count again.
  void put_off(const std::byte* data) {
    const auto known = visits_.find(data);
    if (known != visits_.end()) known->second.count = 0;
  }

 private:
  struct Visits {
    std::size_t bytes;
    std::uint64_t count;  // since it has this size
    std::uint64_t changes;
  };

  // Smaller ones gain a few microseconds a call at most, and every mapping costs the kernel some.
  static constexpr std::size_t least_bytes = 128 * 1024;
  // All-reduce of 25 MiB at 2 ranks takes 4.0 ms through the staging space and 2.1 ms in place;
  // getting there takes 17 to 27 ms. Until then as much has been lost.
  static constexpr std::uint64_t often = 8;
  // Of the size at a place, after which nothing is done there.
  static constexpr std::uint64_t most_changes = 8;
  static constexpr std::size_t most_known = 4096;

  std::unordered_map<const std::byte*, Visits> visits_;
};

}  // namespace gradsync
