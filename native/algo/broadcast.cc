// Broadcast of a private tensor: the root stages chunk by chunk, everybody copies out.
//   steps: 1 per chunk of round_bytes()   bytes moved: n in by the root, n out by each other rank
// Large, where memory is open: the others read most of it from where the root has it, and the root
// writes the rest to where they want it, so that no rank copies more than another.
//   steps: 2   bytes moved per rank: n - n / ranks
#include "algo/algorithm.h"
#include "algo/direct.h"
#include "algo/rounds.h"

namespace gradsync {
namespace {

// What the root leaves to the readers: whole pages.
std::size_t readers_part(std::size_t bytes, int ranks) {
  return bytes / static_cast<std::size_t>(ranks) * static_cast<std::size_t>(ranks - 1) /
         page_bytes * page_bytes;
}

Status share_copying(Team& team, Rounds& rounds, Direct& direct, std::byte* data, std::size_t bytes,
                     int root) {
  const std::size_t part = readers_part(bytes, team.size());
  if (team.rank() != root) {
    const Status status = direct.read(root, direct.place(root, 0), data, part);
    if (!status.ok()) return status;
    direct.done();
    return direct.wait_for(root);
  }
  for (int n = 1; n < team.size(); ++n) {
    const int peer = rounds.other(n);
    const Status status =
        direct.write(peer, direct.place(peer, 0) + part, data + part, bytes - part);
    if (!status.ok()) return status;
  }
  direct.done();
  return direct.wait_for_all();
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
  if (Direct::worthwhile(team, cut.total)) {
    Direct direct(team, staging, rounds);
    const std::byte* const place = data;
    bool possible = false;
    status = direct.offer(what, count, {&place, 1}, cut.total, possible);
    if (!status.ok()) return status;
    if (possible) return share_copying(team, rounds, direct, data, cut.total, root);
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
