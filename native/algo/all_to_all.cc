// All-to-all: each rank stages, for each other rank, a share of what it sends there, and copies out
// what the others staged for it.
//   steps: 1 per round of half / other ranks, at most round_bytes(), of the largest piece of all
//   bytes moved per rank: what it sends in, what it receives out (its own piece past the staging)
// Where memory is open or shared, large pieces are read from where they are, and small ones staged.
//   steps: 1, or 2 with large pieces   bytes moved per rank: large ones once, small ones as above
// Equal pieces, up to 7 bytes for all others together, travel with the announcement (tiny.h). Not
// all ranks need to have such: if only some do, or they differ, all stage once they have seen that.
//
// Any two ranks may exchange any number of elements, none included. Every half begins with how many
// its rank sends to and expects from each; all ranks compare all of these before anything is
// written, so that a difference anywhere is a mismatch everywhere, and all know how many rounds
// there are.
#include <sstream>
#include <vector>

#include "algo/algorithm.h"
#include "algo/direct.h"
#include "algo/rounds.h"
#include "algo/tiny.h"
#include "common/few.h"

namespace gradsync {
namespace {

// What all ranks said that they send to and expect from each other, in elements.
class Plan {
 public:
  Plan(const Team& team, const Staging& staging)
      : ranks_(static_cast<std::size_t>(team.size())), words_(2 * ranks_ * ranks_) {
    for (std::size_t rank = 0; rank < ranks_; ++rank) {
      std::memcpy(words_.begin() + 2 * ranks_ * rank, staging.of(static_cast<int>(rank)),
                  header_bytes(ranks_));
    }
  }

  static std::size_t header_bytes(std::size_t ranks) { return 2 * ranks * sizeof(std::size_t); }

  std::size_t sent(std::size_t from, std::size_t to) const {
    return words_[2 * ranks_ * from + to];
  }
  std::size_t expected(std::size_t from, std::size_t to) const {
    return words_[2 * ranks_ * to + ranks_ + from];
  }

  bool agrees() const {
    for (std::size_t from = 0; from < ranks_; ++from) {
      for (std::size_t to = 0; to < ranks_; ++to) {
        if (sent(from, to) != expected(from, to)) return false;
      }
    }
    return true;
  }

  // What it is that does not agree.
  Status disagreement() const {
    std::ostringstream text;
    std::vector<bool> differs(ranks_);
    for (std::size_t from = 0; from < ranks_; ++from) {
      for (std::size_t to = 0; to < ranks_; ++to) {
        if (sent(from, to) == expected(from, to)) continue;
        text << "rank " << from << " sends " << sent(from, to) << " elements to rank " << to
             << ", which expects " << expected(from, to) << "; ";
        differs[from] = differs[to] = true;
      }
    }
    Status verdict;
    for (std::size_t rank = 0; rank < ranks_; ++rank) {
      if (differs[rank]) verdict.ranks.push_back(static_cast<int>(rank));
    }
    verdict.code = Code::mismatch;
    verdict.message = text.str();
    verdict.message.resize(verdict.message.size() - 2);
    return verdict;
  }

  std::size_t largest() const { return *std::max_element(words_.begin(), words_.end()); }

 private:
  std::size_t ranks_;
  Few<std::size_t> words_;
};

// One call: what goes where.
struct Exchange {
  Team& team;
  Staging& staging;
  Rounds& rounds;
  const Shares& shares;
  const Pieces<const std::byte>& inputs;
  const Pieces<std::byte>& outputs;
  std::size_t element;
  std::size_t most;  // bytes of a piece in one round

  Cut cut_of(std::size_t count) const { return {count * element, most}; }

  // Pieces this large are read from where they are, if that is possible.
  bool is_large(std::size_t count) const {
    return count * element > std::min(direct_bytes(team), most);
  }

  // Large pieces are not staged by who has offered them.
  void stage(std::size_t round, bool large_too) const {
    for (int n = 1; n < team.size(); ++n) {
      const int peer = rounds.other(n);
      const auto to = static_cast<std::size_t>(peer);
      if (!large_too && is_large(inputs.counts[to])) continue;
      stage_part(staging.mine() + shares.to(peer), inputs.data[to], cut_of(inputs.counts[to]),
                 round);
    }
  }

