// Gather to one rank: the others stage chunk by chunk, the root copies out.
//   steps: 1 per chunk of round_bytes()   bytes moved: n in by each other rank, ranks * n out by
//   the root
// Large, where memory is open and cores are few: the root reads the others' pieces from where they
// are. (With a core for each rank it is faster when they help by staging.)
//   steps: 2   bytes moved: ranks * n by the root
#include "algo/algorithm.h"
#include "algo/direct.h"
#include "algo/rounds.h"

namespace gradsync {
namespace {

Status collect(Team& team, Staging& staging, Rounds& rounds, std::size_t offset, std::size_t length,
               std::span<std::byte* const> outputs) {
  for (int n = 1; n < team.size(); ++n) {
    const int peer = rounds.other(n);
    const Status status = rounds.wait_for(peer);
    if (!status.ok()) return status;
    copy_bytes(outputs[static_cast<std::size_t>(peer)] + offset, staging.of(peer), length);
  }
  return Status::success();
}

Status read_all(Team& team, Rounds& rounds, Direct& direct, const std::byte* input,
                std::size_t bytes, std::span<std::byte* const> outputs, int root) {
  if (team.rank() != root) {
    direct.done();
    return direct.wait_for(root);
  }
  copy_bytes(outputs[static_cast<std::size_t>(root)], input, bytes);
  for (int n = 1; n < team.size(); ++n) {
    const int peer = rounds.other(n);
    const Status status =
        direct.read(peer, direct.place(peer, 0), outputs[static_cast<std::size_t>(peer)], bytes);
    if (!status.ok()) return status;
  }
  direct.done();
  return Status::success();
}

}  // namespace

Status gather(Team& team, Staging& staging, const std::byte* input, std::size_t count, Dtype dtype,
              std::span<std::byte* const> outputs, int root, Deadline deadline) {
  const Cut cut{count * size_of(dtype), round_bytes(staging)};
  const bool receives = team.rank() == root;
  const std::uint64_t what =
      pack_call(Op::gather, dtype, Reduce::sum, static_cast<std::uint32_t>(root));
  Rounds rounds(team, staging, deadline);
  if (team.is_crowded() && Direct::worthwhile(team, cut.total)) {
    Direct direct(team, staging, rounds);
    bool possible = false;
    const Status status = direct.offer(what, count, {&input, 1}, cut.total, possible);
    if (!status.ok()) return status;
    if (possible) return read_all(team, rounds, direct, input, cut.total, outputs, root);
  }
  for (std::size_t i = 0; i < cut.rounds(); ++i) {
    const std::size_t offset = cut.offset(i);
    const std::size_t length = cut.length(i);
    Status status = rounds.turn();
    if (!status.ok()) return status;
    if (!receives) copy_bytes(staging.mine(), input + offset, length);
    if (i == 0) {
      status = rounds.announce(what, count);
      if (!status.ok()) return status;
    } else {
      rounds.publish();
    }
    if (!receives) continue;
    copy_bytes(outputs[static_cast<std::size_t>(root)] + offset, input + offset, length);
    status = collect(team, staging, rounds, offset, length, outputs);
    if (!status.ok()) return status;
  }
  return Status::success();
}

}  // namespace gradsync
