// Scatter from one rank: the root stages a share of its half for each other rank, round by round.
//   steps: 1 per round of half / other ranks, at most round_bytes()
//   bytes moved: ranks * n in by the root (its own piece past the staging), n out by each other
// Large, where memory is open or shared: the others read their pieces from where the root has them.
//   steps: 2   bytes moved per rank: n
// Up to 8 bytes for all others together travel with the announcement (tiny.h).
#include "algo/algorithm.h"
#include "algo/direct.h"
#include "algo/rounds.h"
#include "algo/tiny.h"

namespace gradsync {
namespace {

Status read_from_root(Team& team, Direct& direct, std::span<const std::byte* const> inputs,
                      std::byte* output, std::size_t bytes, int root) {
  const auto own = static_cast<std::size_t>(team.rank());
  if (team.rank() == root) {
    copy_out(output, inputs[own], bytes, bytes);
    return direct.done_by_all();
  }
  const Status status = direct.read(root, direct.place(root, own), output, bytes);
  return status.ok() ? direct.done() : status;
}

Status scatter_tiny(Team& team, std::uint64_t what, std::span<const std::byte* const> inputs,
                    std::byte* output, std::size_t count, std::size_t bytes, int root,
                    Deadline deadline) {
  Tiny tiny(team);
  const bool sends = team.rank() == root;
  for (int peer = 0; sends && peer < team.size(); ++peer) {
    if (peer == root) continue;
    std::memcpy(tiny.mine(tiny.offset(root, peer, bytes)), inputs[static_cast<std::size_t>(peer)],
                bytes);
  }
  const Status status = tiny.exchange(what, count, deadline);
  if (!status.ok()) return status;
  const std::byte* const piece = sends ? inputs[static_cast<std::size_t>(root)]
                                       : tiny.of(root, tiny.offset(root, team.rank(), bytes));
  copy_bytes(output, piece, bytes);
  return status;
}

}  // namespace

Status scatter(Team& team, Staging& staging, std::span<const std::byte* const> inputs,
               std::byte* output, std::size_t count, Dtype dtype, int root, Deadline deadline) {
  const std::size_t bytes = count * size_of(dtype);
  const std::uint64_t what =
      pack_call(Op::scatter, dtype, Reduce::sum, static_cast<std::uint32_t>(root));
  if (Tiny::fits(bytes * static_cast<std::size_t>(team.size() - 1))) {
    return scatter_tiny(team, what, inputs, output, count, bytes, root, deadline);
  }
  Rounds rounds(team, staging, deadline);
  Direct direct(team, staging, rounds, static_cast<std::size_t>(team.size()), bytes,
                Trial::Part{Trial::Op::scatter, bytes, team.rank() != root});
  const Shares shares(team, staging, direct.header());
  Status status = shares.check();
  if (!status.ok()) return status;
  const Cut cut{bytes, std::min(round_bytes(staging), shares.bytes())};
  const bool sends = team.rank() == root;
  const auto stage = [&](std::size_t round) {
    for (int n = 1; sends && n < team.size(); ++n) {
      const int peer = rounds.other(n);
      stage_part(staging.mine() + shares.to(peer), inputs[static_cast<std::size_t>(peer)], cut,
                 round);
    }
  };
  Way way{};
  status = direct.begin(what, count, inputs, true, [&] { stage(0); }, way);
  if (!status.ok()) return status;
  if (way == Way::direct) return read_from_root(team, direct, inputs, output, bytes, root);
  for (std::size_t i = 0; i < cut.rounds(); ++i) {
    if (i > 0) {
      status = rounds.next([&] { stage(i); });
      if (status.ok() && !sends) status = rounds.wait_for(root);
      if (!status.ok()) return status;
    }
    copy_out(output + cut.offset(i),
             sends ? inputs[static_cast<std::size_t>(root)] + cut.offset(i)
                   : staging.of(root) + shares.from(root),
             cut.length(i), bytes);
  }
  return Status::success();
}

}  // namespace gradsync
