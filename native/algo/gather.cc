// Gather to one rank: the others stage chunk by chunk, the root copies out.
//   steps: 1 per chunk of round_bytes()   bytes moved: n in by each other rank, ranks * n out by
//   the root
// Large, where memory is shared, or open and that is faster (trial.h): the root reads the others'
// pieces from where they are.
//   steps: 2   bytes moved: ranks * n by the root
// Up to 8 bytes travel with the announcement (tiny.h).
#include "algo/algorithm.h"
#include "algo/direct.h"
#include "algo/rounds.h"
#include "algo/tiny.h"

namespace gradsync {
namespace {

Status read_direct(Team& team, Direct& direct, const std::byte* input, std::size_t bytes,
                   std::span<std::byte* const> outputs, int root) {
  Status status;
  if (team.rank() == root) status = direct.read_each(input, bytes, outputs);
  if (status.ok()) status = direct.done();
  // Nobody else's memory is free before the root has read it.
  return status.ok() && team.rank() != root ? direct.wait_for(root) : status;
}

}  // namespace

Status gather(Team& team, Staging& staging, const std::byte* input, std::size_t count, Dtype dtype,
              std::span<std::byte* const> outputs, int root, Deadline deadline) {
  const std::size_t bytes = count * size_of(dtype);
  const std::size_t all = bytes * static_cast<std::size_t>(team.size());
  const bool receives = team.rank() == root;
  const std::uint64_t what =
      pack_call(Op::gather, dtype, Reduce::sum, static_cast<std::uint32_t>(root));
  if (Tiny::fits(bytes)) {
    Tiny tiny(team);
    const auto into = receives ? outputs : std::span<std::byte* const>{};
    return tiny.gather(what, input, count, bytes, into, deadline);
  }
  Rounds rounds(team, staging, deadline);
  Direct direct(team, staging, rounds, 1, bytes, Trial::Part{Trial::Op::gather, bytes, receives});
  const Cut cut{bytes, round_bytes(staging, direct.header())};
  const auto stage = [&](std::size_t round) {
    if (receives) return;
    stage_part(staging.mine() + direct.header(), input, cut, round);
  };
  Way way{};
  Status status = direct.begin(
      what, count, {&input, receives ? std::size_t{0} : 1}, true, [&] { stage(0); }, way);
  if (!status.ok()) return status;
  if (way == Way::direct) return read_direct(team, direct, input, bytes, outputs, root);
  for (std::size_t i = 0; i < cut.rounds(); ++i) {
    if (i > 0 || way == Way::restage) {
      status = rounds.next([&] { stage(i); });
      if (!status.ok()) return status;
    }
    if (!receives) continue;
    const std::size_t offset = cut.offset(i);
    copy_out(outputs[static_cast<std::size_t>(root)] + offset, input + offset, cut.length(i), all);
    for (int n = 1; n < team.size(); ++n) {
      const int peer = rounds.other(n);
      status = rounds.wait_for(peer);
      if (!status.ok()) return status;
      copy_out(outputs[static_cast<std::size_t>(peer)] + offset, staging.of(peer) + direct.header(),
               cut.length(i), all);
    }
  }
  return Status::success();
}

}  // namespace gradsync
