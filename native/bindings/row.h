// Lists of tensors as calls get them, one for each rank.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <span>

#include "bindings/tensors.h"
#include "common/few.h"
#include "session/session.h"

namespace gradsync {

inline bool overlap(const std::byte* one, std::size_t count, const std::byte* other,
                    std::size_t other_count, Dtype dtype) {
  const std::size_t width = size_of(dtype);
  return one < other + other_count * width && other < one + count * width;
}

// A list of tensors of one type, one for each rank, kept alive.
template <typename Byte>
class Row {
 public:
  explicit Row(int ranks)
      : kept_(static_cast<std::size_t>(ranks)),
        addresses_(kept_.size(), nullptr),
        counts_(kept_.size(), 0) {}

  // `like`: the shape that all of them must have, or null.
  bool read(const TensorReader& reader, nanobind::handle list, Dtype dtype,
            const PlainTensor* like) {
    const auto ranks = static_cast<Py_ssize_t>(kept_.size());
    if (!PyList_CheckExact(list.ptr()) || PyList_GET_SIZE(list.ptr()) != ranks) return false;
    for (std::size_t i = 0; i < kept_.size(); ++i) {
      PlainTensor tensor;
      kept_[i] = nanobind::borrow(PyList_GET_ITEM(list.ptr(), static_cast<Py_ssize_t>(i)));
      if (!reader.read(kept_[i], tensor) || tensor.dtype != dtype) return false;
      if (like != nullptr && !tensor.is_like(*like)) return false;
      addresses_[i] = tensor.data;
      counts_[i] = tensor.count;
      bytes_ += tensor.bytes();
    }
    return true;
  }
  // Whether a tensor shares memory with one of these, which would be read and written in one call;
  // with the one of rank `own` it may.
  bool meets(const std::byte* data, std::size_t count, Dtype dtype, int own) const {
    for (std::size_t i = 0; i < kept_.size(); ++i) {
      if (static_cast<int>(i) == own && addresses_[i] == data) continue;
      if (overlap(data, count, addresses_[i], counts_[i], dtype)) return true;
    }
    return false;
  }
  std::span<Byte* const> addresses() const { return addresses_.all(); }
  std::span<const std::size_t> counts() const { return counts_.all(); }
  Pieces<Byte> pieces() const { return {addresses(), counts()}; }
  std::size_t bytes() const { return bytes_; }
  nanobind::handle tensor(int rank) const { return kept_[static_cast<std::size_t>(rank)]; }

 private:
  Few<nanobind::object> kept_;
  Few<Byte*> addresses_;
  Few<std::size_t> counts_;
  std::size_t bytes_ = 0;
};

}  // namespace gradsync
