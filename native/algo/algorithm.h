// The collectives, each in a file of its own that opens with its steps and its bytes moved.
#pragma once

#include <cstddef>
#include <cstdint>

#include "algo/staging.h"
#include "common/deadline.h"
#include "common/status.h"
#include "reduce/types.h"
#include "sync/team.h"

namespace gradsync {

// Mirrored by number in src/gradsync/backends/ops.py; append only.
enum class Op : std::uint8_t { barrier = 1, broadcast = 2, all_reduce = 3 };

// What must be the same on every rank, in one word.
constexpr std::uint64_t pack_call(Op op, Dtype dtype, Reduce reduce, std::uint32_t root) {
  return static_cast<std::uint64_t>(op) | static_cast<std::uint64_t>(dtype) << 8 |
         static_cast<std::uint64_t>(reduce) << 16 | static_cast<std::uint64_t>(root) << 32;
}

Status barrier(Team& team, Deadline deadline);

Status broadcast(Team& team, Staging& staging, std::byte* data, std::size_t count, Dtype dtype,
                 int root, Deadline deadline);

Status all_reduce(Team& team, Staging& staging, std::byte* data, std::size_t count, Dtype dtype,
                  Reduce reduce, Deadline deadline);

}  // namespace gradsync
