// The calls that move a piece per rank, and reduce.
#include "tests/calls.h"

using namespace gradsync;
using namespace gradsync::testing;

namespace {

// Around the bounds of a half (8192 floats), and of a third and a half of it.
constexpr std::size_t sizes[] = {0,    1,    3,    17,   2720, 2728, 2736, 4079,
                                 4080, 4081, 4096, 4097, 8191, 8192, 8193, 50'000};

// Through staging space alone, and with memory that the ranks read where it is.
template <typename Check>
void everywhere(Check check) {
  for (const bool open : {false, true}) {
    for (const int ranks : {1, 2, 3, 4}) {
      const auto body = [&](Session& session) {
        for (const std::size_t count : sizes) check(session, count);
      };
      run_threads(ranks, body, small_staging, open);
    }
  }
}

template <typename Check>
void from_every_root(Check check) {
  everywhere([&](Session& session, std::size_t count) {
    for (int root = 0; root < session.size(); ++root) check(session, count, root);
  });
}

// Runs a call that fails on every rank of three; the call returns its status.
template <typename Call>
void expect_mismatch(Call call) {
  run_threads(3, [&](Session& session) {
    const Status status = call(session, session.rank() == 1);
    CHECK(status.code == Code::mismatch);
    CHECK(!status.ranks.empty());
  });
}

const Floats untouched(20'000, -1.0F);

}  // namespace

TEST(reduce_is_right_at_every_size_root_and_world) { from_every_root(check_reduce); }
TEST(gather_is_right_at_every_size_root_and_world) { from_every_root(check_gather); }
TEST(scatter_is_right_at_every_size_root_and_world) { from_every_root(check_scatter); }

TEST(all_gather_is_right_at_every_size_and_world) {
  everywhere([](Session& session, std::size_t count) {
    check_all_gather(session, count, false);
    check_all_gather(session, count, true);
  });
}

TEST(uneven_all_gather_is_right_at_every_size_and_world) {
  everywhere([](Session& session, std::size_t count) {
    auto counts = evenly(session, count);
    for (std::size_t rank = 0; rank < counts.size(); ++rank) counts[rank] += 7 * rank;
    check_all_gather_uneven(session, counts, false);
    counts[0] = 0;
    check_all_gather_uneven(session, counts, true);
  });
}

TEST(reduce_scatter_is_right_at_every_size_and_world) {
  everywhere([](Session& session, std::size_t count) {
    check_reduce_scatter(session, evenly(session, count), false);
    check_reduce_scatter(session, evenly(session, count), true);
    auto counts = evenly(session, count);
    for (std::size_t rank = 0; rank < counts.size(); ++rank) counts[rank] += 7 * rank;
    check_reduce_scatter(session, counts, false);
    counts[0] = 0;
    check_reduce_scatter(session, counts, true);
  });
}

TEST(all_to_all_is_right_at_every_size_and_world) {
  everywhere([](Session& session, std::size_t count) {
    const auto ranks = static_cast<std::size_t>(session.size());
    std::vector<std::size_t> matrix(ranks * ranks, count);
    check_all_to_all(session, matrix);
    for (std::size_t i = 0; i < matrix.size(); ++i) matrix[i] = i % 3 == 0 ? 0 : count / i;
    check_all_to_all(session, matrix);
  });
}

TEST(sums_are_taken_in_rank_order_wherever_they_end) {
  // (1e8 + -1e8) + 1 is 1; in any other order float loses the 1.
  run_threads(3, [](Session& session) {
    const float mine = session.rank() == 0 ? 1e8F : session.rank() == 1 ? -1e8F : 1.0F;
    for (int root = 0; root < 3; ++root) {
      Floats data(100, mine);
      CHECK_OK(session.reduce(bytes(data), 100, Dtype::f32, Reduce::sum, root, soon()));
      CHECK(data[99] == (session.rank() == root ? 1.0F : mine));
    }
    const Floats data(100, mine);
    const std::vector<const std::byte*> inputs(3, bytes(data));
    Floats output(100);
    CHECK_OK(session.reduce_scatter(inputs, evenly(session, 100), bytes(output), Dtype::f32,
                                    Reduce::sum, soon()));
    CHECK(output == Floats(100, 1.0F));
  });
}

TEST(different_counts_and_roots_are_a_mismatch_and_nothing_is_applied) {
  expect_mismatch([](Session& session, bool odd) {
    Floats data = untouched;
    const Status status =
        session.reduce(bytes(data), odd ? 11 : 10, Dtype::f32, Reduce::sum, 0, soon());
    CHECK(data == untouched);
    return status;
  });
  expect_mismatch([](Session& session, bool odd) {
    Floats output = untouched;
    const std::vector<std::byte*> outputs(3, bytes(output));
    const Floats input = filled(0, 10);
    std::vector<std::size_t> counts = {1, 2, 3};
    if (odd) std::swap(counts[0], counts[2]);
    const Status status =
        session.all_gather_uneven(bytes(input), {outputs, counts}, Dtype::f32, soon());
    CHECK(output == untouched);
    return status;
  });
  expect_mismatch([](Session& session, bool odd) {
    Floats output = untouched;
    const std::vector<std::byte*> outputs(3, bytes(output));
    const Floats input = filled(0, 20'000);
    const Status status =
        session.all_gather(bytes(input), odd ? 20'000 : 10, Dtype::f32, outputs, soon());
    CHECK(output == untouched);
    return status;
  });
  expect_mismatch([](Session& session, bool odd) {
    Floats output = untouched;
    const int root = odd ? 1 : 0;
    std::vector<std::byte*> outputs;
    if (session.rank() == root) outputs.assign(3, bytes(output));
    const Floats input = filled(0, 10);
    const Status status = session.gather(bytes(input), 10, Dtype::f32, outputs, root, soon());
    CHECK(output == untouched);
    return status;
  });
  expect_mismatch([](Session& session, bool odd) {
    Floats output = untouched;
    const Floats input = filled(0, 10);
    std::vector<const std::byte*> inputs;
    if (session.rank() == 0) inputs.assign(3, bytes(input));
    const Status status =
        session.scatter(inputs, bytes(output), 10, odd ? Dtype::i32 : Dtype::f32, 0, soon());
    CHECK(output == untouched);
    return status;
  });
}

TEST(different_pieces_of_reduce_scatter_are_a_mismatch) {
  using Counts = std::vector<std::size_t>;
  // Another size of all, equal against unequal, and two ways to cut the same sum.
  const std::pair<Counts, Counts> variants[] = {
      {{5, 5, 5}, {6, 6, 6}}, {{5, 5, 5}, {4, 5, 6}}, {{4, 5, 6}, {6, 5, 4}}};
  for (const auto& [usual, other] : variants) {
    expect_mismatch([&](Session& session, bool odd) {
      const Floats input = filled(session.rank(), 10);
      const std::vector<const std::byte*> inputs(3, bytes(input));
      Floats output = untouched;
      const Status status = session.reduce_scatter(inputs, odd ? other : usual, bytes(output),
                                                   Dtype::f32, Reduce::sum, soon());
      CHECK((status.ranks == (odd ? std::vector<int>{0, 2} : std::vector<int>{1})));
      CHECK(output == untouched);
      return status;
    });
  }
}

TEST(different_expectations_in_all_to_all_are_a_mismatch_on_every_rank) {
  expect_mismatch([](Session& session, bool odd) {
    const Floats input = filled(session.rank(), 20'000);
    const std::vector<const std::byte*> inputs(3, bytes(input));
    Floats output = untouched;
    const std::vector<std::byte*> outputs(3, bytes(output));
    const std::vector<std::size_t> sent(3, 10'000);
    std::vector<std::size_t> expected(3, 10'000);
    if (odd) expected[0] = 9'999;
    const Status status =
        session.all_to_all({inputs, sent}, {outputs, expected}, Dtype::f32, soon());
    CHECK((status.ranks == std::vector<int>{0, 1}));
    CHECK(status.message == "rank 0 sends 10000 elements to rank 1, which expects 9999");
    CHECK(output == untouched);
    return status;
  });
}

TEST(lists_of_the_wrong_length_leave_the_group_usable) {
  run_threads(2, [](Session& session) {
    Floats data(8);
    const std::vector<std::byte*> three(3, bytes(data));
    const std::vector<const std::byte*> one(1, bytes(data));
    const std::vector<std::size_t> counts(2, 1);
    const auto is_invalid = [](const Status& status) { return status.code == Code::invalid; };
    CHECK(is_invalid(session.all_gather(bytes(data), 1, Dtype::f32, three, soon())));
    CHECK(is_invalid(session.gather(bytes(data), 1, Dtype::f32, three, 0, soon())));
    CHECK(is_invalid(session.scatter(one, bytes(data), 1, Dtype::f32, 0, soon())));
    CHECK(is_invalid(session.scatter({}, bytes(data), 1, Dtype::f32, 2, soon())));
    CHECK(is_invalid(session.reduce(bytes(data), 1, Dtype::f32, Reduce::bor, 0, soon())));
    CHECK(is_invalid(
        session.reduce_scatter(one, counts, bytes(data), Dtype::f32, Reduce::sum, soon())));
    CHECK(is_invalid(session.all_to_all({one, counts}, {three, counts}, Dtype::f32, soon())));
    check_all_gather(session, 100, false);
  });
}
