// Broadcast of a private tensor: the root stages chunk by chunk, everybody copies out.
//   steps: 1 per chunk of round_bytes()   bytes moved: n in by the root, n out by each other rank
// Large, where memory is open and cores are few: the others read it from where the root has it.
// (With a core for each rank it is faster when the root brings it into the cache for them.)
//   steps: 2   bytes moved: n by each other rank
#include "algo/algorithm.h"
#include "algo/direct.h"
#include "algo/rounds.h"

namespace gradsync {
namespace {

Status read_from_root(Team& team, Direct& direct, std::byte* data, std::size_t bytes, int root) {
  if (team.rank() == root) {
    direct.done();
    return direct.wait_for_all();
  }
  const Status status = direct.read(root, direct.place(root, 0), data, bytes);
  if (!status.ok()) return status;
  direct.done();
  return Status::success();
}

}  // namespace

Status broadcast(Team& team, Staging& staging, std::byte* data, std::size_t count, Dtype dtype,
                 int root, Deadline deadline) {
  const Cut cut{count * size_of(dtype), round_bytes(staging)};
  const bool sends = team.rank() == root;
  const std::uint64_t what =
      pack_call(Op::broadcast, dtype, Reduce::sum, static_cast<std::uint32_t>(root));
  Rounds rounds(team, staging, deadline);
  Status status;
  if (team.is_crowded() && Direct::worthwhile(team, cut.total)) {
    Direct direct(team, staging, rounds);
    const std::byte* const place = data;
    bool possible = false;
    status = direct.offer(what, count, {&place, 1}, cut.total, possible);
    if (!status.ok()) return status;
    if (possible) return read_from_root(team, direct, data, cut.total, root);
  }
  for (std::size_t i = 0; i < cut.rounds(); ++i) {
    status = rounds.turn();
    if (!status.ok()) return status;
    if (sends && team.size() > 1) {
      copy_bytes(staging.mine(), data + cut.offset(i), cut.length(i));
    }
    if (i == 0) {
      status = rounds.announce(what, count);
    } else {
      rounds.publish();
      if (!sends) status = rounds.wait_for(root);
    }
    if (!status.ok()) return status;
    if (!sends) copy_bytes(data + cut.offset(i), staging.of(root), cut.length(i));
  }
  return Status::success();
}

}  // namespace gradsync
