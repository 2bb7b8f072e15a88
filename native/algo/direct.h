// One copy instead of two: ranks stage where their memory is instead of what is in it, agree on the
// call, and then each reads what it needs from there. A tensor in the arena is read through the
// mapping that every rank has; a private one through the kernel, where that lets all ranks do it
// (sync/neighbour.h).
//   steps: 2 (announced; done with the others' memory)
//
// A rank whose memory cannot be reached, or had better not be, stages its first round behind the
// header in which the others have their addresses. All ranks see who did what: if all offer their
// memory the call goes on here, if none does it goes on with the rounds, and if only some do they
// begin the rounds once more.
//
// Who fails says so before it returns, because its memory may be anything afterwards; whoever has
// read from it looks for that.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>

#include "algo/rounds.h"
#include "algo/staging.h"
#include "algo/trial.h"
#include "common/few.h"
#include "sync/team.h"

namespace gradsync {

// From how many bytes between two ranks on it is worth trying a system call (0.7 us, and 45 ns for
// each page on top of the copy, where that was measured); what comes of it trial.h says. At 2 ranks
// on 2 cores, all_gather with pieces of 32 KiB: 6.3 us against 5.7 us with staging on one
// machine, 5.3 against 7.4 on another, where 16 KiB took the same either way. With more ranks than
// cores the second step costs more: at 4 ranks on the latter, pieces of 16 KiB took 24 us against
// 15, of 40 KiB 37 against 27.
inline std::size_t direct_bytes(const Team& team) {
  return (team.is_crowded() ? 48 : 16) * std::size_t{1024};
}

// How a call goes on after its first step.
enum class Way : std::uint8_t {
  direct,   // each reads the others' memory
  staged,   // the first round has been staged
  restage,  // rounds, but not everybody has staged the first one
};

class Direct {
 public:
  // For transfers of so many bytes between two ranks, and so many places on each rank. Small ones
  // are staged, and need no header. Without a part in a trial, private memory is read whenever it
  // can be.
  Direct(Team& team, Staging& staging, Rounds& rounds, std::size_t places, std::size_t bytes,
         std::optional<Trial::Part> part = std::nullopt)
      : team_(team),
        staging_(staging),
        rounds_(rounds),
        bytes_(bytes),
        header_(bytes >= direct_bytes(team) ? header_bytes(places) : 0),
        part_(part),
        is_timed_(part && staging.trial().is_tried(*part)) {}
  ~Direct() {
    if (is_timed_ && part_->reads && began_ != Clock::time_point{}) {
      staging_.trial().note(*part_, way_ == Way::direct, Clock::now() - began_ + longest_stage_);
    }
  }
  Direct(const Direct&) = delete;
  Direct& operator=(const Direct&) = delete;

  static std::size_t header_bytes(std::size_t places) {
    return round_up((1 + places) * sizeof(std::uint64_t), cache_line);
  }
  // Where in every half of this call the data begins; a rank that offers its memory may use what is
  // behind as it likes.
  std::size_t header() const { return header_; }

  // Whether to let the others read private memory.
  bool is_worthwhile() {
    return team_.is_open() && (!part_ || staging_.trial().goes_directly(*part_));
  }

  // Announces the call together with this rank's places (none: nobody reads from it), of which
  // private ones are offered only if `private_too` and that is worthwhile, or with what `stage`
  // stages. Says how the call goes on, the same on all ranks.
  template <typename Stage>
  Status begin(std::uint64_t what, std::uint64_t count, std::span<const std::byte* const> places,
               bool private_too, Stage stage, Way& way) {
    way = Way::staged;
    if (header_ == 0) return rounds_.first(what, count, stage);
    const Status status = noted(rounds_.first(what, count, [&] {
      const bool offers = private_too && is_worthwhile();
      if (put(staging_.mine(), places, bytes_, offers)) timed(staging_.mine(), stage);
    }));
    if (status.ok()) way = agreed_way();
    return status;
  }

