// All calls in any order: they must not disturb each other, nor hang when a rank dies.
#include "tests/calls.h"

using namespace gradsync;
using namespace gradsync::testing;

TEST(random_sequences_of_calls_do_not_disturb_each_other) {
  for (const bool open : {false, true}) {
    for (const int ranks : {1, 2, 3, 4}) {
      const auto body = [](Session& session) {
        std::mt19937 random(7);  // the same on every rank
        for (int call = 0; call < 300; ++call) check_random_call(session, random, 20'000);
      };
      run_threads(ranks, body, small_staging, open);
    }
  }
}

TEST(ranks_of_different_speed_wait_for_each_other) {
  run_threads(3, [](Session& session) {
    std::mt19937 random(9);
    std::mt19937 delays(static_cast<unsigned>(session.rank()));
    for (int call = 0; call < 200; ++call) {
      if (delays() % 4 == 0) ::usleep(static_cast<useconds_t>(delays() % 1000));
      check_random_call(session, random, 12'000);
    }
  });
}

namespace {

// Calls of every kind without an end; returns when one fails.
Status keep_calling(Session& session) {
  constexpr std::size_t count = 20'000;
  const auto ranks = static_cast<std::size_t>(session.size());
  Floats data(count * ranks, 1.0F);
  Floats more(count * ranks, 1.0F);
  std::vector<std::byte*> outputs;
  std::vector<const std::byte*> inputs;
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    outputs.push_back(bytes(data) + rank * count * sizeof(float));
    inputs.push_back(bytes(more) + rank * count * sizeof(float));
  }
  std::vector<std::size_t> counts(ranks, count);
  const Deadline late = Deadline::after(20);
  Status status;
  std::mt19937 random(3);
  while (status.ok()) {
    const int root = static_cast<int>(random() % ranks);
    const bool is_root = session.rank() == root;
    counts[0] = random() % count;
    switch (random() % 9) {
      case 0: status = session.barrier(late); break;
      case 1: status = session.all_reduce(bytes(data), count, Dtype::f32, Reduce::max, late); break;
      case 2: status = session.broadcast(bytes(data), count, Dtype::f32, root, late); break;
      case 3:
        status = session.reduce(bytes(data), count, Dtype::f32, Reduce::max, root, late);
        break;
      case 4: status = session.all_gather(bytes(more), count, Dtype::f32, outputs, late); break;
      case 5:
        status = session.gather(bytes(more), count, Dtype::f32,
                                is_root ? outputs : std::vector<std::byte*>{}, root, late);
        break;
      case 6:
        status = session.scatter(is_root ? inputs : std::vector<const std::byte*>{}, bytes(data),
                                 count, Dtype::f32, root, late);
        break;
      case 7:
        status = session.reduce_scatter(inputs, counts, bytes(data), Dtype::f32, Reduce::max, late);
        break;
      default:
        counts[0] = count;
        status = session.all_to_all({inputs, counts}, {outputs, counts}, Dtype::f32, late);
    }
  }
  return status;
}

}  // namespace

// The main fault test: ranks in the middle of mixed traffic, one killed at a random moment, again
// and again. Nobody hangs, the survivors name the victim, nothing is left behind.
TEST(killed_at_random_points_nobody_hangs_and_nothing_is_left) {
  const int files_before = count_entries("/dev/shm");
  const int descriptors_before = count_entries("/proc/self/fd");
  std::mt19937 random(1);
  int formed = 0;
  for (int round = 0; round < 300; ++round) {
    const int ranks = 2 + static_cast<int>(random() % 3);
    const int victim = static_cast<int>(random() % static_cast<unsigned>(ranks));
    const auto pids = fork_ranks(ranks, [victim](Session& session) {
      const Status status = keep_calling(session);
      return status.code == Code::peer_lost && status.ranks == std::vector<int>{victim} ? 0 : 1;
    });
    // On a slow machine (an emulated one) the kill must come later, or no group is ever formed.
    const unsigned longest_us = formed < round ? 40'000 : 6'000;
    ::usleep(static_cast<useconds_t>(random() % longest_us));
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
      if (WEXITSTATUS(status) == 0) ++formed;
    }
  }
  CHECK(formed > 100);  // most rounds must get as far as their calls
  CHECK(count_entries("/dev/shm") == files_before);
  CHECK(count_entries("/proc/self/fd") == descriptors_before);
}
