// Going through what is too large to stay in a core's own caches.
//
// A core that reads such memory waits for it, and on some machines the more places it waits for at
// a time the better: the processor's own prefetching follows several streams, each up to the end of
// its page. So a range may be cut in a few streams that take turns by grains. And what is written
// past the caches need not be fetched first. Whether either helps is a matter of the machine, and
// measured where the code runs (far_ways.h). One core, copying out 64 MiB: 10 GB/s past the caches
// in four streams and 5.4 GB/s by memcpy on a virtual machine with slow memory; 52 and 57 GB/s on
// one of AMD's fifth generation, where 16 MiB take 0.33 ms and 0.14 ms.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>

namespace gradsync {

inline constexpr std::size_t grain_bytes = 512;

// Calls visit(start, length) for all from `begin` to `end`, `grain` at a time.
template <typename Visit>
[[gnu::always_inline]] inline void in_streams(std::size_t begin, std::size_t end, std::size_t grain,
                                              const Visit& visit) {
  constexpr std::size_t streams = 4;
  const std::size_t share = (end - begin) / streams / grain * grain;
  for (std::size_t at = begin; at < begin + share; at += grain) {
    for (std::size_t stream = 0; stream < streams; ++stream) visit(at + stream * share, grain);
  }
  for (std::size_t start = begin + streams * share; start < end; start += grain) {
    visit(start, std::min(grain, end - start));
  }
}

// Like memcpy, to memory that is not read again soon.
void far_copy(std::byte* to, const std::byte* from, std::size_t bytes);

// Like memcpy, from memory that was not read lately.
inline void copy_from_far(std::byte* to, const std::byte* from, std::size_t bytes) {
  in_streams(0, bytes, grain_bytes, [&](std::size_t start, std::size_t length) {
    std::memcpy(to + start, from + start, length);
  });
}

}  // namespace gradsync
