// Whether private memory is better staged or read directly: tried, for each kind of call.
//
// Reading another process's memory is one copy, made by the kernel page by page; staging is two,
// through the caches, on two cores at a time. Which is faster is a matter of the machine: with
// pieces of 512 KiB at 2 ranks, all_gather took 34 us staged and 45 us directly on one, where
// another's took 1.2 times as long staged. So half of the first calls of a kind (what it does, and
// about how large) go directly and half are staged, and ranks that read the data time both. From
// then on a kind of call goes directly while no rank objects.
//
// All ranks must have the same opinion before a call, or it is staged once more (direct.h). They
// have: everything here depends on what all ranks learn from calls that they have agreed on. An
// objection is known to all from the call after it on.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "sync/team.h"

namespace gradsync {

class Trial {
 public:
  using Time = std::chrono::nanoseconds;
  enum class Op : std::uint8_t {
    all_gather,
    all_to_all,
    broadcast,
    gather,
    reduce_scatter,
    scatter,
  };
  // What a rank does in a call with pieces of so many bytes, which all ranks know. Ranks that only
  // give have no say, because staging sets them free earlier however long the others take.
  struct Part {
    Op op;
    std::size_t bytes;
    bool reads = true;

    // What such calls have in common.
    std::size_t kind() const {
      const auto octave = static_cast<std::size_t>(std::bit_width(bytes / smallest));
      const std::size_t bounded = std::clamp<std::size_t>(octave, 1, octaves);
      return static_cast<std::size_t>(op) * octaves + bounded - 1;
    }
  };

  explicit Trial(Team& team) : team_(&team) {}

  bool is_tried(const Part& part) const {
    const Entry& entry = entries_[part.kind()];
    return part.bytes <= most && entry.calls < tries && !entry.is_mixed;
  }
  // Whether the next such call is to go directly.
  bool goes_directly(const Part& part) {
    if (part.bytes > most) return false;
    Entry& entry = entries_[part.kind()];
    if (entry.is_mixed) return true;
    if (entry.calls < tries) return (staged_tries >> entry.calls & 1) == 0;
    if (!entry.is_judged && entry.staged < entry.direct && entry.direct != unknown) {
      team_->object_to(mask(part.kind()));
    }
    entry.is_judged = true;
    return (team_->objections() & mask(part.kind())) == 0;
  }
  // Every call, once all ranks know whose memory it was about. Of a mixture the shared part is not
  // staged in any case, so the next one goes directly, and tells nothing about private memory.
  void count(const Part& part, bool any_shared, bool any_private) {
    if (part.bytes > most) return;
    Entry& entry = entries_[part.kind()];
    if (any_private && !any_shared && !entry.is_mixed) ++entry.calls;
    entry.is_mixed = any_shared && any_private;
  }
  // The shortest of each counts: whatever comes between makes some of them longer. For each byte,
  // because those of one kind are not all of one size.
  void note(const Part& part, bool directly, Time took) {
    Entry& entry = entries_[part.kind()];
    double& best = directly ? entry.direct : entry.staged;
    best = std::min(best, static_cast<double>(took.count()) / static_cast<double>(part.bytes));
  }

  // For calls whose ranks learn only from each other how large they are: the size of the last one,
  // 0 before there was one.
  std::size_t last_largest() const { return last_largest_; }
  void remember_largest(std::size_t bytes) { last_largest_ = bytes; }

 private:
  static constexpr std::size_t smallest = 16 * 1024;
  static constexpr std::size_t octaves = 10;
  static constexpr std::size_t kinds = 6 * octaves;
  static_assert(kinds <= 64, "a bit for each");
  // Reading directly is one step, however long it takes, and who makes no step for long is late.
  static constexpr std::size_t most = 64 * 1024 * 1024;
  // Which of the first calls are staged. Whether roots take turns (up to six of them) or each has
  // three calls or more in a row, all ranks read in both ways.
  static constexpr std::uint32_t tries = 16;
  static constexpr std::uint32_t staged_tries = 0b0011011001101100;

  static constexpr double unknown = std::numeric_limits<double>::infinity();

  struct Entry {
    std::uint32_t calls = 0;
    bool is_mixed = false;  // the last one was
    bool is_judged = false;
    double direct = unknown;  // nanoseconds for a byte
    double staged = unknown;
  };

  static std::uint64_t mask(std::size_t kind) { return std::uint64_t{1} << kind; }

  Team* team_;
  std::size_t last_largest_ = 0;
  std::array<Entry, kinds> entries_{};
};

}  // namespace gradsync
