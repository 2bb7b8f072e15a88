#include "reduce/reduce.h"

#include <cmath>
#include <complex>
#include <cstring>
#include <limits>

#include "reduce/far_copy.h"
#include "reduce/far_ways.h"
#include "reduce/float8.h"
#include "reduce/half.h"
#include "tests/check.h"

using namespace gradsync;

namespace {

template <typename T>
std::vector<T> run(Dtype dtype, Reduce reduce, const std::vector<std::vector<T>>& inputs) {
  ReduceKernel kernel = nullptr;
  CHECK_OK(find_kernel(dtype, reduce, kernel));
  std::vector<const std::byte*> sources;
  for (const auto& input : inputs) {
    sources.push_back(reinterpret_cast<const std::byte*>(input.data()));
  }
  std::vector<T> first(inputs[0].size());
  std::vector<T> second(inputs[0].size());
  std::vector<std::byte*> destinations{reinterpret_cast<std::byte*>(first.data()),
                                       reinterpret_cast<std::byte*>(second.data())};
  kernel(sources, destinations, first.size(), {});
  CHECK(first.empty() || std::memcmp(first.data(), second.data(), first.size() * sizeof(T)) == 0);
  return first;
}

}  // namespace

TEST(sum_is_taken_in_order) {
  // (1e8 + -1e8) + 1 is 1; in any other order float loses the 1.
  const auto result = run<float>(Dtype::f32, Reduce::sum, {{1e8F}, {-1e8F}, {1.0F}});
  CHECK(result[0] == 1.0F);
}

TEST(every_length_around_the_block_is_right) {
  for (const std::size_t count : {0UL, 1UL, 7UL, 511UL, 512UL, 513UL, 2000UL}) {
    std::vector<float> a(count), b(count);
    for (std::size_t i = 0; i < count; ++i) {
      a[i] = static_cast<float>(i);
      b[i] = 1.0F;
    }
    const auto result = run<float>(Dtype::f32, Reduce::sum, {a, b});
    for (std::size_t i = 0; i < count; ++i) CHECK(result[i] == static_cast<float>(i) + 1.0F);
  }
}

TEST(data_that_is_not_in_a_cache_is_right) {
  // More than a cache holds, and no multiple of a block.
  const std::size_t count = 2'100'001;
  std::vector<float> a(count), b(count), c(count);
  for (std::size_t i = 0; i < count; ++i) {
    a[i] = static_cast<float>(i % 1000);
    b[i] = 2.0F;
    c[i] = 0.5F;
  }
  const auto two = run<float>(Dtype::f32, Reduce::sum, {a, b});
  const auto three = run<float>(Dtype::f32, Reduce::avg, {a, b, c});
  for (std::size_t i = 0; i < count; ++i) {
    CHECK(two[i] == a[i] + 2.0F);
    CHECK(three[i] == (a[i] + 2.0F + 0.5F) / 3.0F);
  }
}

void reduce_parts(Access access) {
  ReduceKernel kernel = nullptr;
  CHECK_OK(find_kernel(Dtype::f32, Reduce::sum, kernel));
  for (const std::size_t count : {0UL, 3UL, 40UL, 600UL, 5003UL}) {
    for (const std::size_t begin : {0UL, 1UL, 15UL}) {
      std::vector<float> mine(count + begin, 1.0F), theirs(count + begin, 2.0F);
      std::vector<float> elsewhere(count + begin + 1, 7.0F);
      const auto at = [begin](auto& data) {
        return reinterpret_cast<std::byte*>(&data[0] + begin);
      };
      if (count + begin == 0) continue;
      const std::vector<const std::byte*> sources{at(mine), at(theirs)};
      const std::vector<std::byte*> destinations{at(elsewhere), at(theirs)};
      kernel(sources, destinations, count, access);
      for (std::size_t i = 0; i < count + begin; ++i) {
        const bool is_in = i >= begin;
        CHECK(mine[i] == 1.0F);
        CHECK(theirs[i] == (is_in ? 3.0F : 2.0F));
        CHECK(elsewhere[i] == (is_in ? 3.0F : 7.0F));
      }
      CHECK(elsewhere.back() == 7.0F);
    }
  }
}

TEST(parts_of_large_data_are_right_wherever_they_begin) {
  for (const bool streams : {false, true}) {
    for (const bool past : {false, true}) reduce_parts({streams, past});
  }
}

TEST(ways_through_large_memory_are_measured_once) {
  const FarWays ways = far_ways();
  CHECK(far_ways().copies_in_streams == ways.copies_in_streams);
  CHECK(!access_to(far_bytes - 1).in_streams && !access_to(far_bytes - 1).past_caches);
  CHECK(access_to(far_bytes).in_streams == ways.reduces_in_streams);
  CHECK(access_to(far_bytes).past_caches == ways.writes_past_caches);
}

