// What a tensor is made of, asked of the library that made it through DLPack's table of C
// functions. That takes a few dozen nanoseconds, where as many attributes take a microsecond, and
// knows no library by name.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <span>

#include "reduce/types.h"

namespace gradsync {

// DLPack 1.x, as far as it is needed.
namespace dlpack {

struct Tensor {
  void* data;
  std::int32_t device_type;
  std::int32_t device_id;
  std::int32_t dimensions;
  std::uint8_t type_code;
  std::uint8_t type_bits;
  std::uint16_t type_lanes;
  std::int64_t* shape;
  std::int64_t* strides;
  std::uint64_t byte_offset;
};

struct ExchangeTable {
  std::uint32_t major_version;
  std::uint32_t minor_version;
  void* previous;
  void* allocate;
  void* export_owned;
  void* import_owned;
  int (*describe)(void* object, Tensor* out);  // 0, or -1 and a Python exception; may be null
  void* current_stream;
};

}  // namespace dlpack

// The memory of a tensor that needs no preparation: dense, contiguous, on the CPU, not empty, of a
// type whose memory is its value.
struct PlainTensor {
  std::byte* data = nullptr;
  std::size_t count = 0;
  Dtype dtype = Dtype::u8;
  // Of the tensor: valid while it is not resized.
  std::span<const std::int64_t> shape;

  std::size_t bytes() const { return count * size_of(dtype); }
  bool is_like(const PlainTensor& other) const;
};

// Describes tensors of exactly one Python type.
class TensorReader {
 public:
  TensorReader() = default;
  // `table` is the type's `__dlpack_c_exchange_api__`. Of another major
  // version, or without the method `is_neg` that is written in C: reads nothing.
  TensorReader(nanobind::type_object type, const nanobind::capsule& table);

  // False when the object is anything but a plain tensor.
  bool read(nanobind::handle object, PlainTensor& out) const;

 private:
  bool is_negated(nanobind::handle object) const;

  nanobind::object type_;
  nanobind::object is_neg_;  // the type's method, and its function
  PyCFunction answer_is_neg_ = nullptr;
  int (*describe_)(void*, dlpack::Tensor*) = nullptr;
};

}  // namespace gradsync
