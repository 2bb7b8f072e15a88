// Reduce to one rank: the others stage chunk by chunk, the root reduces them with its own tensor.
//   steps: 1 per chunk of round_bytes()   bytes moved: n in by each other rank, ranks * n read and
//   n out by the root
// The others stage the next chunk while the root reduces the one before.
//
// Large, and every rank's tensor lies in the arena: every rank reduces a slice of the tensors where
// they are and writes the result into the root's.
//   steps: 2   bytes moved per rank: n read, n / ranks written
// Up to 8 bytes travel with the announcement (tiny.h).
#include "reduce/reduce.h"

#include "algo/algorithm.h"
#include "algo/direct.h"
#include "algo/rounds.h"
#include "algo/slice.h"
#include "algo/tiny.h"
#include "common/few.h"
#include "reduce/far_ways.h"

namespace gradsync {
namespace {

Status reduce_in_place(Team& team, Direct& direct, std::size_t count, std::size_t element,
                       ReduceKernel kernel, int root) {
  const Slice own = slice_of(count, team.rank(), team.size(), element);
  Few<const std::byte*> sources(static_cast<std::size_t>(team.size()));
  for (int peer = 0; peer < team.size(); ++peer) {
    sources[static_cast<std::size_t>(peer)] =
        direct.mapped(direct.place(peer, 0)) + own.begin * element;
  }
  std::byte* const result = direct.mapped(direct.place(root, 0)) + own.begin * element;
  if (own.count > 0) kernel(sources.all(), {&result, 1}, own.count, access_to(count * element));
  return direct.done_by_all();
}

Status reduce_tiny(Team& team, std::uint64_t what, std::byte* data, std::size_t count,
                   std::size_t bytes, ReduceKernel kernel, int root, Deadline deadline) {
  Tiny tiny(team);
  std::memcpy(tiny.mine(), data, bytes);
  const Status status = tiny.exchange(what, count, deadline);
  if (!status.ok() || team.rank() != root) return status;
  kernel(tiny.pieces().all(), {&data, 1}, count, {});
  return status;
}

}  // namespace

Status reduce(Team& team, Staging& staging, std::byte* data, std::size_t count, Dtype dtype,
              Reduce reduce, int root, Deadline deadline) {
  ReduceKernel kernel = nullptr;
  Status status = find_kernel(dtype, reduce, kernel);
  if (!status.ok()) return status;
  const std::size_t element = size_of(dtype);
  const bool receives = team.rank() == root;
  const std::byte* const place = data;
  const std::uint64_t what = pack_call(Op::reduce, dtype, reduce, static_cast<std::uint32_t>(root));
  if (Tiny::fits(count * element)) {
    return reduce_tiny(team, what, data, count, count * element, kernel, root, deadline);
  }
  Rounds rounds(team, staging, deadline);
  Direct direct(team, staging, rounds, 1, count * element);
  const Cut cut{count, round_bytes(staging, direct.header()) / element};
  const auto stage = [&](std::size_t round) {
    if (receives) return;
    copy_in(staging.mine() + direct.header(), data + cut.offset(round) * element,
            cut.length(round) * element, count * element);
  };
  Way way{};
  status = direct.begin(what, count, {&place, 1}, false, [&] { stage(0); }, way);
  if (!status.ok()) return status;
  if (way == Way::direct) return reduce_in_place(team, direct, count, element, kernel, root);

  Few<const std::byte*> sources(static_cast<std::size_t>(team.size()));
  for (std::size_t i = 0; i < cut.rounds(); ++i) {
    if (i > 0 || way == Way::restage) {
      status = rounds.next([&] { stage(i); });
      if (status.ok() && receives) status = rounds.wait_for_all();
      if (!status.ok()) return status;
    }
    if (!receives || cut.length(i) == 0) continue;
    std::byte* const chunk = data + cut.offset(i) * element;
    for (int peer = 0; peer < team.size(); ++peer) {
      sources[static_cast<std::size_t>(peer)] =
          peer == root ? chunk : staging.of(peer) + direct.header();
    }
    kernel(sources.all(), {&chunk, 1}, cut.length(i), access_to(count * element));
  }
  return Status::success();
}

}  // namespace gradsync
