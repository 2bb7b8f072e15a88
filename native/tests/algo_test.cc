#include <cstring>
#include <random>

#include "tests/ranks.h"

using namespace gradsync;
using namespace gradsync::testing;

namespace {

std::byte* bytes(std::vector<float>& data) { return reinterpret_cast<std::byte*>(data.data()); }

float value(int rank, std::size_t i) {
  return static_cast<float>((rank + 1) * 3) + static_cast<float>(i % 101);
}

std::vector<float> filled(int rank, std::size_t count) {
  std::vector<float> data(count);
  for (std::size_t i = 0; i < count; ++i) data[i] = value(rank, i);
  return data;
}

void check_all_reduce(Session& session, std::size_t count) {
  std::vector<float> data = filled(session.rank(), count);
  CHECK_OK(session.all_reduce(bytes(data), count, Dtype::f32, Reduce::sum, Deadline::after(30)));
  for (std::size_t i = 0; i < count; ++i) {
    float expected = 0;
    for (int rank = 0; rank < session.size(); ++rank) expected += value(rank, i);
    CHECK(data[i] == expected);
  }
}

void check_broadcast(Session& session, std::size_t count, int root) {
  std::vector<float> data = filled(session.rank(), count);
  CHECK_OK(session.broadcast(bytes(data), count, Dtype::f32, root, Deadline::after(30)));
  for (std::size_t i = 0; i < count; ++i) CHECK(data[i] == value(root, i));
}

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
  for (const int ranks : {1, 2, 3, 4}) {
    run_threads(ranks, [](Session& session) {
      for (int root = 0; root < session.size(); ++root) {
        for (const std::size_t count : sizes) check_broadcast(session, count, root);
      }
    });
  }
}

TEST(random_sequences_of_calls_do_not_disturb_each_other) {
  run_threads(4, [](Session& session) {
    std::mt19937 random(7);  // the same on every rank
    for (int call = 0; call < 400; ++call) {
      const std::size_t count = std::uniform_int_distribution<std::size_t>(0, 20'000)(random);
      const auto kind = random() % 3;
      if (kind == 0) check_all_reduce(session, count);
      if (kind == 1) check_broadcast(session, count, static_cast<int>(random() % 4));
      if (kind == 2) CHECK_OK(session.barrier(Deadline::after(30)));
    }
  });
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

// The main fault test: ranks in the middle of mixed traffic, one killed at a random moment, again
// and again. Nobody hangs, the survivors name the victim, nothing is left behind.
TEST(killed_at_random_points_nobody_hangs_and_nothing_is_left) {
  const int files_before = count_entries("/dev/shm");
  const int descriptors_before = count_entries("/proc/self/fd");
  std::mt19937 random(1);
  for (int round = 0; round < 300; ++round) {
    const int ranks = 2 + static_cast<int>(random() % 3);
    const int victim = static_cast<int>(random() % static_cast<unsigned>(ranks));
    const auto pids = fork_ranks(ranks, [victim](Session& session) {
      std::vector<float> data(30'000, 1.0F);
      for (std::uint64_t call = 0;; ++call) {
        Status status;
        switch (call % 3) {
          case 0: status = session.barrier(Deadline::after(20)); break;
          case 1:
            status = session.all_reduce(bytes(data), data.size(), Dtype::f32, Reduce::max,
                                        Deadline::after(20));
            break;
          default:
            status =
                session.broadcast(bytes(data), data.size(), Dtype::f32, 0, Deadline::after(20));
        }
        if (status.ok()) continue;
        return status.code == Code::peer_lost && status.ranks == std::vector<int>{victim} ? 0 : 1;
      }
    });
    ::usleep(static_cast<useconds_t>(random() % 6000));
    ::kill(pids[static_cast<std::size_t>(victim)], SIGKILL);
    for (int rank = 0; rank < ranks; ++rank) {
      const int status = exit_status(pids[static_cast<std::size_t>(rank)], 10);
      if (rank == victim) {
        CHECK(WIFSIGNALED(status));
        continue;
      }
      CHECK(status != -1);  // did not hang
      // 0: named the victim. Above 100: killed so early that the group was never formed.
      CHECK(WIFEXITED(status) && (WEXITSTATUS(status) == 0 || WEXITSTATUS(status) > 100));
    }
  }
  CHECK(count_entries("/dev/shm") == files_before);
  CHECK(count_entries("/proc/self/fd") == descriptors_before);
}
