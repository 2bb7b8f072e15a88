// The collectives, each in a file of its own that opens with its steps and its bytes moved.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "algo/staging.h"
#include "common/deadline.h"
#include "common/status.h"
#include "reduce/types.h"
#include "sync/team.h"

namespace gradsync {

// Mirrored by number in src/gradsync/backends/ops.py; append only.
enum class Op : std::uint8_t {
  barrier = 1,
  broadcast = 2,
  all_reduce = 3,
  reduce = 4,
  all_gather = 5,
  gather = 6,
  scatter = 7,
  reduce_scatter = 8,
  all_to_all = 9,
  finish_buckets = 10,
};

// What must be the same on every rank, in one word.
constexpr std::uint64_t pack_call(Op op, Dtype dtype, Reduce reduce, std::uint32_t root) {
  return static_cast<std::uint64_t>(op) | static_cast<std::uint64_t>(dtype) << 8 |
         static_cast<std::uint64_t>(reduce) << 16 | static_cast<std::uint64_t>(root) << 32;
}

// Set in the word of an all_gather or a reduce_scatter whose pieces differ in size; the count is
// their sum then.
inline constexpr std::uint64_t uneven_bit = std::uint64_t{1} << 24;

// One piece of memory per rank, in elements.
template <typename Byte>
struct Pieces {
  std::span<Byte* const> data;
  std::span<const std::size_t> counts;
};

Status barrier(Team& team, Deadline deadline);

Status broadcast(Team& team, Staging& staging, std::byte* data, std::size_t count, Dtype dtype,
                 int root, Deadline deadline);

Status all_reduce(Team& team, Staging& staging, std::byte* data, std::size_t count, Dtype dtype,
                  Reduce reduce, Deadline deadline);

// The result goes to the root's `data`; the other ranks' are read only.
Status reduce(Team& team, Staging& staging, std::byte* data, std::size_t count, Dtype dtype,
              Reduce reduce, int root, Deadline deadline);

// `outputs`: one address per rank, each with room for `count` elements.
Status all_gather(Team& team, Staging& staging, const std::byte* input, std::size_t count,
                  Dtype dtype, std::span<std::byte* const> outputs, Deadline deadline);

// Rank r gives outputs.counts[r] elements, whatever that is; all ranks must say the same.
Status all_gather_uneven(Team& team, Staging& staging, const std::byte* input,
                         const Pieces<std::byte>& outputs, Dtype dtype, Deadline deadline);

// `outputs` is read on the root only.
Status gather(Team& team, Staging& staging, const std::byte* input, std::size_t count, Dtype dtype,
              std::span<std::byte* const> outputs, int root, Deadline deadline);

// `inputs` is read on the root only.
Status scatter(Team& team, Staging& staging, std::span<const std::byte* const> inputs,
               std::byte* output, std::size_t count, Dtype dtype, int root, Deadline deadline);

// Rank r gets the reduction of all ranks' inputs[r], which has counts[r] elements on every rank.
Status reduce_scatter(Team& team, Staging& staging, std::span<const std::byte* const> inputs,
                      std::span<const std::size_t> counts, std::byte* output, Dtype dtype,
                      Reduce reduce, Deadline deadline);

Status all_to_all(Team& team, Staging& staging, const Pieces<const std::byte>& inputs,
                  const Pieces<std::byte>& outputs, Dtype dtype, Deadline deadline);

}  // namespace gradsync
