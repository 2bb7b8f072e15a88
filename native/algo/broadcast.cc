// Broadcast of a private tensor: the root stages chunk by chunk, everybody copies out.
//   steps: 1 + number of chunks   bytes moved: n in by the root, n out by each other rank
//
// The root is at most two chunks ahead of the slowest reader. Progress within the call, from
// `base`:
//   base                announced; the root has staged chunk 0
//   base + i            root: chunk i is staged        others: chunk i - 1 is copied out
//   base + chunks       all ranks, at the end
#include <algorithm>
#include <cstring>

#include "algo/algorithm.h"

namespace gradsync {
namespace {

struct Chunks {
  std::size_t bytes;
  std::size_t capacity;

  std::size_t count() const { return bytes == 0 ? 1 : (bytes + capacity - 1) / capacity; }
  std::size_t offset(std::size_t i) const { return i * capacity; }
  std::size_t length(std::size_t i) const { return std::min(capacity, bytes - offset(i)); }
};

Status send_chunks(Team& team, Staging& staging, const std::byte* data, const Chunks& chunks,
                   std::uint64_t base, Deadline deadline) {
  for (std::size_t i = 1; i < chunks.count(); ++i) {
    const Status status = staging.next(deadline);
    if (!status.ok()) return status;
    std::memcpy(staging.mine(), data + chunks.offset(i), chunks.length(i));
    const auto step = base + i;
    staging.free_at(step + 1);
    team.publish(step);
  }
  return Status::success();
}

Status receive_chunks(Team& team, Staging& staging, std::byte* data, const Chunks& chunks, int root,
                      std::uint64_t base, Deadline deadline) {
  for (std::size_t i = 0; i < chunks.count(); ++i) {
    const auto step = base + i;
    if (i > 0) {
      Status status = staging.next(deadline);
      if (status.ok()) status = team.wait_for(root, step, deadline);
      if (!status.ok()) return status;
      staging.free_at(step + 1);
    }
    std::memcpy(data + chunks.offset(i), staging.of(root), chunks.length(i));
    if (i + 1 < chunks.count()) team.publish(step + 1);
  }
  return Status::success();
}

}  // namespace

Status broadcast(Team& team, Staging& staging, std::byte* data, std::size_t count, Dtype dtype,
                 int root, Deadline deadline) {
  const Chunks chunks{count * size_of(dtype), staging.capacity()};
  Status status = staging.next(deadline);
  if (!status.ok()) return status;
  const std::uint64_t base = team.progress() + 1;
  staging.free_at(base + 1);
  if (team.rank() == root && chunks.bytes > 0) std::memcpy(staging.mine(), data, chunks.length(0));
  team.announce(pack_call(Op::broadcast, dtype, Reduce::sum, static_cast<std::uint32_t>(root)),
                count);
  status = team.agree(deadline);
  if (!status.ok()) return status;
  if (chunks.bytes > 0) {
    status = team.rank() == root
                 ? send_chunks(team, staging, data, chunks, base, deadline)
                 : receive_chunks(team, staging, data, chunks, root, base, deadline);
    if (!status.ok()) return status;
  }
  team.publish(base + chunks.count());
  return Status::success();
}

}  // namespace gradsync
