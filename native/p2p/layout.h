// What messages need of a group's shared memory, after the staging space: one doorbell per rank,
// the words of one ring per ordered pair of ranks, and the rings themselves. Zeroed memory is a
// valid beginning. A ring's own pages are reserved by its sender when it first uses them, so a
// group that sends no messages pays for the words only.
#pragma once

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "sync/slots.h"

namespace gradsync {

// Rung whenever something happened that its rank may wait for.
struct alignas(cache_line) Doorbell {
  std::atomic<std::uint32_t> rings{0};     // counts; also the futex word
  std::atomic<std::uint32_t> sleepers{0};  // a ringer that sees none saves the system call
};

// A ring carries messages from one rank to another. Positions count bytes since the beginning, so
// what lies between tail and head is there to be read.
struct RingWords {
  // Written by the sender.
  alignas(cache_line) std::atomic<std::uint64_t> head{0};
  std::atomic<std::uint64_t> given_up{0};  // the message whose rest never comes; set before head
  std::atomic<std::uint64_t> acknowledged{0};  // the refusal that it has seen
  std::atomic<std::uint32_t> wants_room{0};    // it waits; the receiver clears this and rings
  // Written by the receiver.
  alignas(cache_line) std::atomic<std::uint64_t> tail{0};
  // Written by the receiver too, but seldom: the sender looks here before each message, and would
  // have to fetch a line that changes with each.
  alignas(cache_line) std::atomic<std::uint64_t> refused{0};  // the message that did not fit; set
                                                              // after the three below
  std::atomic<std::uint64_t> refused_tag{0};
  std::atomic<std::uint64_t> sent{0};      // what was sent and what was expected, as packed by
  std::atomic<std::uint64_t> expected{0};  // Extent::pack()
};

// What stands in a ring before the bytes of a message. Messages begin at multiples of its size, so
// it never wraps around.
struct MessageHeader {
  std::int64_t tag = 0;
  std::uint64_t extent = 0;    // Extent::pack()
  std::uint64_t bytes = 0;     // of the payload
  std::uint64_t sequence = 0;  // number of the message in its ring, from 1
};
static_assert(sizeof(MessageHeader) == 32);
static_assert(sizeof(RingWords) == 3 * cache_line);

// 64 KiB let sender and receiver work on different halves in the second-level cache. In large
// groups a rank's rings share 1 MiB, so that with the staging space it stays below 4 MB.
inline constexpr std::size_t ring_bytes(std::size_t ranks) {
  constexpr std::size_t most = 256 * 1024, all = 1024 * 1024;
  return std::bit_floor(std::clamp(all / ranks, page_bytes, most));
}

// Where things are, counted from the beginning of the messages' part, which is on a page of its
// own.
struct MailLayout {
  std::size_t ranks;

  std::size_t doorbell(std::size_t rank) const { return rank * sizeof(Doorbell); }
  std::size_t words(std::size_t from, std::size_t to) const {
    return ranks * sizeof(Doorbell) + (from * ranks + to) * sizeof(RingWords);
  }
  std::size_t reserved_bytes() const { return round_up(words(ranks, 0), page_bytes); }
  std::size_t ring(std::size_t from, std::size_t to) const {
    return reserved_bytes() + (from * ranks + to) * ring_bytes(ranks);
  }
  std::size_t total_bytes() const { return ring(ranks, 0); }
};

}  // namespace gradsync
