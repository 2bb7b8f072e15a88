// Scatter from one rank: the root stages a share of its half for each other rank, round by round.
//   steps: 1 per round of half / other ranks, at most round_bytes()
//   bytes moved: ranks * n in by the root (its own piece past the staging), n out by each other
#include "algo/algorithm.h"
#include "algo/rounds.h"

namespace gradsync {

Status scatter(Team& team, Staging& staging, std::span<const std::byte* const> inputs,
               std::byte* output, std::size_t count, Dtype dtype, int root, Deadline deadline) {
  const Shares shares(team, staging);
  Status status = shares.check();
  if (!status.ok()) return status;
  const Cut cut{count * size_of(dtype), std::min(round_bytes(staging), shares.bytes())};
  const bool sends = team.rank() == root;
  Rounds rounds(team, staging, deadline);
  for (std::size_t i = 0; i < cut.rounds(); ++i) {
    const std::size_t offset = cut.offset(i);
    const std::size_t length = cut.length(i);
    status = rounds.turn();
    if (!status.ok()) return status;
    for (int n = 1; sends && n < team.size(); ++n) {
      const int peer = rounds.other(n);
      copy_bytes(staging.mine() + shares.to(peer), inputs[static_cast<std::size_t>(peer)] + offset,
                 length);
    }
    if (i == 0) {
      status = rounds.announce(
          pack_call(Op::scatter, dtype, Reduce::sum, static_cast<std::uint32_t>(root)), count);
    } else {
      rounds.publish();
      if (!sends) status = rounds.wait_for(root);
    }
    if (!status.ok()) return status;
    copy_bytes(output + offset,
               sends ? inputs[static_cast<std::size_t>(root)] + offset
                     : staging.of(root) + shares.from(root),
               length);
  }
  return Status::success();
}

}  // namespace gradsync
