#include "sync/team.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <new>

#include "common/background.h"
#include "common/cgroup.h"
#include "common/interrupt.h"
#include "common/site.h"
#include "sync/futex.h"
#include "sync/pause.h"

namespace gradsync {
namespace {

// About 2 us: ranks that arrive together meet within that.
constexpr int brief_spins = 60;

// A rank that waits this long says which line it waits in, in case it is asked when it cannot
// answer any more.
constexpr auto site_after = std::chrono::milliseconds(300);

template <std::size_t Size>
void copy_text(std::array<char, Size>& to, const std::string& from) {
  const std::string kept = fitted(from, Size - 1);
  std::memcpy(to.data(), kept.data(), kept.size());
  to[kept.size()] = '\0';
}

}  // namespace

Patience patience_for(int ranks, int cores) {
  // 2000 pauses are about 60 us on the machines measured (30 ns each), several times the longest
  // gap between two ranks that run the same code; yielding then costs a lone rank nothing. It goes
  // on for longer than a hypervisor takes a core away: who sleeps gives up its own, waits for it
  // when woken, and keeps the others until they sleep, too. (4 bytes at 2 ranks, 30 % stolen, with
  // 1, 5 and 20 ms: 9, 2 and 3 us; nothing stolen: 1.3 each.)
  constexpr int any_number = std::numeric_limits<int>::max();
  if (ranks <= cores) return {2000, any_number, std::chrono::milliseconds(10)};
  // A yield that finds nobody else takes about 0.4 us, one that does a switch or two. Waking a
  // sleeper takes 5 us and more: 4 ranks on 2 cores meet in 10 us by yielding, in 50 by sleeping.
  return {0, 2000, std::chrono::milliseconds(1)};
}

Team::Team(std::byte* memory, int rank, int ranks, Liveness liveness)
    : header_(std::launder(reinterpret_cast<Header*>(memory))),
      slots_(std::launder(reinterpret_cast<Slot*>(memory + slots_offset()))),
      staging_(memory + staging_offset(static_cast<std::size_t>(ranks))),
      rank_(rank),
      size_(ranks),
      moves_(static_cast<std::size_t>(ranks)),
      liveness_(std::move(liveness)) {}

void Team::format(std::byte* memory, int ranks, std::size_t staging_bytes, bool open) {
  auto* header = new (memory) Header;
  for (int rank = 0; rank < ranks; ++rank) {
    new (memory + slots_offset() + static_cast<std::size_t>(rank) * sizeof(Slot)) Slot;
  }
  header->magic = layout_magic;
  header->ranks = static_cast<std::uint32_t>(ranks);
  header->staging_bytes = staging_bytes;
  header->open = open;
}

std::byte* Team::staging(int rank) const {
  return staging_ + static_cast<std::size_t>(rank) * round_up(header_->staging_bytes, page_bytes);
}

void Team::introduce(std::byte* memory, std::span<const Identity> ranks) {
  auto* slots = std::launder(reinterpret_cast<Slot*>(memory + slots_offset()));
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) slots[rank].identity = ranks[rank];
  std::launder(reinterpret_cast<Header*>(memory))->introduced = true;
}

Identity Identity::own() {
  return {::getpid(), affinity_mask(), own_beacon(), static_cast<std::uint32_t>(::sched_getcpu()),
          cgroup_cpus()};
}

Status Team::enter(Deadline deadline) {
  if (header_->magic != layout_magic || header_->ranks != static_cast<std::uint32_t>(size_)) {
    return Status::error(Code::invalid, "shared memory of another layout or group size");
  }
  Slot& mine = slot(rank_);
  if (!header_->introduced) mine.identity = Identity::own();
  mine.presence.store(Presence::active, std::memory_order_release);
  progress_ = 0;
  publish(1);  // releases the fields above
  const Status status = header_->introduced ? Status::success() : wait_for_all(1, deadline);
  if (!status.ok()) return status;
  // The cores of all ranks together: ranks that are bound to one core each may spin. The same on
  // all of them, though they may be in different control groups: how calls are cut depends on it.
  CpuMask joint;
  double quota = slot(rank_).identity.cpus;
  for (int peer = 0; peer < size_; ++peer) {
    joint.merge(slot(peer).identity.affinity);
    quota = std::min(quota, slot(peer).identity.cpus);
  }
  cores_ = usable_cores(joint, quota);
  patience_ = patience_for(size_, cores_);
  relocation_ = Relocation(is_crowded());
  return status;
}

