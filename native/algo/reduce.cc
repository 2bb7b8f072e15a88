// Reduce to one rank: the others stage chunk by chunk, the root reduces them with its own tensor.
//   steps: 1 per chunk of round_bytes()   bytes moved: n in by each other rank, ranks * n read and
//   n out by the root
// Large, where memory is open: every rank owns a slice, which it reads from all the others, reduces
// and writes to where the root has it.
//   steps: 2   bytes moved per rank: n read, n / ranks written
//
// With staging the others stage the next chunk while the root reduces the one before.
#include "reduce/reduce.h"

#include <vector>

#include "algo/algorithm.h"
#include "algo/direct.h"
#include "algo/pull.h"
#include "algo/rounds.h"
#include "algo/slice.h"

namespace gradsync {
namespace {

Status reduce_slice(Team& team, Staging& staging, Direct& direct, std::byte* data,
                    std::size_t count, std::size_t element, ReduceKernel kernel, int root) {
  const Slice own = slice_of(count, team.rank(), team.size(), element);
  const std::size_t begin = own.begin * element;
  Pull pull(team, staging, direct, 1, element);
  const Cut cut{own.count, pull.elements()};
  const bool is_root = team.rank() == root;
  for (std::size_t i = 0; i < cut.rounds() && own.count > 0; ++i) {
    const std::size_t offset = begin + cut.offset(i) * element;
    const std::size_t length = cut.length(i);
    const Status status = pull.read(0, offset, length * element, data + offset);
    if (!status.ok()) return status;
    std::byte* const result = is_root ? data + offset : pull.scratch();
    kernel(pull.sources(), {&result, 1}, length);
    if (is_root) continue;
    const Status sent =
        direct.write(root, direct.place(root, 0) + offset, result, length * element);
    if (!sent.ok()) return sent;
  }
  direct.done();
  // Others read our tensor, and write to that of the root.
  return direct.wait_for_all();
}

}  // namespace

Status reduce(Team& team, Staging& staging, std::byte* data, std::size_t count, Dtype dtype,
              Reduce reduce, int root, Deadline deadline) {
  ReduceKernel kernel = nullptr;
  Status status = find_kernel(dtype, reduce, kernel);
  if (!status.ok()) return status;
  const std::size_t element = size_of(dtype);
  const Cut cut{count, round_bytes(staging) / element};
  const bool receives = team.rank() == root;
  const std::uint64_t what = pack_call(Op::reduce, dtype, reduce, static_cast<std::uint32_t>(root));
  Rounds rounds(team, staging, deadline);
  if (Direct::worthwhile(team, count * element)) {
    Direct direct(team, staging, rounds);
    const std::byte* const place = data;
    bool possible = false;
    status = direct.offer(what, count, {&place, 1}, count * element, possible);
    if (!status.ok()) return status;
    if (possible) return reduce_slice(team, staging, direct, data, count, element, kernel, root);
  }
  std::vector<const std::byte*> sources(static_cast<std::size_t>(team.size()));

  for (std::size_t i = 0; i < cut.rounds(); ++i) {
    std::byte* const chunk = data + cut.offset(i) * element;
    status = rounds.turn();
    if (!status.ok()) return status;
    if (!receives) copy_bytes(staging.mine(), chunk, cut.length(i) * element);
    if (i == 0) {
      status = rounds.announce(what, count);
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
