#include "bindings/tensors.h"

#include <algorithm>

namespace nb = nanobind;

namespace gradsync {
namespace {

constexpr std::uint32_t known_major_version = 1;
constexpr std::int32_t on_cpu = 1;

// Complex types are left out because a conjugated view looks like any other; 8-bit floats because
// they are not worth the lines.
bool find_dtype(const dlpack::Tensor& tensor, Dtype& out) {
  enum Kind : std::uint8_t { integer = 0, unsigned_integer = 1, real = 2, brain = 4, boolean = 6 };
  if (tensor.type_lanes != 1) return false;
  const auto choose = [&](Dtype at8, Dtype at16, Dtype at32, Dtype at64) {
    switch (tensor.type_bits) {
      case 8: out = at8; return true;
      case 16: out = at16; return true;
      case 32: out = at32; return true;
      case 64: out = at64; return true;
      default: return false;
    }
  };
  switch (tensor.type_code) {
    case real:
      return tensor.type_bits != 8 && choose(Dtype::f16, Dtype::f16, Dtype::f32, Dtype::f64);
    case integer: return choose(Dtype::i8, Dtype::i16, Dtype::i32, Dtype::i64);
    case unsigned_integer: return choose(Dtype::u8, Dtype::u16, Dtype::u32, Dtype::u64);
    case brain: out = Dtype::bf16; return tensor.type_bits == 16;
    case boolean: out = Dtype::boolean; return tensor.type_bits == 8;
    default: return false;
  }
}

// The number of elements, or 0 when they do not lie one after the other.
std::size_t contiguous_count(const dlpack::Tensor& tensor) {
  std::int64_t count = 1;
  for (std::int32_t i = tensor.dimensions - 1; i >= 0; --i) {
    if (tensor.strides != nullptr && tensor.shape[i] != 1 && tensor.strides[i] != count) return 0;
    count *= tensor.shape[i];
  }
  return static_cast<std::size_t>(count);
}

}  // namespace

bool PlainTensor::is_like(const PlainTensor& other) const {
  return dtype == other.dtype && std::ranges::equal(shape, other.shape);
}

TensorReader::TensorReader(nb::type_object type, const nb::capsule& table)
    : type_(std::move(type)), is_neg_(type_.attr("is_neg")) {
  const auto* const functions = static_cast<const dlpack::ExchangeTable*>(
      PyCapsule_GetPointer(table.ptr(), "dlpack_exchange_api"));
  if (functions == nullptr) throw nb::python_error();
  if (functions->major_version != known_major_version) return;
  // A method written in C, so its function can be called without a search for it, which takes
  // longer than the answer.
  if (Py_TYPE(is_neg_.ptr()) != &PyMethodDescr_Type) return;
  const PyMethodDef* const method =
      reinterpret_cast<const PyMethodDescrObject*>(is_neg_.ptr())->d_method;
  if (method->ml_flags != METH_NOARGS) return;
  answer_is_neg_ = method->ml_meth;
  describe_ = functions->describe;
}

// A view that is negated when it is read looks like any other, too.
bool TensorReader::is_negated(nb::handle object) const {
  PyObject* const answer = answer_is_neg_(object.ptr(), nullptr);
  if (answer == nullptr) PyErr_Clear();
  Py_XDECREF(answer);
  return answer != Py_False;
}

bool TensorReader::read(nb::handle object, PlainTensor& out) const {
  if (describe_ == nullptr || reinterpret_cast<PyObject*>(Py_TYPE(object.ptr())) != type_.ptr()) {
    return false;
  }
  dlpack::Tensor tensor;
  if (describe_(object.ptr(), &tensor) != 0) {
    PyErr_Clear();  // whoever reads it the ordinary way says what is wrong with it
    return false;
  }
  if (tensor.device_type != on_cpu || !find_dtype(tensor, out.dtype)) return false;
  if (tensor.data == nullptr) return false;  // its memory was freed, or never was
  out.count = contiguous_count(tensor);
  if (out.count == 0 || is_negated(object)) return false;
  out.data = static_cast<std::byte*>(tensor.data) + tensor.byte_offset;
  out.shape = {tensor.shape, static_cast<std::size_t>(tensor.dimensions)};
  return true;
}

}  // namespace gradsync
