// All-reduce, broadcast and barrier; what all calls have in common.
#include "tests/calls.h"

using namespace gradsync;
using namespace gradsync::testing;

namespace {

constexpr std::size_t sizes[] = {0, 1, 3, 17, 1000, 4096, 4097, 8192, 8193, 50'000};

}  // namespace

TEST(all_reduce_is_right_at_every_size_and_world) {
  for (const int ranks : {1, 2, 3, 4}) {
    run_threads(ranks, [](Session& session) {
      for (const std::size_t count : sizes) check_all_reduce(session, count);
    });
  }
}

TEST(broadcast_is_right_at_every_size_root_and_world) {
  for (const bool open : {false, true}) {
    for (const int ranks : {1, 2, 3, 4}) {
      const auto body = [](Session& session) {
        for (int root = 0; root < session.size(); ++root) {
          for (const std::size_t count : sizes) check_broadcast(session, count, root);
        }
      };
      run_threads(ranks, body, small_staging, open);
    }
  }
}

TEST(mismatch_is_seen_by_everyone_and_nothing_is_applied) {
  struct Variant {
    std::size_t count;
    Reduce reduce;
  };
  for (const Variant odd : {Variant{11, Reduce::sum}, Variant{10, Reduce::max}}) {
    run_threads(3, [odd](Session& session) {
      const bool is_odd = session.rank() == 1;
      std::vector<float> data = filled(session.rank(), 20'000);
      const std::vector<float> before = data;
      const Status status =
          session.all_reduce(bytes(data), is_odd ? odd.count : 10, Dtype::f32,
                             is_odd ? odd.reduce : Reduce::sum, Deadline::after(10));
      CHECK(status.code == Code::mismatch);
      CHECK((status.ranks == (is_odd ? std::vector<int>{0, 2} : std::vector<int>{1})));
      CHECK(data == before);
    });
  }
}

TEST(different_ops_are_a_mismatch) {
  run_threads(2, [](Session& session) {
    std::vector<float> data = filled(session.rank(), 100'000);
    const Status status =
        session.rank() == 0
            ? session.barrier(Deadline::after(10))
            : session.broadcast(bytes(data), data.size(), Dtype::f32, 0, Deadline::after(10));
    CHECK(status.code == Code::mismatch);
  });
}

TEST(wrong_arguments_leave_the_group_usable) {
  run_threads(2, [](Session& session) {
    std::vector<float> data(4);
    CHECK(session.all_reduce(bytes(data), 4, Dtype::f32, Reduce::bor, Deadline::after(5)).code ==
          Code::invalid);
    CHECK(session.broadcast(bytes(data), 4, Dtype::f32, 2, Deadline::after(5)).code ==
          Code::invalid);
    check_all_reduce(session, 100);
  });
}
