// Double-buffered staging space: how private tensors cross from one rank to another.
#pragma once

#include <cstddef>
#include <cstdint>

#include "sync/team.h"

namespace gradsync {

// Chunk n of a group's life goes into half n & 1 of every rank's staging space; all ranks count
// alike. A half may be written again once every peer has published the step after which it no
// longer reads.
class Staging {
 public:
  explicit Staging(Team& team) : team_(&team) {}

  std::size_t capacity() const { return team_->staging_bytes() / 2; }

  // Turns to the next half and waits until nobody reads the caller's part of it any more.
  Status next(Deadline deadline) {
    ++chunk_;
    return team_->wait_for_all(free_at_[chunk_ & 1], deadline);
  }
  // Whoever has published `step` no longer reads the present half.
  void free_at(std::uint64_t step) { free_at_[chunk_ & 1] = step; }

  std::byte* of(int rank) const { return team_->staging(rank) + (chunk_ & 1) * capacity(); }
  std::byte* mine() const { return of(team_->rank()); }

 private:
  Team* team_;
  std::uint64_t chunk_ = 0;
  std::uint64_t free_at_[2] = {0, 0};
};

}  // namespace gradsync
