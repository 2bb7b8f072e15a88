// What the collectives that move pieces between ranks have in common: cutting data into rounds, and
// the one step that each round takes.
//
// In a round every rank stages what others need of it, publishes one step, and then reads what it
// needs. A half of the staging space is free again once every rank has published the step of the
// round after, so a rank is at most one round ahead of the slowest, and no rank ever waits for a
// step that is newer than its own: the slowest can always go on.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "algo/staging.h"
#include "common/deadline.h"
#include "common/status.h"
#include "reduce/far_copy.h"
#include "reduce/far_ways.h"
#include "sync/team.h"

namespace gradsync {

// In place calls hand in the same memory twice; null is what an empty tensor has.
inline void copy_bytes(std::byte* to, const std::byte* from, std::size_t bytes) {
  if (bytes > 0 && to != from) std::memcpy(to, from, bytes);
}

// The same from a part of a tensor of `total` bytes to where others read it at once.
inline void copy_in(std::byte* to, const std::byte* from, std::size_t bytes, std::size_t total) {
  if (total < far_bytes || !far_ways().copies_in_streams) {
    copy_bytes(to, from, bytes);
  } else {
    copy_from_far(to, from, bytes);
  }
}

// The same to a part of a result of `total` bytes.
inline void copy_out(std::byte* to, const std::byte* from, std::size_t bytes, std::size_t total) {
  if (total < far_copy_bytes || to == from || !far_ways().writes_past_caches) {
    copy_bytes(to, from, bytes);
  } else {
    far_copy(to, from, bytes);
  }
}

// `total` bytes or elements in parts of `most`. Past the end, parts are empty.
struct Cut {
  std::size_t total;
  std::size_t most;

  std::size_t rounds() const { return total == 0 ? 1 : (total + most - 1) / most; }
  std::size_t offset(std::size_t round) const { return std::min(total, round * most); }
  std::size_t length(std::size_t round) const { return std::min(most, total - offset(round)); }
};

// Puts a part of a tensor, cut by bytes, where others read it at once.
inline void stage_part(std::byte* to, const std::byte* from, const Cut& cut, std::size_t round) {
  copy_in(to, from + cut.offset(round), cut.length(round), cut.total);
}

// The most bytes that a round moves from one rank to another; `header` is what every half begins
// with. At 2 ranks with 25 MiB, all_gather took 0.99 of the time of the faster MPI in the same runs
// with 256 KiB, 1.04 with 128 and 1.06 with 64 (means of three, up to 0.06 apart); reading ahead
// with prefetch instructions changed nothing.
inline std::size_t round_bytes(const Staging& staging, std::size_t header = 0) {
  return std::min<std::size_t>(staging.capacity() - header, 256 * 1024);
}

// How a rank shares its half among the other ranks, each of which gets a piece of its own.
class Shares {
 public:
  Shares(const Team& team, const Staging& staging, std::size_t header = 0)
      : rank_(team.rank()), header_(round_up(header, cache_line)) {
    const std::size_t others = team.size() > 1 ? static_cast<std::size_t>(team.size()) - 1 : 1;
    const std::size_t room = staging.capacity() > header_ ? staging.capacity() - header_ : 0;
    bytes_ = room / others / cache_line * cache_line;
  }

  // Groups so large that a share has no room for an element cannot use these algorithms.
  Status check() const {
    if (bytes_ >= cache_line) return Status::success();
    return Status::error(Code::invalid, "the group has too many ranks for its staging space");
  }
  std::size_t bytes() const { return bytes_; }
  // Where in the half of `from` the share for `to` begins.
  std::size_t offset(int from, int to) const {
    return header_ + static_cast<std::size_t>(to < from ? to : to - 1) * bytes_;
  }
  std::size_t to(int peer) const { return offset(rank_, peer); }
  std::size_t from(int peer) const { return offset(peer, rank_); }

 private:
  int rank_;
  std::size_t header_;
  std::size_t bytes_ = 0;
};

// The steps of one call.
class Rounds {
 public:
  Rounds(Team& team, Staging& staging, Deadline deadline)
      : team_(team), staging_(staging), deadline_(deadline) {}

  // The first round: `stage` writes to the next half, then the call is announced, and all ranks
  // have agreed on it.
  template <typename Stage>
  Status first(std::uint64_t what, std::uint64_t count, Stage stage) {
    return first(stage, [&] { team_.announce(what, count); });
  }
  template <typename Stage, typename Announce>
  Status first(Stage stage, Announce announce) {
    const Status status = staging_.next(deadline_);
    if (!status.ok()) return status;
    stage();
    release();
    announce();
    return team_.agree(deadline_);
  }
  // A later one.
  template <typename Stage>
  Status next(Stage stage) {
    const Status status = staging_.next(deadline_);
    if (!status.ok()) return status;
    stage();
    publish();
    return status;
  }
  // A step in which nothing is staged.
  void publish() {
    release();
    team_.publish(team_.progress() + 1);
  }

  Status wait_for(int peer) { return team_.wait_for(peer, team_.progress(), deadline_); }
  Status wait_for_all() { return team_.wait_for_all(team_.progress(), deadline_); }
  // The n-th of the other ranks, the next one first, so that not all read from the same rank.
  int other(int n) const { return (team_.rank() + n) % team_.size(); }
  Deadline deadline() const { return deadline_; }

 private:
  // Readers are done with this round when they publish the next one, be it of the next call.
  void release() { staging_.free_at(team_.progress() + 2); }

  Team& team_;
  Staging& staging_;
  Deadline deadline_;
};

}  // namespace gradsync
