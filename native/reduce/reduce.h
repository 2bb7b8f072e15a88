// Reducing several ranks' data into one result.
#pragma once

#include <cstddef>
#include <span>

#include "common/status.h"
#include "reduce/types.h"

namespace gradsync {

// How a reduction goes through its memory. The plain way is right for what lies in a cache;
// far_ways.h has it for the rest.
struct Access {
  bool in_streams = false;
  bool past_caches = false;  // writes a destination that is no source so
};

// Combines sources[0], sources[1], ... element by element, always in that order, so the same inputs
// give the same bits; half types are added in float and rounded once. Writes the result to every
// destination; a destination may be one of the sources. The bits do not depend on the access.
using ReduceKernel = void (*)(std::span<const std::byte* const> sources,
                              std::span<std::byte* const> destinations, std::size_t count,
                              Access access);

// The kernel for a type and an operation, or `invalid` with the reason when the two do not go
// together (bitwise operations on floats, order on complex numbers, averages of integers).
Status find_kernel(Dtype dtype, Reduce reduce, ReduceKernel& out);

// The sum of weights[i] * sources[i], for float and complex types; null for others.
using WeightedKernel = void (*)(std::span<const std::byte* const> sources,
                                std::span<const double> weights,
                                std::span<std::byte* const> destinations, std::size_t count,
                                Access access);
WeightedKernel find_weighted_kernel(Dtype dtype);

}  // namespace gradsync
