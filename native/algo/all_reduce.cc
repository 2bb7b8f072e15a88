// All-reduce.
//
// Tiny (up to 8 bytes): they travel with the announcement (tiny.h).
// Small (fits one chunk and few bytes): everybody stages everything, everybody reduces everything.
//   steps: 1   bytes moved per rank: n in, ranks * n read
// Large, for each chunk: every rank owns a slice; it reduces that slice of everybody's chunk and
// leaves the result where it found its neighbour's part, from where the others copy it.
//   steps: 2 per chunk   bytes moved per rank: n in, n read for the reduction, n out
// Results in the owner's own space would take twice the lines, and each would have to come from
// another core before it is written: at 2 ranks 30 us instead of 20 us for 256 KiB, 5.3 ms instead
// of 4.3 ms for 25 MiB.
//
// Large, and every rank's tensor lies in the arena or was adopted by it: every rank reduces its
// slice of the tensors where they are and writes the result into all of them.
//   steps: 2   bytes moved per rank: n read, n written
//
// In all, the first step is the announcement, and nothing is written to the tensor before all
// ranks have agreed on the call. Sums are taken in rank order, on every path and for every size.
#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "algo/algorithm.h"
#include "algo/rounds.h"
#include "algo/slice.h"
#include "algo/tiny.h"
#include "common/few.h"
#include "reduce/far_ways.h"
#include "reduce/reduce.h"

