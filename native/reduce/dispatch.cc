// (dtype, reduce) -> kernel: the only place where a version for a certain instruction set may be
// chosen. Today the compiler's vectorisation of the portable loops serves every one.
#include <string>

#include "reduce/kernels.h"
#include "reduce/reduce.h"

namespace gradsync {
namespace {

using namespace kernels;

enum class Family : std::uint8_t { real, integer, boolean, complex };

template <typename T, Family family>
ReduceKernel kernel_for(Reduce operation) {
  constexpr bool is_float = family == Family::real || family == Family::complex;
  constexpr bool is_ordered = family != Family::complex;
  constexpr bool is_bits = family == Family::integer || family == Family::boolean;
  switch (operation) {
    case Reduce::sum:
      if constexpr (family == Family::boolean)
        return reduce<T, BitOr, false>;  // for booleans a sum is "any" and a product is "all"
      else
        return reduce<T, Sum, false>;
    case Reduce::premul_sum:
      if constexpr (family != Family::boolean) return reduce<T, Sum, false>;
      break;
    case Reduce::avg:
      if constexpr (is_float) return reduce<T, Sum, true>;
      break;
    case Reduce::product:
      if constexpr (is_ordered) return reduce<T, Product, false>;
      break;
    case Reduce::min:
      if constexpr (is_ordered) return reduce<T, Min, false>;
      break;
    case Reduce::max:
      if constexpr (is_ordered) return reduce<T, Max, false>;
      break;
    case Reduce::band:
      if constexpr (is_bits) return reduce<T, BitAnd, false>;
      break;
    case Reduce::bor:
      if constexpr (is_bits) return reduce<T, BitOr, false>;
      break;
    case Reduce::bxor:
      if constexpr (is_bits) return reduce<T, BitXor, false>;
      break;
  }
  return nullptr;
}

ReduceKernel lookup(Dtype dtype, Reduce operation) {
  switch (dtype) {
    case Dtype::f64: return kernel_for<double, Family::real>(operation);
    case Dtype::f32: return kernel_for<float, Family::real>(operation);
    case Dtype::f16: return kernel_for<Float16, Family::real>(operation);
    case Dtype::bf16: return kernel_for<Bfloat16, Family::real>(operation);
    case Dtype::i64: return kernel_for<std::int64_t, Family::integer>(operation);
    case Dtype::i32: return kernel_for<std::int32_t, Family::integer>(operation);
    case Dtype::i16: return kernel_for<std::int16_t, Family::integer>(operation);
    case Dtype::i8: return kernel_for<std::int8_t, Family::integer>(operation);
    case Dtype::u64: return kernel_for<std::uint64_t, Family::integer>(operation);
    case Dtype::u32: return kernel_for<std::uint32_t, Family::integer>(operation);
    case Dtype::u16: return kernel_for<std::uint16_t, Family::integer>(operation);
    case Dtype::u8: return kernel_for<std::uint8_t, Family::integer>(operation);
    case Dtype::boolean: return kernel_for<Boolean, Family::boolean>(operation);
    case Dtype::c128: return kernel_for<std::complex<double>, Family::complex>(operation);
    case Dtype::c64: return kernel_for<std::complex<float>, Family::complex>(operation);
    case Dtype::f8e4m3fn: return kernel_for<Float8E4M3fn, Family::real>(operation);
    case Dtype::f8e5m2: return kernel_for<Float8E5M2, Family::real>(operation);
    case Dtype::f8e4m3fnuz: return kernel_for<Float8E4M3fnuz, Family::real>(operation);
    case Dtype::f8e5m2fnuz: return kernel_for<Float8E5M2fnuz, Family::real>(operation);
  }
  return nullptr;
}

}  // namespace

Status find_kernel(Dtype dtype, Reduce reduce, ReduceKernel& out) {
  out = lookup(dtype, reduce);
  if (out != nullptr) return Status::success();
  return Status::error(Code::invalid, "this reduction is not defined for elements of this type");
}

WeightedKernel find_weighted_kernel(Dtype dtype) {
  switch (dtype) {
    case Dtype::f64: return weighted_sum<double>;
    case Dtype::f32: return weighted_sum<float>;
    case Dtype::f16: return weighted_sum<Float16>;
    case Dtype::bf16: return weighted_sum<Bfloat16>;
    case Dtype::c128: return weighted_sum<std::complex<double>>;
    case Dtype::c64: return weighted_sum<std::complex<float>>;
    default: return nullptr;
  }
}

}  // namespace gradsync