  // The two halves of this for calls whose own halves begin with something else: writes the header,
  // and returns whether this rank has to stage; and reads all ranks', `offset` bytes from the
  // beginning. Places may be null where there is nothing to read.
  bool put(std::byte* at, std::span<const std::byte* const> places, std::size_t bytes,
           bool private_too) {
    Few<std::uint64_t> words(1 + places.size());
    bool all_shared = true;
    for (std::size_t i = 0; i < places.size(); ++i) {
      if (places[i] == nullptr) continue;
      words[0] = offered;
      const std::uint64_t place = staging_.place_of(places[i], bytes);
      all_shared = all_shared && place != 0;
      words[1 + i] = place != 0 ? place | in_arena : reinterpret_cast<std::uint64_t>(places[i]);
    }
    if (!all_shared) {
      words[0] = private_too && team_.can_offer(places, bytes) ? offered_private : staged;
    }
    std::memcpy(at, words.begin(), words.all().size_bytes());
    return words[0] == staged;
  }
  // Stages, and says in the header how long that took, if it matters.
  template <typename Stage>
  void timed(std::byte* at, const Stage& stage) {
    const Clock::time_point before = is_timed_ ? Clock::now() : Clock::time_point{};
    stage();
    if (!is_timed_) return;
    const auto took = static_cast<std::uint64_t>(Trial::Time(Clock::now() - before).count());
    const std::uint64_t said = staged | took << said_bits;
    std::memcpy(at, &said, sizeof(said));
  }
  // The trial was of another kind of call than this turned out to be.
  void leave_trial() {
    part_.reset();
    is_timed_ = false;
  }
  Way agreed_way(std::size_t offset = 0) {
    bool any_shared = false;
    bool any_private = false;
    bool any_staged = false;
    for (int peer = 0; peer < team_.size(); ++peer) {
      const std::uint64_t all = word(peer, offset);
      const std::uint64_t said = all & ((1U << said_bits) - 1);
      any_shared = any_shared || said == offered;
      any_private = any_private || said == offered_private;
      any_staged = any_staged || said == staged;
      longest_stage_ = std::max(longest_stage_, Trial::Time(all >> said_bits));
    }
    way_ = !any_staged ? Way::direct : any_shared || any_private ? Way::restage : Way::staged;
    if (part_) staging_.trial().count(*part_, any_shared, any_private || any_staged);
    if (is_timed_ && way_ != Way::restage && !any_shared) began_ = Clock::now();
    return way_;
  }

  std::uint64_t place(int peer, std::size_t index, std::size_t offset = 0) const {
    return word(peer, offset + (1 + index) * sizeof(std::uint64_t));
  }
  // Where a place is mapped here; null when it is private.
  std::byte* mapped(std::uint64_t place) {
    if ((place & in_arena) == 0) return nullptr;
    has_looked_ = true;
    return staging_.at(place & ~in_arena);
  }
  Status read(int peer, std::uint64_t from, std::byte* to, std::size_t bytes) {
    if (const std::byte* const here = mapped(from)) {
      copy_out(to, here, bytes, bytes);
      return Status::success();
    }
    return noted(team_.read_from(peer, to, from, bytes, rounds_.deadline()));
  }

  // Brings together what every rank has at its first place; this rank has `input`.
  Status read_each(const std::byte* input, std::size_t bytes, std::span<std::byte* const> outputs) {
    copy_out(outputs[static_cast<std::size_t>(team_.rank())], input, bytes, bytes * outputs.size());
    for (int n = 1; n < team_.size(); ++n) {
      const int peer = rounds_.other(n);
      const Status status =
          read(peer, place(peer, 0), outputs[static_cast<std::size_t>(peer)], bytes);
      if (!status.ok()) return status;
    }
    return Status::success();
  }

  // Ends this rank's reading. Whose own memory others read must wait for them before the call
  // returns.
  Status done() {
    for (int n = 1; has_looked_ && n < team_.size(); ++n) {
      const Status status = noted(team_.still_offers(rounds_.other(n), rounds_.deadline()));
      if (!status.ok()) return status;
    }
    rounds_.publish();
    return Status::success();
  }
  Status wait_for(int peer) { return noted(rounds_.wait_for(peer)); }
  Status wait_for_all() { return noted(rounds_.wait_for_all()); }
  Status done_by_all() {
    const Status status = done();
    return status.ok() ? wait_for_all() : status;
  }

 private:
  using Clock = std::chrono::steady_clock;
  // The first word of a header, behind it how long it took to stage. Zero is what nobody has
  // written.
  enum Said : std::uint64_t { staged = 1, offered = 2, offered_private = 3, not_asked = 0 };
  static constexpr unsigned said_bits = 8;
  // Set in places that are not addresses of the rank's own.
  static constexpr std::uint64_t in_arena = std::uint64_t{1} << 63;

  Status noted(Status status) {
    if (!status.ok()) team_.withdraw();
    return status;
  }
  std::uint64_t word(int peer, std::size_t offset) const {
    std::uint64_t value = 0;
    std::memcpy(&value, staging_.of(peer) + offset, sizeof(value));
    return value;
  }

  Team& team_;
  Staging& staging_;
  Rounds& rounds_;
  std::size_t bytes_;
  std::size_t header_;
  bool has_looked_ = false;  // through the arena's mapping
  // The trial of this call, if there is one: from when all had agreed.
  std::optional<Trial::Part> part_;
  bool is_timed_ = false;
  Way way_{};
  Trial::Time longest_stage_{};
  Clock::time_point began_{};
};

}  // namespace gradsync
