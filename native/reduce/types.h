// Element types and reductions. Mirrored by number in src/gradsync/base/dtypes.py; append only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>

namespace gradsync {

enum class Dtype : std::uint8_t {
  f64 = 0,
  f32,
  f16,
  bf16,
  i64,
  i32,
  i16,
  i8,
  u64,
  u32,
  u16,
  u8,
  boolean,
  c128,
  c64,
  f8e4m3fn,
  f8e5m2,
  f8e4m3fnuz,
  f8e5m2fnuz,
  c32,
  f8e8m0fnu,  // this one and the next are only carried: they have no sums
  f4e2m1fn_x2,
  last = f4e2m1fn_x2,
};

enum class Reduce : std::uint8_t {
  sum = 0,
  avg,
  product,
  min,
  max,
  band,
  bor,
  bxor,
  premul_sum,  // a sum of what the ranks have scaled already, each by a factor of its own
  last = premul_sum,
};

constexpr std::size_t size_of(Dtype dtype) {
  switch (dtype) {
    case Dtype::f64:
    case Dtype::i64:
    case Dtype::u64:
    case Dtype::c64: return 8;
    case Dtype::f32:
    case Dtype::i32:
    case Dtype::u32:
    case Dtype::c32: return 4;
    case Dtype::f16:
    case Dtype::bf16:
    case Dtype::i16:
    case Dtype::u16: return 2;
    case Dtype::i8:
    case Dtype::u8:
    case Dtype::boolean:
    case Dtype::f8e4m3fn:
    case Dtype::f8e5m2:
    case Dtype::f8e4m3fnuz:
    case Dtype::f8e5m2fnuz:
    case Dtype::f8e8m0fnu:
    case Dtype::f4e2m1fn_x2: return 1;
    case Dtype::c128: return 16;
  }
  return 0;
}

// The names that Python users know.
constexpr const char* name_of(Dtype dtype) {
  constexpr const char* names[] = {
      "float64",
      "float32",
      "float16",
      "bfloat16",
      "int64",
      "int32",
      "int16",
      "int8",
      "uint64",
      "uint32",
      "uint16",
      "uint8",
      "bool",
      "complex128",
      "complex64",
      "float8_e4m3fn",
      "float8_e5m2",
      "float8_e4m3fnuz",
      "float8_e5m2fnuz",
      "complex32",
      "float8_e8m0fnu",
      "float4_e2m1fn_x2",
  };
  static_assert(std::size(names) == static_cast<std::size_t>(Dtype::last) + 1);
  return dtype <= Dtype::last ? names[static_cast<std::size_t>(dtype)] : "unknown";
}

}  // namespace gradsync
