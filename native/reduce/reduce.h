// Reducing several ranks' data into one result.
#pragma once

#include <cstddef>
#include <span>

#include "common/status.h"
#include "reduce/types.h"

namespace gradsync {

// Combines sources[0], sources[1], ... element by element, always in that order, so the same inputs
// give the same bits; half types are added in float and rounded once. Writes the result to every
// destination; a destination may be one of the sources. `whole` is how many bytes of a source the
// caller works on in all, of which this may be a part: what is large does not lie in a cache.
using ReduceKernel = void (*)(std::span<const std::byte* const> sources,
                              std::span<std::byte* const> destinations, std::size_t count,
                              std::size_t whole);

// The kernel for a type and an operation, or `invalid` with the reason when the two do not go
// together (bitwise operations on floats, order on complex numbers, averages of integers).
Status find_kernel(Dtype dtype, Reduce reduce, ReduceKernel& out);

// The sum of weights[i] * sources[i], for float and complex types; null for others.
using WeightedKernel = void (*)(std::span<const std::byte* const> sources,
                                std::span<const double> weights,
                                std::span<std::byte* const> destinations, std::size_t count,
                                std::size_t whole);
WeightedKernel find_weighted_kernel(Dtype dtype);

}  // namespace gradsync
