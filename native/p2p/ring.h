// The two ends of a ring. Each end belongs to one rank and is used under that rank's lock; the
// acquire/release pairs between them are all here.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "p2p/layout.h"
#include "sync/futex.h"

namespace gradsync {

inline void ring_doorbell(Doorbell& bell) {
  // seq_cst on both sides: either we see the sleeper's count, or the sleeper sees that it rang.
  bell.rings.fetch_add(1, std::memory_order_seq_cst);
  if (bell.sleepers.load(std::memory_order_seq_cst) != 0) futex_wake_all(bell.rings);
}

// The next place for a message after `bytes` of payload.
inline std::uint64_t padded(std::uint64_t bytes) { return round_up(bytes, sizeof(MessageHeader)); }

class RingWriter {
 public:
  RingWriter() = default;
  RingWriter(RingWords& words, std::byte* data, std::size_t capacity)
      : words_(&words), data_(data), capacity_(capacity) {}

  RingWords& words() const { return *words_; }
  std::uint64_t position() const { return head_; }

  // Whether so many bytes may be written. The receiver's word, which changes with every message,
  // is looked at only when the room that was there last time is used up.
  bool has_room(std::size_t bytes) {
    if (room() >= bytes) return true;
    tail_ = words_->tail.load(std::memory_order_acquire);
    return room() >= bytes;
  }
  // As above, but when there is less the receiver will ring when there is more.
  bool has_room_or_ask(std::size_t bytes) {
    if (has_room(bytes)) return true;
    // Dekker with RingReader::release(): one of the two sees the other's store.
    words_->wants_room.store(1, std::memory_order_seq_cst);
    tail_ = words_->tail.load(std::memory_order_seq_cst);
    return room() >= bytes;
  }
  bool read_up_to(std::uint64_t position) const {
    return words_->tail.load(std::memory_order_acquire) >= position;
  }

  // The caller has asked for room. Nothing is seen by the receiver before publish().
  void write(const void* from, std::size_t bytes) {
    const auto* bytes_from = static_cast<const std::byte*>(from);
    const std::size_t offset = head_ & (capacity_ - 1);
    const std::size_t first = std::min(bytes, capacity_ - offset);
    if (first > 0) std::memcpy(data_ + offset, bytes_from, first);
    if (bytes > first) std::memcpy(data_, bytes_from + first, bytes - first);
    head_ += bytes;
  }
  void skip_to(std::uint64_t position) { head_ = position; }
  void publish() { words_->head.store(head_, std::memory_order_release); }

 private:
  // A receiver that refused the present message is ahead of us.
  std::size_t room() const {
    const auto used = static_cast<std::int64_t>(head_ - tail_);
    return used >= static_cast<std::int64_t>(capacity_)
               ? 0
               : static_cast<std::size_t>(static_cast<std::int64_t>(capacity_) - used);
  }

  RingWords* words_ = nullptr;
  std::byte* data_ = nullptr;
  std::size_t capacity_ = 0;
  std::uint64_t head_ = 0;
  std::uint64_t tail_ = 0;  // as seen last
};

class RingReader {
 public:
  RingReader() = default;
  RingReader(RingWords& words, const std::byte* data, std::size_t capacity, Doorbell& sender)
      : words_(&words), data_(data), capacity_(capacity), sender_(&sender) {}

  RingWords& words() const { return *words_; }
  std::uint64_t position() const { return tail_; }

  std::size_t available() const {
    const auto bytes =
        static_cast<std::int64_t>(words_->head.load(std::memory_order_acquire) - tail_);
    return bytes > 0 ? static_cast<std::size_t>(bytes) : 0;
  }
  // Without the lock: whether something may have come.
  bool has_news() const {
    return words_->head.load(std::memory_order_acquire) !=
           words_->tail.load(std::memory_order_relaxed);
  }
  void read(void* to, std::size_t bytes) {
    auto* bytes_to = static_cast<std::byte*>(to);
    const std::size_t offset = tail_ & (capacity_ - 1);
    const std::size_t first = std::min(bytes, capacity_ - offset);
    if (first > 0) std::memcpy(bytes_to, data_ + offset, first);
    if (bytes > first) std::memcpy(bytes_to + first, data_, bytes - first);
    tail_ += bytes;
  }
  void skip_to(std::uint64_t position) { tail_ = position; }

  void wake_sender() { ring_doorbell(*sender_); }

  // Lets the sender write again where we have read. It is woken once half of the ring is free:
  // for less, two ranks on one core would only hand it to each other all the time.
  void release() {
    words_->tail.store(tail_, std::memory_order_seq_cst);
    if (words_->wants_room.load(std::memory_order_seq_cst) != 0 && available() <= capacity_ / 2) {
      words_->wants_room.store(0, std::memory_order_relaxed);
      ring_doorbell(*sender_);
    }
  }

 private:
  RingWords* words_ = nullptr;
  const std::byte* data_ = nullptr;
  std::size_t capacity_ = 0;
  std::uint64_t tail_ = 0;
  Doorbell* sender_ = nullptr;
};

}  // namespace gradsync
