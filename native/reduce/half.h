// Types of half the usual width as storage: portable conversions, rounding to nearest even.
#pragma once

#include <bit>
#include <complex>
#include <cstdint>

namespace gradsync {

struct Bfloat16 {
  std::uint16_t bits;

  static Bfloat16 from(float value) {
    const auto word = std::bit_cast<std::uint32_t>(value);
    if ((word & 0x7fffffffU) > 0x7f800000U) {  // NaN: keep it one, rounding could make it infinity
      return {static_cast<std::uint16_t>((word >> 16) | 0x40U)};
    }
    const std::uint32_t nearest = 0x7fffU + ((word >> 16) & 1U);
    return {static_cast<std::uint16_t>((word + nearest) >> 16)};
  }
  float to_float() const { return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16); }
};

struct Float16 {
  std::uint16_t bits;

  static Float16 from(float value) {
    const auto word = std::bit_cast<std::uint32_t>(value);
    const std::uint32_t sign = (word >> 16) & 0x8000U;
    const std::uint32_t magnitude = word & 0x7fffffffU;
    if (magnitude > 0x7f800000U) return {static_cast<std::uint16_t>(sign | 0x7e00U)};  // NaN
    if (magnitude >= 0x477ff000U) {  // rounds to 65536 or beyond: infinity
      return {static_cast<std::uint16_t>(sign | 0x7c00U)};
    }
    if (magnitude < 0x38800000U) {
      // Subnormal or zero: adding 0.5 puts the result's 10 bits at the bottom of the float's
      // mantissa, rounded to nearest even by the addition itself.
      const float aligned = std::bit_cast<float>(magnitude) + 0.5F;
      return {
          static_cast<std::uint16_t>(sign | (std::bit_cast<std::uint32_t>(aligned) - 0x3f000000U))};
    }
    const std::uint32_t nearest = 0xfffU + ((magnitude >> 13) & 1U);
    return {static_cast<std::uint16_t>(sign | ((magnitude - 0x38000000U + nearest) >> 13))};
  }
  float to_float() const {
    const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000U) << 16;
    const std::uint32_t magnitude = bits & 0x7fffU;
    if (magnitude >= 0x7c00U) {  // infinity and NaN
      return std::bit_cast<float>(sign | 0x7f800000U | ((magnitude & 0x3ffU) << 13));
    }
    // Shifted into place the value is 2^112 too small; one exact multiplication sets that right and
    // normalises subnormals on the way.
    const float scaled = std::bit_cast<float>(magnitude << 13) * 0x1p112F;
    return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(scaled));
  }
};

struct Complex32 {
  Float16 real;
  Float16 imaginary;

  static Complex32 from(std::complex<float> value) {
    return {Float16::from(value.real()), Float16::from(value.imag())};
  }
  std::complex<float> to_complex() const { return {real.to_float(), imaginary.to_float()}; }
};

}  // namespace gradsync
