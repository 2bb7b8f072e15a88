// Bytes that arrive in pieces and leave in frames. Grows with what has really arrived.
#pragma once

#include <cstddef>
#include <cstring>
#include <memory>
#include <string_view>
#include <utility>

namespace gradsync::store {

class Buffer {
 public:
  std::string_view view() const { return {bytes_.get() + begin_, end_ - begin_}; }
  bool empty() const { return begin_ == end_; }

  // Free space behind the bytes, never none; call `arrived` with how much of it was filled.
  char* room() {
    if (end_ == capacity_) make_room();
    return bytes_.get() + end_;
  }
  std::size_t room_size() const { return capacity_ - end_; }
  void arrived(std::size_t count) { end_ += count; }

  void consume(std::size_t count) {
    begin_ += count;
    if (begin_ != end_) return;
    begin_ = end_ = 0;
    if (capacity_ > keep_bytes) clear();
  }
  void clear() {
    bytes_.reset();
    begin_ = end_ = capacity_ = 0;
  }

 private:
  static constexpr std::size_t first_bytes = 4096;
  static constexpr std::size_t keep_bytes = std::size_t{1} << 20;  // larger ones are given back

  void make_room() {
    const std::size_t used = end_ - begin_;
    // Moving less than half to the front is cheap enough per byte; otherwise double.
    if (begin_ > 0 && used <= capacity_ / 2) {
      std::memmove(bytes_.get(), bytes_.get() + begin_, used);
    } else {
      const std::size_t larger = capacity_ == 0 ? first_bytes : capacity_ * 2;
      std::unique_ptr<char[]> bytes(new char[larger]);
      if (used > 0) std::memcpy(bytes.get(), bytes_.get() + begin_, used);
      bytes_ = std::move(bytes);
      capacity_ = larger;
    }
    begin_ = 0;
    end_ = used;
  }

  std::unique_ptr<char[]> bytes_;
  std::size_t capacity_ = 0;
  std::size_t begin_ = 0;
  std::size_t end_ = 0;
};

}  // namespace gradsync::store