void Team::leave(const std::string& note) {
  Slot& mine = slot(rank_);
  if (mine.presence.load(std::memory_order_relaxed) != Presence::active) return;
  if (!note.empty()) copy_text(mine.note, note);
  mine.presence.store(note.empty() ? Presence::left : Presence::failed, std::memory_order_release);
  futex_wake_all(mine.progress);
}

void Team::abort(const std::string& reason, bool gave_up) {
  std::uint32_t nobody = 0;
  if (!header_->aborting.compare_exchange_strong(nobody, static_cast<std::uint32_t>(rank_) + 1,
                                                 std::memory_order_acq_rel)) {
    return;  // somebody was first, and the first reason is the one that counts
  }
  copy_text(header_->reason, reason);
  header_->gave_up = gave_up;
  header_->aborted.store(static_cast<std::uint32_t>(rank_) + 1, std::memory_order_release);
  for (int peer = 0; peer < size_; ++peer) futex_wake_all(slot(peer).progress);
}

void Team::abandon() {
  // One that failed has said so, with the reason that the others shall see.
  const Presence mine = slot(rank_).presence.load(std::memory_order_relaxed);
  if (!cancelled_.load(std::memory_order_relaxed) || mine == Presence::failed) return;
  abort("rank " + std::to_string(rank_) + " destroyed the group while its call #" +
        std::to_string(call_) + " was in flight");
}

void Team::announce(Announcement call) {
  call.sequence = ++sequence_;
  // On its way while we write: who comes last finds the others' there already.
  __builtin_prefetch(&slot((rank_ + 1) % size_));
  core_ = static_cast<std::uint32_t>(::sched_getcpu());
  call.time_ns = began_ns_;
  // All at once from here: whoever polls takes the line away between two writes that are apart.
  Slot& mine = slot(rank_);
  mine.announce(call);
  mine.core.store(core_, std::memory_order_relaxed);
  publish(progress_ + 1);
}

Status Team::agree(Deadline deadline, const Meanwhile& meanwhile) {
  const auto began =
      relocation_.is_judged() ? Deadline::Clock::now() : Deadline::Clock::time_point{};
  const Status status = wait_for_all(progress_, deadline, meanwhile);
  if (!status.ok()) return status;
  if (relocation_.is_judged()) relocation_.count(Deadline::Clock::now() - began);
  const Announcement mine = slot(rank_).announced_call(sequence_);
  Status verdict;
  int before_us = 0;  // on our core
  for (int peer = 0; peer < size_; ++peer) {
    if (!slot(peer).announced_call(sequence_).same_call(mine)) verdict.ranks.push_back(peer);
    if (peer < rank_ && is_on_core_of(peer)) ++before_us;
  }
  if (before_us >= ranks_per_core() && relocation_.due()) find_core_with_room();
  if (!verdict.ranks.empty()) {
    verdict.code = Code::mismatch;
    verdict.message = "the ranks asked for different things";
  }
  return verdict;
}

void Team::publish(std::uint64_t step) {
  progress_ = step;
  Slot& mine = slot(rank_);
  // seq_cst on both sides: either we see the sleeper's count, or the sleeper sees our step before
  // it sleeps. Release is part of it, so what was written before the step is visible to who reads
  // it.
  mine.progress.store(static_cast<std::uint32_t>(step), std::memory_order_seq_cst);
  if (mine.sleepers.load(std::memory_order_seq_cst) != 0) futex_wake_all(mine.progress);
}

bool Team::has_reached(int peer, std::uint64_t step) const {
  return reached(progress_of(peer), step);
}

std::uint32_t Team::progress_of(int peer) const {
  return slot(peer).progress.load(std::memory_order_acquire);
}

Status Team::wait_for_all(std::uint64_t step, Deadline deadline, const Meanwhile& meanwhile) {
  if (step <= reached_by_all_) return Status::success();
  for (int distance = 1; distance < size_; ++distance) {
    // Starting with the next rank spreads the reads over the slots.
    const Status status = wait_for((rank_ + distance) % size_, step, deadline, meanwhile);
    if (!status.ok()) return status;
  }
  reached_by_all_ = step;
  return Status::success();
}

void Team::nudge() {
  Slot& mine = slot(rank_);
  // Whoever goes to sleep in this moment misses it, and looks again later.
  if (mine.sleepers.load(std::memory_order_relaxed) != 0) futex_wake_all(mine.progress);
}

