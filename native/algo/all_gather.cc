// All-gather of private tensors of one size: everybody stages a chunk, everybody copies out those
// of the others.
//   steps: 1 per chunk of round_bytes()   bytes moved per rank: n in, ranks * n out (its own piece
//   past the staging)
// Large, where memory is open or shared: everybody reads the others' pieces from where they are.
//   steps: 2   bytes moved per rank: ranks * n
// Up to 8 bytes travel with the announcement (tiny.h).
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
#include "algo/tiny.h"

namespace gradsync {
Status all_gather(Team& team, Staging& staging, const std::byte* input, std::size_t count,
                  Dtype dtype, std::span<std::byte* const> outputs, Deadline deadline) {
  const std::size_t bytes = count * size_of(dtype);
  const std::size_t all = bytes * static_cast<std::size_t>(team.size());
  const std::uint64_t what = pack_call(Op::all_gather, dtype, Reduce::sum, 0);
  if (Tiny::fits(bytes)) {
    Tiny tiny(team);
    return tiny.gather(what, input, count, bytes, outputs, deadline);
  }
  Rounds rounds(team, staging, deadline);
  Direct direct(team, staging, rounds, 1, bytes, Trial::Part{Trial::Op::all_gather, bytes});
  const Cut cut{bytes, round_bytes(staging, direct.header())};
  const auto stage = [&](std::size_t round) {
    if (team.size() == 1) return;
    stage_part(staging.mine() + direct.header(), input, cut, round);
  };
  Way way{};
  Status status = direct.begin(what, count, {&input, 1}, true, [&] { stage(0); }, way);
  if (!status.ok()) return status;
  if (way == Way::direct) {
    status = direct.read_each(input, bytes, outputs);
    return status.ok() ? direct.done_by_all() : status;
  }
  for (std::size_t i = 0; i < cut.rounds(); ++i) {
    const std::size_t offset = cut.offset(i);
    const std::size_t length = cut.length(i);
    if (i > 0 || way == Way::restage) {
      status = rounds.next([&] { stage(i); });
      if (!status.ok()) return status;
    }
    // While the others are still staging; the input's chunk is in the cache.
    copy_out(outputs[static_cast<std::size_t>(team.rank())] + offset, input + offset, length, all);
    for (int n = 1; n < team.size(); ++n) {
      const int peer = rounds.other(n);
      status = rounds.wait_for(peer);
      if (!status.ok()) return status;
      copy_out(outputs[static_cast<std::size_t>(peer)] + offset, staging.of(peer) + direct.header(),
               length, all);
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
  const auto stage = [&](std::size_t round) {
    stage_part(staging.mine() + table, input, own, round);
  };
  Status status = rounds.first(what, total, [&] {
    std::memcpy(staging.mine(), counts.data(), counts.size_bytes());
    stage(0);
  });
  if (status.ok()) status = compare_counts(team, staging, counts);
  for (std::size_t i = 0; status.ok() && i < largest.rounds(); ++i) {
    if (i > 0) status = rounds.next([&] { stage(i); });
    if (!status.ok()) return status;
    copy_out(outputs.data[static_cast<std::size_t>(team.rank())] + own.offset(i),
             input + own.offset(i), own.length(i), total * element);
    for (int n = 1; n < team.size(); ++n) {
      const int peer = rounds.other(n);
      const Cut theirs = cut_of(peer);
      status = rounds.wait_for(peer);
      if (!status.ok()) return status;
      copy_out(outputs.data[static_cast<std::size_t>(peer)] + theirs.offset(i),
               staging.of(peer) + table, theirs.length(i), total * element);
    }
  }
  return status;
}

}  // namespace gradsync