  void keep_own(std::size_t round) const {
    const auto own = static_cast<std::size_t>(team.rank());
    const Cut kept = cut_of(inputs.counts[own]);
    copy_out(outputs.data[own] + kept.offset(round), inputs.data[own] + kept.offset(round),
             kept.length(round), kept.total * outputs.counts.size());
  }

  Status collect(std::size_t round) const {
    for (int n = 1; n < team.size(); ++n) {
      const int peer = rounds.other(n);
      const auto from = static_cast<std::size_t>(peer);
      const Status status = rounds.wait_for(peer);
      if (!status.ok()) return status;
      const Cut cut = cut_of(outputs.counts[from]);
      copy_out(outputs.data[from] + cut.offset(round), staging.of(peer) + shares.from(peer),
               cut.length(round), cut.total * outputs.counts.size());
    }
    return Status::success();
  }

  // Small pieces are staged, and the large ones are read from where they are.
  Status read_all(Direct& direct, std::size_t places) const {
    const auto own = static_cast<std::size_t>(team.rank());
    const std::size_t kept = inputs.counts[own] * element;
    copy_out(outputs.data[own], inputs.data[own], kept, kept * outputs.counts.size());
    for (int n = 1; n < team.size(); ++n) {
      const int peer = rounds.other(n);
      const auto from = static_cast<std::size_t>(peer);
      const std::size_t bytes = outputs.counts[from] * element;
      if (!is_large(outputs.counts[from])) {
        copy_bytes(outputs.data[from], staging.of(peer) + shares.from(peer), bytes);
        continue;
      }
      const Status status =
          direct.read(peer, direct.place(peer, own, places), outputs.data[from], bytes);
      if (!status.ok()) return status;
    }
    return direct.done_by_all();
  }
};

// The pieces that others are to read from where they are; nothing for the others.
Few<const std::byte*> places_of(const Exchange& exchange) {
  Few<const std::byte*> places(exchange.inputs.data.size());
  for (std::size_t to = 0; to < places.size(); ++to) {
    const bool needed = static_cast<int>(to) != exchange.team.rank() &&
                        exchange.is_large(exchange.inputs.counts[to]);
    places[to] = needed ? exchange.inputs.data[to] : nullptr;
  }
  return places;
}

// Pieces that travel with the announcement, behind one byte for how many elements each has.
class TinyPieces {
 public:
  explicit TinyPieces(const Exchange& exchange)
      : exchange_(exchange),
        tiny_(exchange.team),
        count_(exchange.inputs.counts[0]),
        bytes_(count_ * exchange.element) {}

  // Whether this rank's can.
  bool fit() const {
    const auto is_equal = [&](std::size_t count) { return count == count_; };
    const std::size_t others = exchange_.inputs.counts.size() - 1;
    return bytes_ * others > 0 && Tiny::fits(1 + bytes_ * others) &&
           std::ranges::all_of(exchange_.inputs.counts, is_equal) &&
           std::ranges::all_of(exchange_.outputs.counts, is_equal);
  }
  void announce(std::uint64_t what) {
    *tiny_.mine() = static_cast<std::byte>(count_);
    const int own = exchange_.team.rank();
    for (int n = 1; n < exchange_.team.size(); ++n) {
      const int peer = exchange_.rounds.other(n);
      std::memcpy(tiny_.mine(place(own, peer)),
                  exchange_.inputs.data[static_cast<std::size_t>(peer)], bytes_);
    }
    tiny_.announce(what, 0);
  }
  // When all have agreed on the call: who sent its pieces along, the same on all ranks.
  enum Sent : std::uint8_t { by_nobody, by_some, by_all };
  Sent sent() {
    const int carriers = tiny_.collect();
    if (carriers == 0) return by_nobody;
    bool alike = carriers == exchange_.team.size();
    for (int peer = 0; peer < exchange_.team.size(); ++peer) {
      alike = alike && *tiny_.of(peer) == *tiny_.of(0);
    }
    return alike ? by_all : by_some;
  }
  void collect() {
    exchange_.keep_own(0);
    const int own = exchange_.team.rank();
    for (int n = 1; n < exchange_.team.size(); ++n) {
      const int peer = exchange_.rounds.other(n);
      std::memcpy(exchange_.outputs.data[static_cast<std::size_t>(peer)],
                  tiny_.of(peer, place(peer, own)), bytes_);
    }
  }