Status Team::wait_for(int peer, std::uint64_t step, Deadline deadline, const Meanwhile& meanwhile) {
  if (has_reached(peer, step)) return Status::success();
  const Patience patience =
      is_background && !has_free_core ? Patience{0, 1, std::chrono::milliseconds(1)} : patience_;
  // A scheduler may put two ranks on one core although there are enough; then our spinning is what
  // the other waits for.
  const int spins = is_on_core_of(peer) ? 0 : patience.spins;
  for (int i = 0; i < spins; ++i) {
    if (i == brief_spins) let_go_of_lock();
    pause_briefly();
    if (meanwhile) meanwhile();
    if (has_reached(peer, step)) return Status::success();
  }
  let_go_of_lock();
  // By the clock as well: on a busy machine a yield may take milliseconds, and nobody looks around
  // meanwhile.
  const auto yield_until = Deadline::Clock::now() + patience.yielding;
  for (int i = 0; i < patience.yields && Deadline::Clock::now() < yield_until; ++i) {
    ::sched_yield();
    if (meanwhile) meanwhile();
    if (has_reached(peer, step)) return Status::success();
  }
  Slot& theirs = slot(peer);
  while (true) {
    const Status status = health(step);
    // A rank may publish its last step and go: what it published counts.
    if (has_reached(peer, step)) return Status::success();
    if (!status.ok()) return status;
    const Deadline limit = deadline.counted_from(last_move(peer));
    if (limit.expired()) return timed_out(step);
    if (interrupted()) return interrupted_status();
    if (meanwhile && meanwhile()) continue;
    wait_goes_on(step, limit);
    theirs.sleepers.fetch_add(1, std::memory_order_seq_cst);
    const std::uint32_t seen = theirs.progress.load(std::memory_order_seq_cst);
    if (!reached(seen, step)) {
      futex_wait(theirs.progress, seen, limit.remaining_ns(look_around_ns));
    }
    theirs.sleepers.fetch_sub(1, std::memory_order_seq_cst);
    if (has_reached(peer, step)) return Status::success();
  }
}

Deadline::Clock::time_point Team::last_move(int peer) {
  const auto now = Deadline::Clock::now();
  // Everybody's moves, not only the awaited one's: whoever it waits for next may have stood still
  // all the while.
  for (int rank = 0; rank < size_; ++rank) {
    Move& known = moves_[static_cast<std::size_t>(rank)];
    const std::uint32_t progress = progress_of(rank);
    if (progress != known.progress) known = {progress, now};
  }
  return moves_[static_cast<std::size_t>(peer)].seen_at;
}

void Team::wait_goes_on(std::uint64_t step, Deadline since) {
  const auto waited = Deadline::Clock::now() - since.start();
  if (waited >= site_after) publish_site();
  const auto patience = std::chrono::nanoseconds(late_after_ns.load(std::memory_order_relaxed));
  if (patience.count() == 0 || waited < patience || told_late_of_ == call_) return;
  told_late_of_ = call_;
  auto* const hook = late_hook.load(std::memory_order_relaxed);
  LongWait wait{name_, places_, rank_, size_, {}, timed_out(step).ranks, 0, {}};
  wait.site = slot(rank_).site.load(call_);
  // One line is enough: the first of those that wait says it for all.
  int first = 0;
  while (first < rank_ && !has_reached(first, step)) ++first;
  if (hook == nullptr || first != rank_) return;
  wait.call = report(rank_).last;
  wait.seconds = std::chrono::duration<double>(waited).count();
  hook(wait);
}

void Team::publish_site() {
  TextCell<256>& mine = slot(rank_).site;
  if (call_ == 0 || mine.about() == call_) return;
  mine.store(call_, present_site());  // also that there is none: others would wait for it
}

void Team::await_sites(const std::vector<int>& ranks, Deadline deadline) const {
  const auto outstanding = [&](int peer) {
    return peer != rank_ && slot(peer).site.about() != call_ &&
           slot(peer).presence.load(std::memory_order_acquire) == Presence::active;
  };
  while (std::any_of(ranks.begin(), ranks.end(), outstanding) && !deadline.expired()) {
    const std::vector<int> dead = liveness_.dead();
    const auto is_dead = [&](int peer) {
      return std::find(dead.begin(), dead.end(), peer) != dead.end();
    };
    if (std::all_of(ranks.begin(), ranks.end(),
                    [&](int peer) { return !outstanding(peer) || is_dead(peer); })) {
      return;
    }
    ::usleep(1000);
  }
}

