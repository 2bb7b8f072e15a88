// Where the ranks of a team run and what of each other they can reach.
#include <errno.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "sync/team.h"

namespace gradsync {

void Team::look_for_neighbours() {
  bool all = header_->open && size_ > 1;
  neighbours_.resize(static_cast<std::size_t>(size_));
  for (int peer = 0; all && peer < size_; ++peer) {
    Neighbour& neighbour = neighbours_[static_cast<std::size_t>(peer)];
    const Identity& theirs = slot(peer).identity;
    neighbour = Neighbour::find(theirs.pid, theirs.beacon);
    all = neighbour.reachable();
  }
  slot(rank_).reaches_all.store(all ? 1 : 0, std::memory_order_relaxed);
}

bool Team::is_open() {
  if (neighbours_.empty()) look_for_neighbours();
  for (int peer = 0; !is_open_; ++peer) {
    if (slot(peer).reaches_all.load(std::memory_order_relaxed) == 0) break;
    is_open_ = peer == size_ - 1;
  }
  return is_open_;
}

std::uint64_t Team::objections() const {
  std::uint64_t all = 0;
  for (int peer = 0; peer < size_; ++peer) {
    all |= slot(peer).objections.load(std::memory_order_relaxed);
  }
  return all;
}

Status Team::read_from(int peer, std::byte* to, std::uint64_t from, std::size_t bytes,
                       Deadline deadline) {
  if (!neighbours_[static_cast<std::size_t>(peer)].read(to, from, bytes)) {
    return out_of_reach(peer, deadline);
  }
  return still_offers(peer, deadline);
}

Status Team::still_offers(int peer, Deadline deadline) {
  // Read and modified, because the look at the flag must not come before what was read: release
  // does that. (The thread sanitizer does not know fences.)
  if (slot(peer).withdrawn.fetch_add(0, std::memory_order_acq_rel) == 0) return Status::success();
  errno = ECANCELED;
  return out_of_reach(peer, deadline);
}

bool Team::can_offer(std::span<const std::byte* const> places, std::size_t bytes) {
  const auto is_known = [&](const std::byte* place) {
    return place == nullptr || std::ranges::any_of(offered_, [&](const Offer& offer) {
             return offer.place == place && offer.bytes == bytes;
           });
  };
  if (std::ranges::all_of(places, is_known)) return true;
  if (!can_be_reached(places, bytes)) return false;
  for (const std::byte* place : places) {
    if (!is_known(place)) offered_[next_offer_++ % offered_.size()] = {place, bytes};
  }
  return true;
}

void Team::withdraw() {
  // Acquire: what the caller does to its memory afterwards does not come before.
  slot(rank_).withdrawn.exchange(1, std::memory_order_acq_rel);
}

Status Team::out_of_reach(int peer, Deadline deadline) {
  const int error = errno;
  // A process that ends has no memory long before its end is known.
  const Deadline patience = Deadline::after(1.0);
  while (!patience.expired() && !deadline.expired()) {
    Status status = health(progress_ + 1);
    // It may have made its step before it went.
    const std::vector<int> gone = departed();
    if (status.ok() && std::ranges::find(gone, peer) != gone.end()) status = why_gone(peer);
    if (!status.ok()) {
      if (status.code == Code::peer_lost) {
        slot(rank_).blames.store(static_cast<std::uint32_t>(status.ranks[0]) + 1,
                                 std::memory_order_release);
      }
      return status;
    }
    ::usleep(500);
  }
  const std::string why = "rank " + std::to_string(rank_) + " cannot get at the memory of rank " +
                          std::to_string(peer) + ": " + std::strerror(error);
  abort(why);
  return Status::error(Code::system, why, {peer});
}

bool Team::is_on_core_of(int peer) const {
  return slot(peer).core.load(std::memory_order_relaxed) == core_;
}

void Team::find_core_with_room() {
  CpuMask full;
  for (int peer = 0; peer < size_; ++peer) {
    const std::uint32_t core = slot(peer).core.load(std::memory_order_relaxed);
    int there = 0;
    for (int other = 0; other < size_; ++other) {
      if (slot(other).core.load(std::memory_order_relaxed) == core) ++there;
    }
    if (there >= ranks_per_core()) full.add(core);
  }
  move_off(full);
}

void Team::part_from(int peer) {
  const auto core = static_cast<std::uint32_t>(::sched_getcpu());
  slot(rank_).core.store(core, std::memory_order_relaxed);
  if (peer < 0 || peer >= rank_ || slot(peer).core.load(std::memory_order_relaxed) != core) return;
  const std::int64_t now = Deadline::Clock::now().time_since_epoch().count();
  std::int64_t due = may_part_at_.load(std::memory_order_relaxed);
  if (now < due) return;
  // Ever more seldom: where the scheduler puts them back, or the other core is busy with something
  // else, it does more harm than good.
  const std::int64_t pause = part_again_after_.load(std::memory_order_relaxed);
  constexpr std::int64_t longest = 4'000'000'000;
  if (!may_part_at_.compare_exchange_strong(due, now + pause, std::memory_order_relaxed)) return;
  part_again_after_.store(std::min(4 * pause, longest), std::memory_order_relaxed);
  CpuMask here;
  here.add(core);
  move_off(here);
}

}  // namespace gradsync
