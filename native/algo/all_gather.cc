// All-gather of private tensors of one size: everybody stages a chunk, everybody copies out those
// of the others.
//   steps: 1 per chunk of round_bytes()   bytes moved per rank: n in, ranks * n out (its own piece
//   past the staging)
// Large, where memory is open: everybody reads the others' pieces from where they are.
//   steps: 2   bytes moved per rank: ranks * n
//
// Where the pieces go is a list of addresses, so that a list of tensors and the parts of one large
// tensor are the same thing. The own piece may be the input itself.
//
// Pieces that differ in size have a bit of their own in the announcement and a table of the sizes
// at the beginning of what is staged: a function of its own, so that the usual case stays as short
// as it is.
#include <algorithm>
#include <numeric>

#include "algo/algorithm.h"
#include "algo/counts.h"
#include "algo/direct.h"
#include "algo/rounds.h"

namespace gradsync {
namespace {

Status read_all(Team& team, Rounds& rounds, Direct& direct, const std::byte* input,
                std::size_t bytes, std::span<std::byte* const> outputs) {
  copy_bytes(outputs[static_cast<std::size_t>(team.rank())], input, bytes);
  for (int n = 1; n < team.size(); ++n) {
    const int peer = rounds.other(n);
    const Status status =
        direct.read(peer, direct.place(peer, 0), outputs[static_cast<std::size_t>(peer)], bytes);
    if (!status.ok()) return status;
  }
  direct.done();
  return direct.wait_for_all();
}

}  // namespace

Status all_gather(Team& team, Staging& staging, const std::byte* input, std::size_t count,
                  Dtype dtype, std::span<std::byte* const> outputs, Deadline deadline) {
  const Cut cut{count * size_of(dtype), round_bytes(staging)};
  const std::uint64_t what = pack_call(Op::all_gather, dtype, Reduce::sum, 0);
  Rounds rounds(team, staging, deadline);
  if (Direct::worthwhile(team, cut.total)) {
    Direct direct(team, staging, rounds);
    bool possible = false;
    const Status status = direct.offer(what, count, {&input, 1}, cut.total, possible);
    if (!status.ok()) return status;
    if (possible) return read_all(team, rounds, direct, input, cut.total, outputs);
  }
  for (std::size_t i = 0; i < cut.rounds(); ++i) {
    const std::size_t offset = cut.offset(i);
    const std::size_t length = cut.length(i);
    Status status = rounds.turn();
    if (!status.ok()) return status;
    if (team.size() > 1) copy_bytes(staging.mine(), input + offset, length);
    if (i == 0) {
      status = rounds.announce(what, count);
      if (!status.ok()) return status;
    } else {
      rounds.publish();
    }
    // While the others are still staging; the input's chunk is in the cache.
    copy_bytes(outputs[static_cast<std::size_t>(team.rank())] + offset, input + offset, length);
    for (int n = 1; n < team.size(); ++n) {
      const int peer = rounds.other(n);
      status = rounds.wait_for(peer);
      if (!status.ok()) return status;
      copy_bytes(outputs[static_cast<std::size_t>(peer)] + offset, staging.of(peer), length);
    }
  }
  return Status::success();
}

Status all_gather_uneven(Team& team, Staging& staging, const std::byte* input,
                         const Pieces<std::byte>& outputs, Dtype dtype, Deadline deadline) {
  const std::span<const std::size_t> counts = outputs.counts;
  const std::size_t element = size_of(dtype);
  const std::size_t table = round_up(counts.size_bytes(), cache_line);
  if (table + cache_line > staging.capacity()) {
    return Status::error(Code::invalid, "the group has too many ranks for its staging space");
  }
  const std::size_t most =
      std::min(round_bytes(staging), staging.capacity() - table) / element * element;
  const auto cut_of = [&](int rank) {
    return Cut{counts[static_cast<std::size_t>(rank)] * element, most};
  };
  const Cut largest{*std::max_element(counts.begin(), counts.end()) * element, most};
  const Cut own = cut_of(team.rank());
  const std::size_t total = std::accumulate(counts.begin(), counts.end(), std::size_t{0});
  const std::uint64_t what = pack_call(Op::all_gather, dtype, Reduce::sum, 0) | uneven_bit;

  Rounds rounds(team, staging, deadline);
  for (std::size_t i = 0; i < largest.rounds(); ++i) {
    Status status = rounds.turn();
    if (!status.ok()) return status;
    if (i == 0) std::memcpy(staging.mine(), counts.data(), counts.size_bytes());
    copy_bytes(staging.mine() + table, input + own.offset(i), own.length(i));
    if (i == 0) {
      status = rounds.announce(what, total);
      if (status.ok()) status = compare_counts(team, staging, counts);
      if (!status.ok()) return status;
    } else {
      rounds.publish();
    }
    copy_bytes(outputs.data[static_cast<std::size_t>(team.rank())] + own.offset(i),
               input + own.offset(i), own.length(i));
    for (int n = 1; n < team.size(); ++n) {
      const int peer = rounds.other(n);
      const Cut theirs = cut_of(peer);
      status = rounds.wait_for(peer);
      if (!status.ok()) return status;
      copy_bytes(outputs.data[static_cast<std::size_t>(peer)] + theirs.offset(i),
                 staging.of(peer) + table, theirs.length(i));
    }
  }
  return Status::success();
}

}  // namespace gradsync