namespace gradsync {
namespace {

// Below this a second synchronisation costs more than reducing everything on every rank. Measured
// at 2 ranks on 2 cores: even at 16 KiB, 4 us against 5 us; 64 KiB the other way round.
constexpr std::size_t small_bytes = 16 * 1024;

// What a rank stages for another at a time. At 2 ranks with 25 MiB chunks of 128 and 256 KiB took
// 4.3 ms, of 512 KiB 5.0 ms (no longer in a second-level cache), of 64 KiB 4.6 ms. With more ranks
// than cores a step costs a change of processes, and the whole space is used for each.
constexpr std::size_t slice_bytes = 64 * 1024;

std::size_t chunk_bytes(const Team& team, const Staging& staging) {
  if (team.is_crowded()) return staging.capacity();
  return std::min(staging.capacity(), slice_bytes * static_cast<std::size_t>(team.size()));
}

Status reduce_tiny(Team& team, std::uint64_t what, std::byte* data, std::size_t count,
                   std::size_t bytes, ReduceKernel kernel, Deadline deadline) {
  Tiny tiny(team);
  std::memcpy(tiny.mine(), data, bytes);
  const Status status = tiny.exchange(what, count, deadline);
  if (!status.ok()) return status;
  kernel(tiny.pieces().all(), {&data, 1}, count, {});
  return status;
}

Status reduce_small(Team& team, Staging& staging, std::byte* data, std::size_t count,
                    ReduceKernel kernel) {
  Few<const std::byte*> sources(static_cast<std::size_t>(team.size()));
  for (int peer = 0; peer < team.size(); ++peer) {
    sources[static_cast<std::size_t>(peer)] = staging.of(peer);
  }
  kernel(sources.all(), {&data, 1}, count, {});
  // Peers read our half until they announce their next call.
  staging.free_at(team.progress() + 1);
  return Status::success();
}

// One chunk, staged and agreed upon: reduce the own slice, then fetch the others'. Nobody but the
// owner of a slice reads what the others staged for it, so it may write there before it publishes.
Status reduce_chunk(Team& team, Staging& staging, std::byte* data, std::size_t count,
                    std::size_t whole, std::size_t element, ReduceKernel kernel,
                    Deadline deadline) {
  const Slice own = slice_of(count, team.rank(), team.size(), element);
  const auto result_of = [&](int rank) { return staging.of((rank + 1) % team.size()); };
  if (own.count > 0) {
    const std::size_t offset = own.begin * element;
    std::vector<const std::byte*> sources;
    for (int peer = 0; peer < team.size(); ++peer) {
      sources.push_back((peer == team.rank() ? data : staging.of(peer)) + offset);
    }
    const std::array<std::byte*, 2> destinations{data + offset, result_of(team.rank()) + offset};
    kernel(sources, destinations, own.count, access_to(whole));
  }
  team.publish(team.progress() + 1);
  for (int distance = 1; distance < team.size(); ++distance) {
    const int peer = (team.rank() + distance) % team.size();
    const Status status = team.wait_for(peer, team.progress(), deadline);
    if (!status.ok()) return status;
    const Slice theirs = slice_of(count, peer, team.size(), element);
    std::memcpy(data + theirs.begin * element, result_of(peer) + theirs.begin * element,
                theirs.count * element);
  }
  staging.free_at(team.progress() + 1);
  return Status::success();
}

// Stages what the others own; the own slice is read from the tensor itself.
void stage(Team& team, Staging& staging, const std::byte* data, std::size_t count,
           std::size_t whole, std::size_t element) {
  const Slice own = slice_of(count, team.rank(), team.size(), element);
  const std::size_t before = own.begin * element;
  const std::size_t after = (own.begin + own.count) * element;
  const auto copy = [&](std::size_t from, std::size_t to) {
    copy_in(staging.mine() + from, data + from, to - from, whole);
  };
  copy(0, before);
  copy(after, count * element);
}

// Every rank's tensor is in the arena, and all have agreed: nothing is staged.
Status reduce_in_place(Team& team, Staging& staging, std::size_t count, std::size_t element,
                       ReduceKernel kernel, Deadline deadline) {
  const Slice own = slice_of(count, team.rank(), team.size(), element);
  std::vector<const std::byte*> sources;
  std::vector<std::byte*> destinations;
  for (int peer = 0; peer < team.size(); ++peer) {
    destinations.push_back(staging.shared_by(peer) + own.begin * element);
    sources.push_back(destinations.back());
  }
  if (own.count > 0) kernel(sources, destinations, own.count, access_to(count * element));
  team.publish(team.progress() + 1);
  // Until then others write to our tensor.
  return team.wait_for_all(team.progress(), deadline);
}

}  // namespace

Status all_reduce(Team& team, Staging& staging, std::byte* data, std::size_t count, Dtype dtype,
                  Reduce reduce, Deadline deadline) {
  ReduceKernel kernel = nullptr;
  Status status = find_kernel(dtype, reduce, kernel);
  if (!status.ok()) return status;
  const std::size_t element = size_of(dtype);
  const std::uint64_t what = pack_call(Op::all_reduce, dtype, reduce, 0);
  if (Tiny::fits(count * element)) {
    return reduce_tiny(team, what, data, count, count * element, kernel, deadline);
  }
  const bool small = count * element <= std::min(small_bytes, staging.capacity());
  const std::size_t most = chunk_bytes(team, staging) / element;
  const std::uint64_t shared = small ? 0 : staging.place_of(data, count * element);
  const std::uint64_t adopted =
      small || shared != 0 ? 0 : staging.adopted_place_of(data, count * element);
  const std::uint64_t place = shared != 0 ? shared : adopted;
  if (adopted != 0) Adopted::copy_edges(staging.at(place), data, count * element);

  std::size_t done = 0;
  bool first = true;
  while (first || done < count) {
    const std::size_t length = std::min(most, count - done);
    std::byte* const chunk = data + done * element;
    status = staging.next(deadline);
    if (!status.ok()) return status;
    if (small && count > 0) {
      std::memcpy(staging.mine(), chunk, length * element);
    } else if (count > 0 && (place == 0 || !first)) {
      stage(team, staging, chunk, length, count * element, element);
    }
    if (first) {
      team.announce(what, count, place);
      status = team.agree(deadline);
      if (status.ok() && place != 0 && staging.all_shared()) {
        status = reduce_in_place(team, staging, count, element, kernel, deadline);
        if (adopted != 0) Adopted::copy_edges(data, staging.at(place), count * element);
        if (adopted != 0 && !status.ok()) staging.retire(data);
        return status;
      }
      if (status.ok() && !small && staging.any_shared()) {
        // Whoever hoped for the above has not staged anything yet.
        if (place != 0) stage(team, staging, chunk, length, count * element, element);
        team.publish(team.progress() + 1);
        status = team.wait_for_all(team.progress(), deadline);
      }
    } else {
      team.publish(team.progress() + 1);
      status = team.wait_for_all(team.progress(), deadline);
    }
    if (!status.ok()) return status;
    if (count == 0) return Status::success();
    status = small ? reduce_small(team, staging, chunk, length, kernel)
                   : reduce_chunk(team, staging, chunk, length, count * element, element, kernel,
                                  deadline);
    if (!status.ok()) return status;
    done += length;
    first = false;
  }
  return Status::success();
}

}  // namespace gradsync
