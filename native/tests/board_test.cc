// Buckets of gradients: weighted means, parts that are missing, passes, and ranks at odds.
#include <random>
#include <vector>

#include "tests/calls.h"

using namespace gradsync;
using namespace gradsync::testing;

namespace {

// A rank's buckets in the arena, and their board.
struct Gradients {
  Gradients(Session& session, const std::vector<std::size_t>& counts, std::size_t parts = 2)
      : arena(session.arena()), sizes(counts) {
    std::vector<std::byte*> places;
    std::vector<BucketShape> shapes;
    for (const std::size_t count : counts) {
      std::byte* data = nullptr;
      CHECK_OK(arena->allocate(session.arena_rank(), count * sizeof(float), data));
      places.push_back(data);
      buckets.push_back(reinterpret_cast<float*>(data));
      shapes.push_back({count, Dtype::f32, parts});
    }
    CHECK_OK(session.make_board(places, shapes, soon(), board));
  }
  ~Gradients() {
    for (float* bucket : buckets) arena->free(reinterpret_cast<std::byte*>(bucket));
  }
  void fill(std::size_t bucket, float value) const {
    std::fill_n(buckets[bucket], sizes[bucket], value);
  }
  void check(std::size_t bucket, float value) const {
    for (std::size_t i = 0; i < sizes[bucket]; ++i) CHECK(buckets[bucket][i] == value);
  }

  std::shared_ptr<Arena> arena;
  std::vector<std::size_t> sizes;
  std::vector<float*> buckets;
  std::unique_ptr<Board> board;
};

// `size` decides whether the kernels take the buckets for large.
void lend_and_check(std::size_t size) {
  run_threads(3, [size](Session& session) {
    const Gradients gradients(session, {1000, 2 * size + 1});
    const auto rank = static_cast<float>(session.rank());
    for (int pass = 0; pass < 10; ++pass) {
      Floats first(1000, rank), head(size - 7, rank + 1), tail(size + 8, rank + 2);
      const std::vector<LentPart> one{{bytes(first), first.size()}};
      const std::vector<LentPart> two{{bytes(head), head.size()}, {bytes(tail), tail.size()}};
      CHECK_OK(gradients.board->arrive(0, 1.0, {}, one, true));
      CHECK_OK(gradients.board->arrive(1, session.rank() == 2 ? 2.0 : 1.0, {}, two, pass % 2 == 0));
      CHECK_OK(session.finish(*gradients.board, soon()));
      gradients.check(0, 1.0F);
      // (1 + 2 + 2 * 3) / 4 and one more
      for (std::size_t i = 0; i < 2 * size + 1; ++i) {
        CHECK(gradients.buckets[1][i] == (i < size - 7 ? 2.25F : 3.25F));
      }
      CHECK(first[999] == rank && head[0] == rank + 1 && tail[size + 7] == rank + 2);
    }
  });
}

}  // namespace

TEST(every_bucket_holds_the_mean_after_each_pass) {
  for (const int ranks : {1, 2, 3}) {
    run_threads(ranks, [ranks](Session& session) {
      const Gradients gradients(session, {1, 100, 5000, 70'000});
      std::minstd_rand random(static_cast<unsigned>(session.rank()));
      for (int pass = 0; pass < 30; ++pass) {
        float mean = 0;
        for (int r = 0; r < ranks; ++r) mean += static_cast<float>(pass + r);
        mean /= static_cast<float>(ranks);
        for (std::size_t b = 0; b < 4; ++b) {
          gradients.fill(b, static_cast<float>(pass + session.rank()));
          if (random() % 3 == 0) ::usleep(200);
          CHECK_OK(gradients.board->arrive(b, 1.0, {}));
        }
        CHECK_OK(session.finish(*gradients.board, soon()));
        for (std::size_t b = 0; b < 4; ++b) gradients.check(b, mean);
        CHECK(gradients.board->missing_everywhere(1).empty());
      }
    });
  }
}

TEST(lent_gradients_give_the_same_and_are_left_alone) {
  lend_and_check(35'000);
  lend_and_check(1'100'000);
}

TEST(weights_and_missing_parts_travel_with_the_bucket) {
  run_threads(2, [](Session& session) {
    const Gradients gradients(session, {1000}, 3);
    const bool first = session.rank() == 0;
    gradients.fill(0, first ? 1.0F : 5.0F);
    const std::vector<std::uint8_t> missing =
        first ? std::vector<std::uint8_t>{1, 0, 1} : std::vector<std::uint8_t>{1, 1, 0};
    CHECK_OK(gradients.board->arrive(0, first ? 3.0 : 1.0, missing));
    CHECK_OK(session.finish(*gradients.board, soon()));
    gradients.check(0, 2.0F);
    CHECK(gradients.board->missing_everywhere(0) == std::vector<std::size_t>{0});
    // Nobody has a weight: nothing to average.
    gradients.fill(0, 7.0F);
    CHECK_OK(gradients.board->arrive(0, 0.0, {}));
    CHECK_OK(session.finish(*gradients.board, soon()));
    gradients.check(0, 0.0F);
    CHECK(gradients.board->missing_everywhere(0).empty());
  });
}

TEST(other_collectives_may_come_between) {
  run_threads(2, [](Session& session) {
    const Gradients gradients(session, {300, 40'000});
    for (int pass = 0; pass < 20; ++pass) {
      gradients.fill(0, 1.0F);
      CHECK_OK(gradients.board->arrive(0, 1.0, {}));
      Floats values(100, 2.0F);
      CHECK_OK(session.all_reduce(bytes(values), 100, Dtype::f32, Reduce::sum, soon()));
      CHECK(values[7] == 4.0F);
      gradients.fill(1, 1.0F);
      CHECK_OK(gradients.board->arrive(1, 1.0, {}));
      CHECK_OK(session.finish(*gradients.board, soon()));
      gradients.check(1, 1.0F);
    }
  });
}

TEST(a_rank_that_does_something_else_is_a_mismatch_everywhere) {
  run_threads(2, [](Session& session) {
    const Gradients gradients(session, {300});
    CHECK_OK(gradients.board->arrive(0, 1.0, {}));
    CHECK(gradients.board->arrive(0, 1.0, {}).code == Code::invalid);  // twice in a pass
    CHECK(gradients.board->arrive(9, 1.0, {}).code == Code::invalid);
    const Status status =
        session.rank() == 0 ? session.finish(*gradients.board, soon()) : session.barrier(soon());
    CHECK(status.code == Code::mismatch);
  });
  run_threads(2, [](Session& session) {
    std::byte* data = nullptr;
    CHECK_OK(session.arena()->allocate(session.arena_rank(), 4096, data));
    std::unique_ptr<Board> board;
    const std::size_t count = session.rank() == 0 ? 10 : 20;
    CHECK(session.make_board({&data, 1}, {{count, Dtype::f32, 1}}, soon(), board).code ==
          Code::mismatch);
  });
}

TEST(a_rank_killed_in_a_pass_is_named) {
  const auto pids = fork_ranks(2, [](Session& session) {
    const Gradients gradients(session, {1000, 1000});
    CHECK_OK(gradients.board->arrive(0, 1.0, {}));
    if (session.rank() == 1) ::kill(::getpid(), SIGKILL);
    CHECK_OK(gradients.board->arrive(1, 1.0, {}));
    const Status status = session.finish(*gradients.board, soon());
    return status.code == Code::peer_lost && status.ranks == std::vector<int>{1} ? 0 : 1;
  });
  CHECK(WIFSIGNALED(exit_status(pids[1], 10)));
  CHECK(exit_status(pids[0], 10) == 0);
}