TEST(far_copies_are_copies) {
  for (const std::size_t bytes : {0UL, 5UL, 64UL, 2047UL, 2048UL, 70'001UL}) {
    for (const std::size_t begin : {0UL, 1UL, 16UL, 63UL}) {
      std::vector<std::byte> from(bytes + 64), to(bytes + 128), back(bytes + 64);
      for (std::size_t i = 0; i < bytes; ++i) from[i] = static_cast<std::byte>(i * 7 + 1);
      far_copy(to.data() + begin, from.data(), bytes);
      CHECK(std::memcmp(to.data() + begin, from.data(), bytes) == 0);
      CHECK(begin == 0 || to[begin - 1] == std::byte{0});
      CHECK(to[begin + bytes] == std::byte{0});
      copy_from_far(back.data(), to.data() + begin, bytes);
      CHECK(back == from);
    }
  }
}

TEST(any_number_of_destinations_gets_the_result) {
  const std::vector<float> source{1.0F, 2.0F, 3.0F};
  const auto* const bytes = reinterpret_cast<const std::byte*>(source.data());
  ReduceKernel kernel = nullptr;
  CHECK_OK(find_kernel(Dtype::f32, Reduce::sum, kernel));
  for (const std::size_t number : {1UL, 2UL, 3UL}) {
    std::vector<std::vector<float>> results(number, std::vector<float>(source.size()));
    std::vector<std::byte*> destinations;
    for (auto& result : results) {
      destinations.push_back(reinterpret_cast<std::byte*>(result.data()));
    }
    const std::vector<const std::byte*> sources{bytes, bytes};
    kernel(sources, destinations, source.size(), {});
    for (const auto& result : results) CHECK((result == std::vector<float>{2.0F, 4.0F, 6.0F}));
  }
}

TEST(integers_wrap_and_bits_work) {
  using I8 = std::vector<std::int8_t>;
  CHECK((run<std::int8_t>(Dtype::i8, Reduce::sum, {I8{127}, I8{1}}) == I8{-128}));
  CHECK((run<std::int8_t>(Dtype::i8, Reduce::product, {I8{64}, I8{4}}) == I8{0}));
  using I64 = std::vector<std::int64_t>;
  const std::int64_t most = std::numeric_limits<std::int64_t>::max();
  CHECK((run<std::int64_t>(Dtype::i64, Reduce::sum, {I64{most}, I64{1}}) ==
         I64{std::numeric_limits<std::int64_t>::min()}));
  CHECK((run<std::int64_t>(Dtype::i64, Reduce::min, {I64{-3}, I64{2}}) == I64{-3}));
  using U16 = std::vector<std::uint16_t>;
  CHECK((run<std::uint16_t>(Dtype::u16, Reduce::bxor, {U16{0xF0F0}, U16{0xFFFF}}) == U16{0x0F0F}));
  CHECK((run<std::uint16_t>(Dtype::u16, Reduce::product, {U16{0xFFFF}, U16{0xFFFF}}) == U16{1}));
}

TEST(booleans_are_logic) {
  using B = std::vector<std::uint8_t>;
  CHECK((run<std::uint8_t>(Dtype::boolean, Reduce::sum, {B{0, 1, 2}, B{0, 1, 0}}) == B{0, 1, 1}));
  CHECK(
      (run<std::uint8_t>(Dtype::boolean, Reduce::product, {B{0, 1, 2}, B{1, 1, 1}}) == B{0, 1, 1}));
  CHECK((run<std::uint8_t>(Dtype::boolean, Reduce::bxor, {B{1, 1}, B{1, 0}}) == B{0, 1}));
}

TEST(nan_wins_in_min_and_max) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const Reduce reduce : {Reduce::min, Reduce::max}) {
    const auto result = run<float>(Dtype::f32, reduce, {{nan, 1.0F}, {1.0F, nan}});
    CHECK(std::isnan(result[0]));
    CHECK(std::isnan(result[1]));
  }
}

TEST(averages_divide_once) {
  CHECK(run<double>(Dtype::f64, Reduce::avg, {{1.0}, {2.0}, {6.0}})[0] == 3.0);
  using C = std::complex<float>;
  CHECK((run<C>(Dtype::c64, Reduce::avg, {{C{1, 2}}, {C{3, 4}}})[0] == C{2, 3}));
}