 private:
  std::size_t place(int from, int to) const { return 1 + tiny_.offset(from, to, bytes_); }

  const Exchange& exchange_;
  Tiny tiny_;
  std::size_t count_;
  std::size_t bytes_;
};

}  // namespace

Status all_to_all(Team& team, Staging& staging, const Pieces<const std::byte>& inputs,
                  const Pieces<std::byte>& outputs, Dtype dtype, Deadline deadline) {
  const auto ranks = static_cast<std::size_t>(team.size());
  // Every half begins with the counts and, after them, the places.
  const std::size_t places = Plan::header_bytes(ranks);
  const Shares shares(team, staging, places + Direct::header_bytes(ranks));
  Status status = shares.check();
  if (!status.ok()) return status;
  const std::size_t element = size_of(dtype);
  const std::size_t most = std::min(round_bytes(staging), shares.bytes()) / element * element;
  Rounds rounds(team, staging, deadline);
  const Exchange exchange{team, staging, rounds, shares, inputs, outputs, element, most};
  const std::size_t largest = *std::ranges::max_element(inputs.counts);
  // What the others have is not known yet: the way is that of the last call, if that was alike.
  const Trial::Part last{Trial::Op::all_to_all, staging.trial().last_largest()};
  Direct direct(team, staging, rounds, ranks, largest * element,
                last.bytes > 0 ? std::optional(last) : std::nullopt);

  const auto stage = [&] {
    std::memcpy(staging.mine(), inputs.counts.data(), inputs.counts.size_bytes());
    std::memcpy(staging.mine() + inputs.counts.size_bytes(), outputs.counts.data(),
                outputs.counts.size_bytes());
    std::byte* const at = staging.mine() + places;
    if (!exchange.is_large(largest)) {
      direct.put(at, {}, 0, false);
      exchange.stage(0, true);
    } else if (direct.put(at, places_of(exchange).all(), 1, direct.is_worthwhile())) {
      direct.timed(at, [&] { exchange.stage(0, true); });
    } else {
      exchange.stage(0, false);
    }
  };
  const std::uint64_t what = pack_call(Op::all_to_all, dtype, Reduce::sum, 0);
  TinyPieces tiny(exchange);
  status =
      tiny.fit() ? rounds.first([] {}, [&] { tiny.announce(what); }) : rounds.first(what, 0, stage);
  if (!status.ok()) return status;
  const TinyPieces::Sent sent = tiny.sent();
  if (sent == TinyPieces::by_all) {
    tiny.collect();
    return status;
  }
  if (sent == TinyPieces::by_some) {
    status = rounds.next(stage);
    if (status.ok()) status = rounds.wait_for_all();
    if (!status.ok()) return status;
  }
  const Plan plan(team, staging);
  if (!plan.agrees()) return plan.disagreement();

  const Trial::Part present{Trial::Op::all_to_all, plan.largest() * element};
  if (present.kind() != last.kind()) direct.leave_trial();
  staging.trial().remember_largest(present.bytes);
  Way way = Way::staged;
  if (exchange.is_large(plan.largest())) way = direct.agreed_way(places);
  if (way == Way::direct) return exchange.read_all(direct, places);
  for (std::size_t i = 0; i < exchange.cut_of(plan.largest()).rounds(); ++i) {
    if (i > 0 || way == Way::restage) {
      status = rounds.next([&] { exchange.stage(i, true); });
      if (!status.ok()) return status;
    }
    exchange.keep_own(i);
    status = exchange.collect(i);
    if (!status.ok()) return status;
  }
  return Status::success();
}

}  // namespace gradsync
