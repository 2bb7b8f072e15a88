// A list that lives as long as a call, mostly one entry for each rank: short ones are not worth a
// trip to the heap, which costs as much as a tenth of the smallest calls.
#pragma once

#include <array>
#include <cstddef>
#include <span>
#include <vector>

namespace gradsync {

template <typename T>
class Few {
 public:
  explicit Few(std::size_t size, const T& value = T{}) : size_(size) {
    if (size > few_.size()) {
      many_.assign(size, value);
    } else {
      for (std::size_t i = 0; i < size; ++i) few_[i] = value;
    }
  }

  std::size_t size() const { return size_; }
  T* begin() { return many_.empty() ? few_.data() : many_.data(); }
  T* end() { return begin() + size_; }
  const T* begin() const { return many_.empty() ? few_.data() : many_.data(); }
  const T* end() const { return begin() + size_; }
  T& operator[](std::size_t index) { return begin()[index]; }
  const T& operator[](std::size_t index) const { return begin()[index]; }
  std::span<const T> all() const { return {begin(), size_}; }

 private:
  std::size_t size_;
  std::array<T, 16> few_;
  std::vector<T> many_;
};

}  // namespace gradsync
