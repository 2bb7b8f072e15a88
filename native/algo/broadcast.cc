// Broadcast: the root stages chunk by chunk, everybody copies out.
//   steps: 1 per chunk of chunk_bytes()   bytes moved: n in by the root, n out by each other rank
// Large, where memory is shared, or open, it takes several chunks and that is faster (trial.h): the
// others read it from where the root has it. (With one chunk the second step costs more than the
// copy. At 4 ranks on 2 cores, 64 and 128 KiB took 1.0 and 1.2 times as long as Open MPI's, staged
// 0.65 and 0.75.)
//   steps: 2   bytes moved: n by each other rank
// Up to 8 bytes travel with the announcement (tiny.h).
#include "algo/algorithm.h"
#include "algo/direct.h"
#include "algo/rounds.h"
#include "algo/tiny.h"

namespace gradsync {
namespace {

// Half of what other calls move in a round: here the others have nothing to do while the root
// stages its first chunk, nor the root while they copy the last. At 2 ranks 256 KiB took 24 us
// instead of 29, 1 MiB 74 instead of 81, 4 MiB 480 instead of 500, 25 MiB 3.7 ms instead of 3.6.
// With more ranks than cores the others wait for their turn anyhow.
std::size_t chunk_bytes(const Team& team, std::size_t most) {
  return team.is_crowded() ? most : std::min<std::size_t>(most, 128 * 1024);
}

Status read_from_root(Team& team, Direct& direct, std::byte* data, std::size_t bytes, int root) {
  if (team.rank() == root) {
    return direct.done_by_all();
  }
  const Status status = direct.read(root, direct.place(root, 0), data, bytes);
  return status.ok() ? direct.done() : status;
}

}  // namespace

Status broadcast(Team& team, Staging& staging, std::byte* data, std::size_t count, Dtype dtype,
                 int root, Deadline deadline) {
  const std::size_t bytes = count * size_of(dtype);
  const bool sends = team.rank() == root;
  const std::byte* const place = data;
  const std::uint64_t what =
      pack_call(Op::broadcast, dtype, Reduce::sum, static_cast<std::uint32_t>(root));
  if (Tiny::fits(bytes)) {
    Tiny tiny(team);
    if (sends) std::memcpy(tiny.mine(), data, bytes);
    const Status status = tiny.exchange(what, count, deadline);
    if (status.ok() && !sends) std::memcpy(data, tiny.of(root), bytes);
    return status;
  }
  Rounds rounds(team, staging, deadline);
  const std::size_t chunk = chunk_bytes(team, round_bytes(staging, Direct::header_bytes(1)));
  const bool is_long = bytes > chunk;
  const Trial::Part part{Trial::Op::broadcast, bytes, !sends};
  Direct direct(team, staging, rounds, 1, bytes, is_long ? std::optional(part) : std::nullopt);
  const Cut cut{bytes, chunk};
  const auto stage = [&](std::size_t round) {
    if (!sends || team.size() == 1) return;
    stage_part(staging.mine() + direct.header(), data, cut, round);
  };
  Way way{};
  Status status = direct.begin(
      what, count, {&place, sends ? std::size_t{1} : 0}, is_long, [&] { stage(0); }, way);
  if (!status.ok()) return status;
  if (way == Way::direct) return read_from_root(team, direct, data, bytes, root);
  for (std::size_t i = 0; i < cut.rounds(); ++i) {
    if (i > 0) {
      status = rounds.next([&] { stage(i); });
      if (status.ok() && !sends) status = rounds.wait_for(root);
      if (!status.ok()) return status;
    }
    if (!sends) {
      // Past the caches from twice as many bytes on as other calls' results: 4 MiB took 345 us, not
      // 485, while gather of 4 MiB took longer that way. Why they differ was not looked into.
      copy_out(data + cut.offset(i), staging.of(root) + direct.header(), cut.length(i), bytes / 2);
    }
  }
  return Status::success();
}

}  // namespace gradsync
