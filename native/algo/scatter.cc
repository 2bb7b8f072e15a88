// Scatter from one rank: the root stages a share of its half for each other rank, round by round.
//   steps: 1 per round of half / other ranks, at most round_bytes()
//   bytes moved: ranks * n in by the root (its own piece past the staging), n out by each other
// Large, where memory is open: the others read their pieces from where the root has them.
//   steps: 2   bytes moved per rank: n
#include "algo/algorithm.h"
#include "algo/direct.h"
#include "algo/rounds.h"

namespace gradsync {
namespace {

Status read_from_root(Team& team, Direct& direct, std::span<const std::byte* const> inputs,
                      std::byte* output, std::size_t bytes, int root) {
  const auto own = static_cast<std::size_t>(team.rank());
  if (team.rank() == root) {
    copy_bytes(output, inputs[own], bytes);
    direct.done();
    return direct.wait_for_all();
  }
  const Status status = direct.read(root, direct.place(root, own), output, bytes);
  if (!status.ok()) return status;
  direct.done();
  return Status::success();
}

}  // namespace

Status scatter(Team& team, Staging& staging, std::span<const std::byte* const> inputs,
               std::byte* output, std::size_t count, Dtype dtype, int root, Deadline deadline) {
  const Shares shares(team, staging);
  Status status = shares.check();
  if (!status.ok()) return status;
  const Cut cut{count * size_of(dtype), std::min(round_bytes(staging), shares.bytes())};
  const bool sends = team.rank() == root;
  const std::uint64_t what =
      pack_call(Op::scatter, dtype, Reduce::sum, static_cast<std::uint32_t>(root));
  Rounds rounds(team, staging, deadline);
  if (Direct::worthwhile(team, cut.total, cut.total)) {
    Direct direct(team, staging, rounds);
    bool possible = false;
    status = direct.offer(what, count, inputs, cut.total, possible);
    if (!status.ok()) return status;
    if (possible) return read_from_root(team, direct, inputs, output, cut.total, root);
  }
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
      status = rounds.announce(what, count);
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
