// The four 8-bit floats as storage. Rounding is to nearest even; what is too large, infinite or NaN
// becomes what torch makes of it (`tensor.to(torch.float8_*)`), as tests/ranks/test_float8.py
// checks.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

namespace gradsync {

// `Largest` is the code of the largest finite number, `Overflow` that of anything beyond it. The
// kinds without a sign of zero ("uz") have their only NaN where the others have minus zero.
template <int MantissaBits, int Bias, std::uint8_t Largest, std::uint8_t Overflow, bool SignedZero>
struct Float8 {
  std::uint8_t bits;

  static constexpr std::uint8_t nan = SignedZero ? 0x7f : 0x80;

  static Float8 from(float value) {
    const auto word = std::bit_cast<std::uint32_t>(value);
    const std::uint32_t sign = word >> 24 & 0x80U;
    const std::uint32_t magnitude = word & 0x7fffffffU;
    if (magnitude > 0x7f800000U) return {static_cast<std::uint8_t>(sign | nan)};
    std::uint32_t code = 0;
    if (magnitude < least_normal) {
      // Adding a number whose last bit is worth as much as a subnormal's rounds to that bit.
      const float aligned = std::bit_cast<float>(magnitude) + std::bit_cast<float>(aligner);
      code = std::bit_cast<std::uint32_t>(aligned) - aligner;
    } else {
      const std::uint32_t nearest = (1U << (dropped - 1)) - 1 + (magnitude >> dropped & 1U);
      code = (magnitude - (least_normal - (1U << 23)) + nearest) >> dropped;
    }
    if (code > Largest) code = Overflow;
    if (!SignedZero && code == 0) return {0};
    return {static_cast<std::uint8_t>(sign | code)};
  }

  float to_float() const { return values[bits]; }

 private:
  static constexpr unsigned dropped = 23 - MantissaBits;
  static constexpr std::uint32_t least_normal = static_cast<std::uint32_t>(128 - Bias) << 23;
  static constexpr std::uint32_t aligner =
      static_cast<std::uint32_t>(127 + 24 - Bias - MantissaBits) << 23;

  static constexpr float value_of(std::uint32_t bits) {
    const std::uint32_t magnitude = bits & 0x7fU;
    const std::uint32_t sign = (bits & 0x80U) << 24;
    const bool is_infinite = SignedZero && Overflow > Largest && magnitude == Overflow;
    if (SignedZero ? magnitude > Largest : bits == nan) {
      return std::bit_cast<float>(sign | (is_infinite ? 0x7f800000U : 0x7fc00000U));
    }
    float value = static_cast<float>(magnitude & ((1U << MantissaBits) - 1));
    auto exponent = static_cast<int>(magnitude >> MantissaBits);
    if (exponent > 0) value += static_cast<float>(1U << MantissaBits);
    for (int power = (exponent > 0 ? exponent : 1) - Bias - MantissaBits; power != 0;) {
      value *= power > 0 ? 2.0F : 0.5F;  // exact
      power += power > 0 ? -1 : 1;
    }
    return std::bit_cast<float>(std::bit_cast<std::uint32_t>(value) | sign);
  }
  // A table: exact whatever the processor is told to do with subnormals.
  static constexpr std::array<float, 256> values = [] {
    std::array<float, 256> all{};
    for (std::size_t bits = 0; bits < all.size(); ++bits) {
      all[bits] = value_of(static_cast<std::uint32_t>(bits));
    }
    return all;
  }();
};

using Float8E4M3fn = Float8<3, 7, 0x7e, 0x7e, true>;
using Float8E5M2 = Float8<2, 15, 0x7b, 0x7c, true>;
using Float8E4M3fnuz = Float8<3, 8, 0x7f, 0x80, false>;
using Float8E5M2fnuz = Float8<2, 16, 0x7f, 0x80, false>;

}  // namespace gradsync
