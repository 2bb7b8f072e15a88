// A rank's view of its group: announcing calls, publishing steps, waiting for the others' steps.
// It knows nothing of what a call does. All acquire/release pairs of the core are in team.cc.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "common/deadline.h"
#include "common/status.h"
#include "sync/liveness.h"
#include "sync/neighbour.h"
#include "sync/relocation.h"
#include "sync/slots.h"

namespace gradsync {

// How long a waiter stays on its core before it sleeps.
struct Patience {
  int spins = 0;                        // polls with a pause instruction between them
  int yields = 0;                       // polls with sched_yield between them
  std::chrono::nanoseconds yielding{};  // for how long at most
};

// Spinning pays only while every rank has a core of its own; otherwise the one we wait for may be
// the one that our spinning keeps off the core.
Patience patience_for(int ranks, int cores);

struct RankReport {
  int pid = 0;
  Presence presence = Presence::absent;
  std::uint32_t progress = 0;
  Announcement last;
  // The line that asked for call number `site_of`, where known.
  std::uint64_t site_of = 0;
  std::string site;
  std::string standing;  // where its program stands, when it was asked
};

// A wait that takes long.
struct LongWait {
  std::string group;
  std::vector<int> places;  // the ranks in the world, of a sub-group
  int rank;
  int ranks;
  Announcement call;  // the one that waits
  std::vector<int> missing;
  double seconds;
  std::string site;       // the line that asked for the call
  std::string message{};  // the send or receive that waits, if it is not a call
};

// Told once of a wait that has taken `late_after_ns` (0: never); set by the embedding language.
inline std::atomic<void (*)(const LongWait&)> late_hook{nullptr};
inline std::atomic<std::int64_t> late_after_ns{0};

class Team {
 public:
  // `memory` holds segment_bytes(ranks, staging) bytes; rank 0 or whoever created it called
  // format().
  Team(std::byte* memory, int rank, int ranks, Liveness liveness);

  // `open`: ranks that can read each other's memory do.
  static void format(std::byte* memory, int ranks, std::size_t staging_bytes, bool open = true);

  // The group's name, for messages.
  const std::string& name() const { return name_; }
  void set_name(const std::string& name) { name_ = name; }
  // The ranks in the world by which programs know those of a sub-group, for messages, too.
  const std::vector<int>& places() const { return places_; }
  void set_places(std::vector<int> places) { places_ = std::move(places); }

  int rank() const { return rank_; }
  int size() const { return size_; }
  std::byte* staging(int rank) const;
  std::size_t staging_bytes() const { return header_->staging_bytes; }
  // Whether every rank is known to be able to read every other's memory. Each looks when it first
  // asks: while a group is formed, the others are busy with their mappings, which the kernel would
  // lock meanwhile (that took a millisecond).
  bool is_open();
  // The cores of all ranks together, divided by their number.
  double cores_each() const { return static_cast<double>(cores_) / size_; }
  // Whether there are more ranks than cores.
  bool is_crowded() const { return patience_.spins == 0; }

  // Writes all ranks' identities into memory that nobody else has yet. Otherwise each rank does it
  // when it enters.
  static void introduce(std::byte* memory, std::span<const Identity> ranks);
  // Says that the caller is there, and waits for the others unless they were introduced.
  Status enter(Deadline deadline);
  // Says goodbye; an empty note means that all is well.
  void leave(const std::string& note);
  // Makes every present wait and every later call of every rank fail.
  void abort(const std::string& reason, bool gave_up = false);
  // Makes the waits of this rank alone fail: it is about to go.
  void cancel() { cancelled_.store(true, std::memory_order_relaxed); }
  // For a call that was announced and then ended by that: the others must not wait for it.
  void abandon();
  // Says whether somebody has, who and why.
  Status check_aborted() const;

  // The number of steps this rank has published; the same on all ranks between calls. Counted in 64
  // bits here; the shared word holds the lower 32, and peers are never 2^31 steps apart.
  std::uint64_t progress() const { return progress_; }
  std::uint64_t sequence() const { return sequence_; }

  // Begins a call: from here on, waits and failures are its. Who has looked at the clock already
  // says when that was, because looking again takes a thirtieth of a small call.
  void begin(Deadline::Clock::time_point now) {
    call_ = sequence_ + 1;
    began_ns_ = static_cast<std::uint64_t>(now.time_since_epoch().count());
  }
  std::uint64_t call() const { return call_; }
  // Announces a call together with its first step.
  void announce(std::uint64_t what, std::uint64_t count, std::uint64_t place = 0) {
    announce({.what = what, .count = count, .place = place});
  }
  // And with that all that the others need of this rank. The line that they poll holds it, so that
  // they need no second one, which takes as long to come as the first.
  void announce_with(std::uint64_t what, std::uint64_t count, std::uint64_t payload) {
    announce({.what = what, .count = count, .carries = true, .payload = payload});
  }
  // Waits until all ranks have announced theirs, and compares: mismatch lists every rank's.
  // `meanwhile` is called while waiting; true when it found something to do.
  using Meanwhile = std::function<bool()>;
  Status agree(Deadline deadline, const Meanwhile& meanwhile = nullptr);
  // Wakes who sleeps until this rank's next step, to look whether there is something to do.
  void nudge();