TEST(half_types_are_added_in_float) {
  // 256 + 1 + 1 rounds to 256 twice in bfloat16 steps, to 258 when rounded once.
  std::vector<std::vector<Bfloat16>> inputs;
  for (const float value : {256.0F, 1.0F, 1.0F}) inputs.push_back({Bfloat16::from(value)});
  CHECK(run<Bfloat16>(Dtype::bf16, Reduce::sum, inputs)[0].to_float() == 258.0F);
  // In float16 the same goes for 2048.
  std::vector<std::vector<Complex32>> pairs;
  for (const float value : {2048.0F, 1.0F, 1.0F}) pairs.push_back({Complex32::from({value, 1.0F})});
  const std::complex<float> sum = run<Complex32>(Dtype::c32, Reduce::sum, pairs)[0].to_complex();
  CHECK(sum == std::complex<float>(2050.0F, 3.0F));
}

TEST(float16_round_trips_every_value) {
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const Float16 half{static_cast<std::uint16_t>(bits)};
    const float value = half.to_float();
    if (std::isnan(value)) {
      CHECK(std::isnan(Float16::from(value).to_float()));
    } else {
      CHECK(Float16::from(value).bits == half.bits);
    }
  }
  CHECK(Float16::from(65519.0F).to_float() == 65504.0F);
  CHECK(std::isinf(Float16::from(65520.0F).to_float()));
  CHECK(Float16::from(1.0F + 0x1p-11F).to_float() == 1.0F);  // a tie goes to even
  CHECK(Float16::from(1.0F + 3 * 0x1p-11F).to_float() == 1.0F + 0x1p-9F);
  CHECK(Float16::from(0x1p-25F).to_float() == 0.0F);
  CHECK(Float16::from(0x1.8p-25F).to_float() == 0x1p-24F);
}

TEST(bfloat16_round_trips_every_value) {
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const Bfloat16 half{static_cast<std::uint16_t>(bits)};
    const float value = half.to_float();
    if (std::isnan(value)) {
      CHECK(std::isnan(Bfloat16::from(value).to_float()));
    } else {
      CHECK(Bfloat16::from(value).bits == half.bits);
    }
  }
}

namespace {

// Between two neighbours, everything goes to the nearer one, and the middle to the even one.
template <typename Float>
void check_rounding() {
  for (unsigned code = 0; code < 0x7f; ++code) {
    const Float low{static_cast<std::uint8_t>(code)};
    const Float high{static_cast<std::uint8_t>(code + 1)};
    const float a = low.to_float(), b = high.to_float();
    CHECK(Float::from(a).bits == low.bits);
    if (!std::isfinite(b)) break;
    const float middle = (a + b) / 2;
    CHECK(Float::from(middle).bits == (code % 2 == 0 ? low.bits : high.bits));
    CHECK(Float::from(std::nextafter(middle, a)).bits == low.bits);
    CHECK(Float::from(std::nextafter(middle, b)).bits == high.bits);
    CHECK(Float::from(-b).to_float() == -b);
  }
  CHECK(std::isnan(Float::from(std::numeric_limits<float>::quiet_NaN()).to_float()));
}

}  // namespace

TEST(eight_bit_floats_round_to_nearest_even) {
  check_rounding<Float8E4M3fn>();
  check_rounding<Float8E5M2>();
  check_rounding<Float8E4M3fnuz>();
  check_rounding<Float8E5M2fnuz>();
  // Too large: as torch has it.
  CHECK(Float8E4M3fn::from(1e9F).to_float() == 448.0F);
  CHECK(Float8E4M3fn::from(-std::numeric_limits<float>::infinity()).to_float() == -448.0F);
  CHECK(std::isinf(Float8E5M2::from(61440.0F).to_float()));
  CHECK(Float8E5M2::from(61439.0F).to_float() == 57344.0F);
  CHECK(std::isnan(Float8E4M3fnuz::from(1e9F).to_float()));
  CHECK(Float8E5M2fnuz::from(-1e-9F).bits == 0);
}

TEST(senseless_pairs_are_refused) {
  ReduceKernel kernel = nullptr;
  CHECK(find_kernel(Dtype::f32, Reduce::band, kernel).code == Code::invalid);
  CHECK(find_kernel(Dtype::i32, Reduce::avg, kernel).code == Code::invalid);
  CHECK(find_kernel(Dtype::c64, Reduce::max, kernel).code == Code::invalid);
  CHECK(find_kernel(Dtype::c32, Reduce::product, kernel).code == Code::invalid);
  CHECK(find_kernel(Dtype::boolean, Reduce::avg, kernel).code == Code::invalid);
  CHECK(find_kernel(Dtype::f8e8m0fnu, Reduce::sum, kernel).code == Code::invalid);
}
