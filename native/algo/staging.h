// How tensors cross from one rank to another: private ones through double-buffered staging space,
// those that lie in the arena where they are.
#pragma once

#include <cstddef>
#include <cstdint>

#include "algo/trial.h"
#include "memory/adopted.h"
#include "memory/arena.h"
#include "sync/team.h"

namespace gradsync {

// Chunk n of a group's life goes into half n & 1 of every rank's staging space; all ranks count
// alike. A half may be written again once every peer has published the step after which it no
// longer reads.
class Staging {
 public:
  // Without an arena every tensor is private.
  explicit Staging(Team& team, const Arena* arena = nullptr)
      : team_(&team), arena_(arena), trial_(team) {}

  std::size_t capacity() const { return team_->staging_bytes() / 2; }

  // Turns to the next half and waits until nobody reads the caller's part of it any more.
  Status next(Deadline deadline) {
    ++chunk_;
    return team_->wait_for_all(free_at_[chunk_ & 1], deadline);
  }
  // Whoever has published `step` no longer reads the present half.
  void free_at(std::uint64_t step) { free_at_[chunk_ & 1] = step; }

  // What to announce as the place of a tensor: 0 when it is private.
  std::uint64_t place_of(const std::byte* data, std::size_t bytes) const {
    return arena_ == nullptr ? 0 : arena_->place_of(data, bytes);
  }
  // The same for a private tensor that was adopted; its edges have to be copied (adopted.h).
  std::uint64_t adopted_place_of(const std::byte* data, std::size_t bytes) const {
    return arena_ == nullptr ? 0 : Adopted::place_of(*arena_, data, bytes);
  }
  // For one that a failed call has worked on.
  void retire(const std::byte* data) const { Adopted::retire(*arena_, data); }
  std::byte* at(std::uint64_t place) const { return arena_->at(place); }
  // The tensor that a peer announced with the present call; null when that is private.
  std::byte* shared_by(int peer) const {
    const std::uint64_t place = team_->announced_by(peer).place;
    return place == 0 ? nullptr : at(place);
  }
  bool all_shared() const {
    for (int peer = 0; peer < team_->size(); ++peer) {
      if (shared_by(peer) == nullptr) return false;
    }
    return true;
  }
  bool any_shared() const {
    for (int peer = 0; peer < team_->size(); ++peer) {
      if (shared_by(peer) != nullptr) return true;
    }
    return false;
  }

  // Which way calls go that have the choice.
  Trial& trial() { return trial_; }

  std::uint64_t half() const { return chunk_ & 1; }
  std::byte* of(int rank, std::uint64_t half) const {
    return team_->staging(rank) + half * capacity();
  }
  std::byte* of(int rank) const { return of(rank, half()); }
  std::byte* mine() const { return of(team_->rank()); }

 private:
  Team* team_;
  const Arena* arena_;
  Trial trial_;
  std::uint64_t chunk_ = 0;
  std::uint64_t free_at_[2] = {0, 0};
};

}  // namespace gradsync
