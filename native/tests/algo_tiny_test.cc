// Calls of a few bytes, which travel with their announcement: every call with every kind of
// neighbour before and after it, and what happens when not all ranks mean the same.
#include <span>

#include "tests/calls.h"

using namespace gradsync;
using namespace gradsync::testing;

namespace {

constexpr std::size_t most = 4;  // floats; two travel along, three and more are staged

const Floats untouched(most, -1.0F);

// Runs a call that fails on every rank of two, and leaves `output` as it was.
template <typename Call>
void expect_mismatch(Call call) {
  run_threads(2, [&](Session& session) {
    Floats output = untouched;
    const Status status = call(session, session.rank() == 1, output);
    CHECK(status.code == Code::mismatch);
    CHECK(output == untouched);
  });
}

// A float whose bits are the number that a peer announces as its count.
float looks_like(std::uint32_t count) {
  float value = 0;
  std::memcpy(&value, &count, sizeof(value));
  return value;
}

}  // namespace

TEST(tiny_calls_and_staged_ones_do_not_disturb_each_other) {
  for (const int ranks : {1, 2, 3, 4}) {
    run_threads(ranks, [](Session& session) {
      std::mt19937 random(5);
      std::mt19937 delays(static_cast<unsigned>(session.rank()));
      for (int call = 0; call < 2000; ++call) {
        if (delays() % 64 == 0) ::usleep(static_cast<useconds_t>(delays() % 200));
        check_random_call(session, random, most);
      }
    });
  }
}

TEST(eight_bytes_of_any_type_travel) {
  run_threads(3, [](Session& session) {
    std::vector<std::uint8_t> small(8, static_cast<std::uint8_t>(session.rank() + 1));
    CHECK_OK(session.all_reduce(reinterpret_cast<std::byte*>(small.data()), small.size(), Dtype::u8,
                                Reduce::product, soon()));
    CHECK(small == std::vector<std::uint8_t>(8, 6));
    double large = session.rank() == 0 ? 1e16 : session.rank() == 1 ? -1e16 : 1.0;
    CHECK_OK(session.all_reduce(reinterpret_cast<std::byte*>(&large), 1, Dtype::f64, Reduce::sum,
                                soon()));
    CHECK(large == 1.0);  // in any other order the 1 is lost
  });
}

TEST(a_payload_is_not_taken_for_a_count) {
  expect_mismatch([](Session& session, bool odd, Floats& output) {
    output[0] = looks_like(3);
    const Status status =
        session.all_reduce(bytes(output), odd ? 3 : 1, Dtype::f32, Reduce::sum, soon());
    CHECK(output[0] == looks_like(3));
    output = untouched;
    return status;
  });
}

TEST(different_tiny_calls_are_a_mismatch_and_nothing_is_applied) {
  expect_mismatch([](Session& session, bool odd, Floats& output) {
    return session.broadcast(bytes(output), odd ? 2 : 1, Dtype::f32, 0, soon());
  });
  expect_mismatch([](Session& session, bool odd, Floats& output) {
    return session.reduce(bytes(output), 1, Dtype::f32, Reduce::sum, odd ? 1 : 0, soon());
  });
  expect_mismatch([](Session& session, bool odd, Floats& output) {
    return session.all_reduce(bytes(output), 1, Dtype::f32, odd ? Reduce::max : Reduce::sum,
                              soon());
  });
  expect_mismatch([](Session& session, bool odd, Floats& output) {
    const Floats input = filled(session.rank(), most);
    const std::vector<std::byte*> outputs(2, bytes(output));
    return odd ? session.all_gather(bytes(input), 1, Dtype::f32, outputs, soon())
               : session.gather(bytes(input), 1, Dtype::f32, outputs, 0, soon());
  });
  expect_mismatch([](Session& session, bool odd, Floats& output) {
    const Floats input = filled(session.rank(), most);
    const std::vector<const std::byte*> inputs(odd ? 0 : 2, bytes(input));
    return session.scatter(inputs, bytes(output), 1, odd ? Dtype::i32 : Dtype::f32, 0, soon());
  });
  expect_mismatch([](Session& session, bool odd, Floats& output) {
    const Floats input = filled(session.rank(), most);
    const std::vector<const std::byte*> inputs(2, bytes(input));
    return session.reduce_scatter(inputs, evenly(session, odd ? 2 : 1), bytes(output), Dtype::f32,
                                  Reduce::sum, soon());
  });
}

TEST(all_to_all_of_equal_pieces_on_some_ranks_only) {
  for (const int ranks : {2, 3, 4}) {
    run_threads(ranks, [](Session& session) {
      const auto size = static_cast<std::size_t>(session.size());
      for (const std::size_t kept : {std::size_t{0}, std::size_t{2}, std::size_t{9000}}) {
        std::vector<std::size_t> matrix(size * size, 1);
        check_all_to_all(session, matrix);
        // What the last rank keeps is no business of the others.
        matrix.back() = kept;
        check_all_to_all(session, matrix);
      }
    });
  }
}

TEST(different_tiny_pieces_of_all_to_all_are_a_mismatch) {
  expect_mismatch([](Session& session, bool odd, Floats& output) {
    const Floats input = filled(session.rank(), most);
    const std::vector<const std::byte*> inputs(2, bytes(input));
    const std::vector<std::byte*> outputs(2, bytes(output));
    // In bytes, so that both sizes travel along.
    const std::vector<std::size_t> counts(2, odd ? 3 : 2);
    const Status status =
        session.all_to_all({inputs, counts}, {outputs, counts}, Dtype::u8, soon());
    CHECK(status.message ==
          "rank 0 sends 2 elements to rank 1, which expects 3; "
          "rank 1 sends 3 elements to rank 0, which expects 2");
    return status;
  });
}
