// All-to-all: each rank stages, for each other rank, a share of what it sends there, and copies out
// what the others staged for it.
//   steps: 1 per round of half / other ranks, at most round_bytes(), of the largest piece of all
//   bytes moved per rank: what it sends in, what it receives out (its own piece past the staging)
//
// Any two ranks may exchange any number of elements, none included. Every half begins with how many
// its rank sends to and expects from each; all ranks compare all of these before anything is
// written, so that a difference anywhere is a mismatch everywhere, and all know how many rounds
// there are.
#include <sstream>
#include <vector>

#include "algo/algorithm.h"
#include "algo/rounds.h"

namespace gradsync {
namespace {

// What all ranks said that they send to and expect from each other, in elements.
class Plan {
 public:
  Plan(const Team& team, const Staging& staging) : ranks_(static_cast<std::size_t>(team.size())) {
    words_.resize(2 * ranks_ * ranks_);
    for (std::size_t rank = 0; rank < ranks_; ++rank) {
      std::memcpy(words_.data() + 2 * ranks_ * rank, staging.of(static_cast<int>(rank)),
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

  Status check() const {
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
    if (verdict.ranks.empty()) return verdict;
    verdict.code = Code::mismatch;
    verdict.message = text.str();
    verdict.message.resize(verdict.message.size() - 2);
    return verdict;
  }

  std::size_t largest() const { return *std::max_element(words_.begin(), words_.end()); }

 private:
  std::size_t ranks_;
  std::vector<std::size_t> words_;
};

}  // namespace

Status all_to_all(Team& team, Staging& staging, const Pieces<const std::byte>& inputs,
                  const Pieces<std::byte>& outputs, Dtype dtype, Deadline deadline) {
  const auto ranks = static_cast<std::size_t>(team.size());
  const Shares shares(team, staging, Plan::header_bytes(ranks));
  Status status = shares.check();
  if (!status.ok()) return status;
  const std::size_t element = size_of(dtype);
  const std::size_t most = std::min(round_bytes(staging), shares.bytes()) / element * element;
  const auto cut_of = [&](std::size_t count) { return Cut{count * element, most}; };
  const auto own = static_cast<std::size_t>(team.rank());
  std::size_t last = 1;

  Rounds rounds(team, staging, deadline);
  for (std::size_t i = 0; i < last; ++i) {
    status = rounds.turn();
    if (!status.ok()) return status;
    for (int n = 1; n < team.size(); ++n) {
      const int peer = rounds.other(n);
      const auto to = static_cast<std::size_t>(peer);
      const Cut cut = cut_of(inputs.counts[to]);
      copy_bytes(staging.mine() + shares.to(peer), inputs.data[to] + cut.offset(i), cut.length(i));
    }
    if (i == 0) {
      std::memcpy(staging.mine(), inputs.counts.data(), inputs.counts.size_bytes());
      std::memcpy(staging.mine() + inputs.counts.size_bytes(), outputs.counts.data(),
                  outputs.counts.size_bytes());
      status = rounds.announce(pack_call(Op::all_to_all, dtype, Reduce::sum, 0), 0);
      if (!status.ok()) return status;
      const Plan plan(team, staging);
      status = plan.check();
      if (!status.ok()) return status;
      last = cut_of(plan.largest()).rounds();
    } else {
      rounds.publish();
    }
    const Cut kept = cut_of(inputs.counts[own]);
    copy_bytes(outputs.data[own] + kept.offset(i), inputs.data[own] + kept.offset(i),
               kept.length(i));
    for (int n = 1; n < team.size(); ++n) {
      const int peer = rounds.other(n);
      const auto from = static_cast<std::size_t>(peer);
      status = rounds.wait_for(peer);
      if (!status.ok()) return status;
      const Cut cut = cut_of(outputs.counts[from]);
      copy_bytes(outputs.data[from] + cut.offset(i), staging.of(peer) + shares.from(peer),
                 cut.length(i));
    }
  }
  return Status::success();
}

}  // namespace gradsync