  void publish(std::uint64_t step);
  // Waits until a peer has published a step. The deadline counts from the peer's last step: one
  // that goes on, however slowly, is not late, and it has only so many steps to make.
  Status wait_for(int peer, std::uint64_t step, Deadline deadline,
                  const Meanwhile& meanwhile = nullptr);
  Status wait_for_all(std::uint64_t step, Deadline deadline, const Meanwhile& meanwhile = nullptr);

  // Copies from a peer's own memory. A peer that has gone or given up meanwhile is reported as in a
  // wait; if anything else prevents it the group is aborted, because the others wait for us.
  Status read_from(int peer, std::byte* to, std::uint64_t from, std::size_t bytes,
                   Deadline deadline);
  // Whether what has just been read of a peer's memory was what it had promised; reported likewise.
  Status still_offers(int peer, Deadline deadline);
  // Says that this rank would rather have some things done in another way, a bit for each; and what
  // all ranks have said so far. Announcements carry it: who has agreed on a call knows what was
  // said before it.
  void object_to(std::uint64_t things) {
    slot(rank_).objections.fetch_or(things, std::memory_order_relaxed);
  }
  std::uint64_t objections() const;
  // Whether others can be given these places in our memory, each of so many bytes or null.
  bool can_offer(std::span<const std::byte* const> places, std::size_t bytes);
  // Tells those who read our memory that it is no longer what they were promised.
  void withdraw();

  // For a wait that is for one peer's message: moves to another core if the peer, which comes
  // before this rank, is on the same, where each would wait for the other to be put aside. Any
  // thread.
  void part_from(int peer);

  // Lets the others know which line asked for the present call.
  void publish_site();
  // Waits until these ranks have, as far as they still can.
  void await_sites(const std::vector<int>& ranks, Deadline deadline) const;

  // For waits that are not for steps. The ranks that left, failed or died; one poll(2) for all.
  std::vector<int> departed() const;
  bool has_left(int peer) const {
    return slot(peer).presence.load(std::memory_order_acquire) == Presence::left;
  }
  // Why a rank that is no longer there is not.
  Status why_gone(int peer) const;
  // What it said when it failed, else nothing.
  std::string last_words(int peer) const {
    const bool failed = slot(peer).presence.load(std::memory_order_acquire) == Presence::failed;
    return failed ? slot(peer).note.data() : "";
  }
  const Patience& patience() const { return patience_; }

  Announcement announced_by(int peer) const;
  // Of the present call; time and place are 0.
  Announcement call_of(int peer) const { return slot(peer).announced_call(sequence_); }
  const Liveness& liveness() const { return liveness_; }
  Slot* slots() const { return slots_; }
  RankReport report(int peer) const;

 private:
  static bool reached(std::uint32_t word, std::uint64_t step) {
    return static_cast<std::int32_t>(word - static_cast<std::uint32_t>(step)) >= 0;
  }
  Slot& slot(int rank) const { return slots_[rank]; }
  // Fills in the number and the time.
  void announce(Announcement call);
  std::uint32_t progress_of(int peer) const;
  bool has_reached(int peer, std::uint64_t step) const;
  // Why the step cannot come any more, or ok.
  Status health(std::uint64_t step) const;
  Status lost(int peer, const std::string& why) const;
  Status timed_out(std::uint64_t step) const;
  void look_for_neighbours();
  Status out_of_reach(int peer, Deadline deadline);
  bool is_on_core_of(int peer) const;
  // How many share a core when they are spread evenly.
  int ranks_per_core() const { return (size_ + cores_ - 1) / cores_; }
  // Schedulers are slow to part ranks that were woken on one core although there are others: two
  // that wait for each other there take hundreds of microseconds for what takes one on two cores.
  void find_core_with_room();
  // When the peer was last seen to have made a step.
  Deadline::Clock::time_point last_move(int peer);
  // Called now and then during a wait that began at `since.start()`.
  void wait_goes_on(std::uint64_t step, Deadline since);

  struct Move {
    std::uint32_t progress = 0;
    Deadline::Clock::time_point seen_at{};
  };

  std::string name_;
  std::vector<int> places_;
  Header* header_ = nullptr;
  Slot* slots_ = nullptr;
  std::byte* staging_ = nullptr;
  int rank_ = 0;
  int size_ = 0;
  int cores_ = 1;
  std::uint64_t progress_ = 0;
  std::uint64_t reached_by_all_ = 0;  // the newest step that a wait_for_all has seen
  std::uint64_t sequence_ = 0;
  std::uint64_t call_ = 0;  // the one that has begun; announced or not
  std::uint64_t began_ns_ = 0;
  std::uint64_t told_late_of_ = 0;  // the call whose long wait was told
  std::vector<Move> moves_;         // kept only while this rank waits
  std::atomic<bool> cancelled_{false};
  std::uint32_t core_ = 0;  // as announced last
  Relocation relocation_;
  // When a wait for a message may move next, in nanoseconds of the clock, and how long after that.
  std::atomic<std::int64_t> may_part_at_{0};
  std::atomic<std::int64_t> part_again_after_{1'000'000};
  Patience patience_;
  Liveness liveness_;
  std::vector<Neighbour> neighbours_;
  // Places that were found to be readable lately, to save the system call for tensors that are used
  // again and again.
  struct Offer {
    const std::byte* place = nullptr;
    std::size_t bytes = 0;
  };
  std::array<Offer, 16> offered_{};
  std::size_t next_offer_ = 0;
  bool is_open_ = false;
};

}  // namespace gradsync
