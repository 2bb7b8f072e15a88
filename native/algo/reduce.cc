// Reduce to one rank: the others stage chunk by chunk, the root reduces them with its own tensor.
//   steps: 1 per chunk of round_bytes()   bytes moved: n in by each other rank, ranks * n read and
//   n out by the root
//
// The others stage the next chunk while the root reduces the one before. (Sharing the reduction
// among all ranks, as all_reduce does, takes a second copy and a second step per chunk; whether it
// pays with many ranks that have a core each was not measured.)
#include "reduce/reduce.h"

#include <vector>

#include "algo/algorithm.h"
#include "algo/rounds.h"

namespace gradsync {

Status reduce(Team& team, Staging& staging, std::byte* data, std::size_t count, Dtype dtype,
              Reduce reduce, int root, Deadline deadline) {
  ReduceKernel kernel = nullptr;
  Status status = find_kernel(dtype, reduce, kernel);
  if (!status.ok()) return status;
  const std::size_t element = size_of(dtype);
  const Cut cut{count, round_bytes(staging) / element};
  const bool receives = team.rank() == root;
  Rounds rounds(team, staging, deadline);
  std::vector<const std::byte*> sources(static_cast<std::size_t>(team.size()));

  for (std::size_t i = 0; i < cut.rounds(); ++i) {
    std::byte* const chunk = data + cut.offset(i) * element;
    status = rounds.turn();
    if (!status.ok()) return status;
    if (!receives) copy_bytes(staging.mine(), chunk, cut.length(i) * element);
    if (i == 0) {
      status = rounds.announce(
          pack_call(Op::reduce, dtype, reduce, static_cast<std::uint32_t>(root)), count);
    } else {
      rounds.publish();
      if (receives) status = rounds.wait_for_all();
    }
    if (!status.ok()) return status;
    if (!receives || cut.length(i) == 0) continue;
    for (int peer = 0; peer < team.size(); ++peer) {
      sources[static_cast<std::size_t>(peer)] = peer == root ? chunk : staging.of(peer);
    }
    kernel(sources, {&chunk, 1}, cut.length(i));
  }
  return Status::success();
}

}  // namespace gradsync
