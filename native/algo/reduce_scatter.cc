// Reduce-scatter: each rank stages, for each other rank, a share of that rank's piece, and reduces
// what all the others staged for it together with its own.
//   steps: 1 per round of half / other ranks, at most round_bytes()
//   bytes moved per rank, with pieces of n: (ranks - 1) * n in, ranks * n read, n out
// Large, where memory is open or shared: each rank reads its piece from all the others and reduces
// it.
//   steps: 2   bytes moved per rank: ranks * n read, n out
// Equal pieces, up to 8 bytes for all others together, travel with the announcement (tiny.h).
//
// The own input piece may be the output itself. Sums are taken in rank order.
//
// Pieces may differ in size from rank to rank, as long as all ranks say the same. Equal ones are
// compared as the announced count; others have a bit of their own in the announcement and stand at
// the beginning of what is staged, so that all ranks see every difference.
#include <numeric>

#include "algo/algorithm.h"
#include "algo/counts.h"
#include "algo/direct.h"
#include "algo/pull.h"
#include "algo/rounds.h"
#include "algo/tiny.h"
#include "common/few.h"
#include "reduce/far_ways.h"
#include "reduce/reduce.h"

namespace gradsync {
namespace {

bool all_equal(std::span<const std::size_t> counts) {
  return std::all_of(counts.begin(), counts.end(), [&](auto count) { return count == counts[0]; });
}

Status pull_piece(Team& team, Staging& staging, Direct& direct, const std::byte* input,
                  std::size_t count, std::byte* output, std::size_t element, ReduceKernel kernel) {
  const auto own = static_cast<std::size_t>(team.rank());
  Pull pull(team, staging, direct, element);
  const Cut cut{count, pull.elements()};
  for (std::size_t i = 0; i < cut.rounds(); ++i) {
    const std::size_t offset = cut.offset(i) * element;
    const Status status = pull.read(own, offset, cut.length(i) * element, input + offset);
    if (!status.ok()) return status;
    std::byte* const result = output + offset;
    kernel(pull.sources(), {&result, 1}, cut.length(i), access_to(count * element));
  }
  return direct.done_by_all();
}

// One call: what goes where in each round.
struct Pass {
  Team& team;
  Staging& staging;
  const Shares& shares;
  std::span<const std::byte* const> inputs;
  std::span<const std::size_t> counts;
  std::size_t element;
  std::size_t most;  // elements of a piece in one round

  Cut cut_of(int rank) const { return {counts[static_cast<std::size_t>(rank)], most}; }

  std::size_t rounds() const {
    return Cut{*std::max_element(counts.begin(), counts.end()), most}.rounds();
  }

  const std::byte* input(int rank, std::size_t round) const {
    return inputs[static_cast<std::size_t>(rank)] + cut_of(rank).offset(round) * element;
  }

  void stage(std::size_t round) const {
    for (int peer = 0; peer < team.size(); ++peer) {
      if (peer == team.rank()) continue;
      const Cut cut = cut_of(peer);
      copy_in(staging.mine() + shares.to(peer), input(peer, round), cut.length(round) * element,
              cut.total * element);
    }
  }

  void combine(std::size_t round, std::byte* output, ReduceKernel kernel) const {
    const Cut own = cut_of(team.rank());
    if (own.length(round) == 0) return;
    Few<const std::byte*> sources(static_cast<std::size_t>(team.size()));
    for (int peer = 0; peer < team.size(); ++peer) {
      sources[static_cast<std::size_t>(peer)] =
          peer == team.rank() ? input(peer, round) : staging.of(peer) + shares.from(peer);
    }
    std::byte* const destination = output + own.offset(round) * element;
    kernel(sources.all(), {&destination, 1}, own.length(round), access_to(own.total * element));
  }
};

Status reduce_scatter_tiny(Team& team, std::uint64_t what, std::span<const std::byte* const> inputs,
                           std::size_t count, std::size_t bytes, std::byte* output,
                           ReduceKernel kernel, Deadline deadline) {
  Tiny tiny(team);
  const int own = team.rank();
  for (int peer = 0; peer < team.size(); ++peer) {
    if (peer == own) continue;
    std::memcpy(tiny.mine(tiny.offset(own, peer, bytes)), inputs[static_cast<std::size_t>(peer)],
                bytes);
  }
  const Status status = tiny.exchange(what, count, deadline);
  if (!status.ok()) return status;
  Few<const std::byte*> sources(inputs.size());
  for (int peer = 0; peer < team.size(); ++peer) {
    const auto place = static_cast<std::size_t>(peer);
    sources[place] = peer == own ? inputs[place] : tiny.of(peer, tiny.offset(peer, own, bytes));
  }
  kernel(sources.all(), {&output, 1}, count, {});
  return status;
}

}  // namespace

Status reduce_scatter(Team& team, Staging& staging, std::span<const std::byte* const> inputs,
                      std::span<const std::size_t> counts, std::byte* output, Dtype dtype,
                      Reduce reduce, Deadline deadline) {
  ReduceKernel kernel = nullptr;
  Status status = find_kernel(dtype, reduce, kernel);
  if (!status.ok()) return status;
  const bool even = all_equal(counts);
  const std::size_t element = size_of(dtype);
  // Uneven pieces are rare, and staged: every half begins with their sizes.
  const std::size_t bytes = even ? counts[0] * element : 0;
  const std::uint64_t what =
      pack_call(Op::reduce_scatter, dtype, reduce, 0) | (even ? 0 : uneven_bit);
  if (Tiny::fits(bytes * (counts.size() - 1))) {
    return reduce_scatter_tiny(team, what, inputs, counts[0], bytes, output, kernel, deadline);
  }
  Rounds rounds(team, staging, deadline);
  Direct direct(team, staging, rounds, counts.size(), bytes,
                Trial::Part{Trial::Op::reduce_scatter, bytes});
  const Shares shares(team, staging, even ? direct.header() : counts.size_bytes());
  status = shares.check();
  if (!status.ok()) return status;
  const std::size_t most = std::min(round_bytes(staging), shares.bytes()) / element;
  const Pass pass{team, staging, shares, inputs, counts, element, most};
  const std::size_t announced =
      even ? counts[0] : std::accumulate(counts.begin(), counts.end(), std::size_t{0});

  Way way{};
  status = direct.begin(
      what, announced, inputs, true,
      [&] {
        if (!even) std::memcpy(staging.mine(), counts.data(), counts.size_bytes());
        pass.stage(0);
      },
      way);
  if (status.ok() && !even) status = compare_counts(team, staging, counts);
  if (!status.ok()) return status;
  if (way == Way::direct) {
    const std::byte* const input = inputs[static_cast<std::size_t>(team.rank())];
    return pull_piece(team, staging, direct, input, counts[0], output, element, kernel);
  }
  for (std::size_t i = 0; i < pass.rounds(); ++i) {
    if (i > 0 || way == Way::restage) {
      status = rounds.next([&] { pass.stage(i); });
      if (status.ok()) status = rounds.wait_for_all();
      if (!status.ok()) return status;
    }
    pass.combine(i, output, kernel);
  }
  return Status::success();
}

}  // namespace gradsync
