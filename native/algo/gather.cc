// Gather to one rank: the others stage chunk by chunk, the root copies out.
//   steps: 1 per chunk of round_bytes()   bytes moved: n in by each other rank, ranks * n out by
//   the root
// Large, where memory is open or shared: the root reads the others' pieces from where they are.
// (Very large ones with a core for each rank only when shared: it is faster when the others help.)
//   steps: 2   bytes moved: ranks * n by the root
// Up to 8 bytes travel with the announcement (tiny.h).
#include "algo/algorithm.h"
#include "algo/direct.h"
#include "algo/rounds.h"
#include "algo/tiny.h"

namespace gradsync {
namespace {

// Up to here one rank alone reads private memory as fast as the others stage and it copies out. At
// 2 ranks on 2 cores, in times of the faster MPI of the same run, pieces of 128 KiB: 0.9
// against 1.4; of 512 KiB: 1.0 either way; of 2 MiB: 1.4 against 0.9.
constexpr std::size_t alone_most_bytes = 512 * 1024;

Status read_all(Team& team, Rounds& rounds, Direct& direct, const std::byte* input,
                std::size_t bytes, std::span<std::byte* const> outputs, int root) {
  if (team.rank() != root) {
    const Status status = direct.done();
    return status.ok() ? direct.wait_for(root) : status;
  }
  copy_out(outputs[static_cast<std::size_t>(root)], input, bytes,
           bytes * static_cast<std::size_t>(team.size()));
  for (int n = 1; n < team.size(); ++n) {
    const int peer = rounds.other(n);
    const Status status =
        direct.read(peer, direct.place(peer, 0), outputs[static_cast<std::size_t>(peer)], bytes);
    if (!status.ok()) return status;
  }
  return direct.done();
}

Status gather_tiny(Team& team, std::uint64_t what, const std::byte* input, std::size_t count,
                   std::size_t bytes, std::span<std::byte* const> outputs, Deadline deadline) {
  Tiny tiny(team);
  std::memcpy(tiny.mine(), input, bytes);
  const Status status = tiny.exchange(what, count, deadline);
  if (!status.ok()) return status;
  // None but at the root.
  for (std::size_t rank = 0; rank < outputs.size(); ++rank) {
    std::memcpy(outputs[rank], tiny.of(static_cast<int>(rank)), bytes);
  }
  return status;
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
    return gather_tiny(team, what, input, count, bytes,
                       receives ? outputs : std::span<std::byte* const>{}, deadline);
  }
  Rounds rounds(team, staging, deadline);
  Direct direct(team, staging, rounds, 1, bytes);
  const Cut cut{bytes, round_bytes(staging, direct.header())};
  const auto stage = [&](std::size_t round) {
    if (receives) return;
    stage_part(staging.mine() + direct.header(), input, cut, round);
  };
  Way way{};
  Status status = direct.begin(
      what, count, {&input, receives ? std::size_t{0} : 1},
      Direct::worthwhile(team, bytes, alone_most_bytes), [&] { stage(0); }, way);
  if (!status.ok()) return status;
  if (way == Way::direct) return read_all(team, rounds, direct, input, bytes, outputs, root);
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