Status Team::check_aborted() const {
  if (cancelled_.load(std::memory_order_relaxed)) {
    return Status::error(Code::aborted, "the group was destroyed while a call was in flight",
                         {rank_});
  }
  const std::uint32_t aborter = header_->aborted.load(std::memory_order_acquire);
  if (aborter == 0) return Status::success();
  return Status::error(Code::aborted, header_->reason.data(), {static_cast<int>(aborter) - 1});
}

Status Team::health(std::uint64_t step) const {
  Status status = check_aborted();
  if (!status.ok()) {
    // Somebody who waits with us lost patience first: we wait for the same ranks, so say who they
    // are.
    Status late = timed_out(step);
    if (!header_->gave_up || late.ranks.empty()) return status;
    late.message = header_->reason.data();
    return late;
  }
  // Only ranks that still owe this step matter: the others may have gone home rightly.
  int culprit = -1;
  const auto suspect = [&](int peer) {
    // Nobody waits for a step beyond its own, so whoever went because of another rank has got
    // further than that one: the one that is furthest behind is the cause.
    if (peer == rank_ || has_reached(peer, step)) return;
    if (culprit < 0 || !has_reached(peer, progress_of(culprit))) culprit = peer;
  };
  for (const int peer : departed()) suspect(peer);
  if (culprit < 0) return Status::success();
  // Unless it went in the middle of a step, where it has got no further than its own cause.
  const std::uint32_t blamed = slot(culprit).blames.load(std::memory_order_acquire);
  return why_gone(blamed == 0 ? culprit : static_cast<int>(blamed) - 1);
}

std::vector<int> Team::departed() const {
  // Who left in peace comes last: it may have gone because of one that did not.
  std::vector<int> gone, in_peace;
  for (int peer = 0; peer < size_; ++peer) {
    const Presence presence = slot(peer).presence.load(std::memory_order_acquire);
    if (presence == Presence::failed) gone.push_back(peer);
    if (presence == Presence::left) in_peace.push_back(peer);
  }
  const auto is_in = [](const std::vector<int>& list, int peer) {
    return std::find(list.begin(), list.end(), peer) != list.end();
  };
  for (const int peer : liveness_.dead()) {
    if (!is_in(gone, peer) && !is_in(in_peace, peer)) gone.push_back(peer);
  }
  gone.insert(gone.end(), in_peace.begin(), in_peace.end());
  return gone;
}

Status Team::why_gone(int peer) const {
  const Presence presence = slot(peer).presence.load(std::memory_order_acquire);
  if (presence == Presence::failed) return lost(peer, slot(peer).note.data());
  if (presence == Presence::left) return lost(peer, "left the group before this call");
  const std::string how = liveness_.how_it_ended(peer, slot(peer).identity.pid);
  return lost(peer, how.empty() ? "its process is gone" : "its process is gone: " + how);
}

Status Team::lost(int peer, const std::string& why) const {
  const int pid = slot(peer).identity.pid;  // 0 before it is known
  return Status::error(Code::peer_lost, (pid != 0 ? "pid " + std::to_string(pid) + ": " : "") + why,
                       {peer});
}

Status Team::timed_out(std::uint64_t step) const {
  Status status = Status::error(Code::timeout, "not every rank arrived in time");
  for (int peer = 0; peer < size_; ++peer) {
    if (peer != rank_ && !has_reached(peer, step)) status.ranks.push_back(peer);
  }
  return status;
}

Announcement Team::announced_by(int peer) const { return slot(peer).announced(sequence_); }

RankReport Team::report(int peer) const {
  const Slot& theirs = slot(peer);
  RankReport report;
  report.presence = theirs.presence.load(std::memory_order_acquire);
  report.progress = theirs.progress.load(std::memory_order_acquire);
  if (report.presence != Presence::absent) report.pid = theirs.identity.pid;
  const Announcement even = theirs.announced(0);
  const Announcement odd = theirs.announced(1);
  report.last = even.sequence > odd.sequence ? even : odd;
  report.site_of = theirs.site.about();
  report.site = theirs.site.load(report.site_of);
  return report;
}

}  // namespace gradsync
