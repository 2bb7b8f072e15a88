#include <chrono>
#include <cmath>
#include <filesystem>
#include <fstream>

#include "common/cgroup.h"
#include "common/cores.h"
#include "sync/relocation.h"
#include "tests/ranks.h"

using namespace gradsync;
using namespace gradsync::testing;

TEST(patience_spins_only_when_every_rank_has_a_core) {
  CHECK(patience_for(2, 2).spins > 0);
  CHECK(patience_for(3, 2).spins == 0);
  CHECK(patience_for(4, 2).yields > 0);
}

TEST(cores_come_from_the_mask_and_the_quota) {
  CpuMask mask;
  mask.words[0] = 0b1011;
  CHECK(usable_cores(mask, 100.0) == 3);
  CHECK(usable_cores(mask, 1.5) == 1);
  CHECK(usable_cores(mask, 0.2) == 1);
  CpuMask other;
  other.words[15] = 1;
  mask.merge(other);
  CHECK(mask.count() == 4);
  CHECK(affinity_mask().count() >= 1);
}

TEST(a_rank_moves_rarely_where_calls_wait_long_after_it) {
  using std::chrono::milliseconds;
  const auto began = Deadline::Clock::now();
  const auto calls = [](Relocation& relocation, milliseconds waited) {
    int count = 0;
    for (; relocation.is_judged(); ++count) relocation.count(waited);
    return count;
  };
  Relocation crowded(true);
  CHECK(crowded.due(began));
  CHECK(!crowded.due(began + milliseconds(100)));  // not judged yet
  CHECK(calls(crowded, milliseconds(0)) > 1);
  CHECK(!crowded.due(began));
  CHECK(crowded.due(began + milliseconds(1)));
  auto moved = began + milliseconds(1);
  for (const int pause : {8, 64, 512, 4000, 4000}) {
    calls(crowded, milliseconds(1));
    CHECK(!crowded.due(moved + milliseconds(pause - 1)));
    moved += milliseconds(pause);
    CHECK(crowded.due(moved));
  }
  calls(crowded, milliseconds(0));
  CHECK(crowded.due(moved + milliseconds(1)));
  Relocation roomy(false);
  CHECK(roomy.due(began));
  CHECK(calls(roomy, milliseconds(1)) == 0);
  CHECK(roomy.due(began + milliseconds(1)));
}

TEST(quota_is_the_least_on_the_way_up) {
  namespace fs = std::filesystem;
  const fs::path root =
      fs::temp_directory_path() / ("gradsync-cores-" + std::to_string(::getpid()));
  fs::create_directories(root / "a/b");
  std::ofstream(root / "self") << "0::/a/b\n";
  std::ofstream(root / "a/b/cpu.max") << "max 100000\n";
  std::ofstream(root / "a/cpu.max") << "150000 100000\n";
  CHECK(cgroup_cpus(root, root / "self") == 1.5);
  std::ofstream(root / "a/cpu.max") << "max 100000\n";
  CHECK(std::isinf(cgroup_cpus(root, root / "self")));
  fs::create_directories(root / "cpu,cpuacct/job");
  std::ofstream(root / "self") << "3:cpu,cpuacct:/job\n";
  std::ofstream(root / "cpu,cpuacct/job/cpu.cfs_quota_us") << "50000\n";
  std::ofstream(root / "cpu,cpuacct/job/cpu.cfs_period_us") << "100000\n";
  CHECK(cgroup_cpus(root, root / "self") == 0.5);
  fs::remove_all(root);
}

TEST(barrier_holds_everyone_until_the_last) {
  std::atomic<int> arrived{0};
  run_threads(4, [&](Session& session) {
    for (int round = 1; round <= 200; ++round) {
      arrived.fetch_add(1);
      CHECK_OK(session.barrier(Deadline::after(30)));
      CHECK(arrived.load() >= 4 * round);
      CHECK_OK(session.barrier(Deadline::after(30)));
    }
  });
}

TEST(timeout_names_the_missing_and_breaks_the_group) {
  run_threads(3, [](Session& session) {
    if (session.rank() == 2) return;  // leaves only when the others are done: see below
    const Status status = session.barrier(Deadline::after(0.05));
    // Rank 2 ends its thread at once, so it may have left before the deadline.
    CHECK(status.code == Code::timeout || status.code == Code::peer_lost);
    CHECK(status.ranks == std::vector<int>{2});
    CHECK(session.barrier(Deadline::after(10)).code == status.code);
  });
}

TEST(late_rank_is_a_timeout_with_its_number) {
  std::atomic<int> done{0};
  // Of the test, not of each rank: the first whose time is over ends the wait of the other.
  const auto start = std::chrono::steady_clock::now();
  run_threads(3, [&](Session& session) {
    if (session.rank() == 1) {
      while (done.load() < 2) ::usleep(1000);
      return;
    }
    const Status status = session.barrier(Deadline::after(0.1));
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    CHECK(status.code == Code::timeout);
    CHECK(status.ranks == std::vector<int>{1});
    CHECK(took.count() >= 0.1);
    done.fetch_add(1);
  });
}

TEST(rank_that_fails_tells_why) {
  run_threads(2, [](Session& session) {
    if (session.rank() == 1) {
      session.leave("ValueError: bad batch");
      return;
    }
    const Status status = session.barrier(Deadline::after(10));
    CHECK(status.code == Code::peer_lost);
    CHECK(status.ranks == std::vector<int>{1});
    CHECK(status.message.find("ValueError: bad batch") != std::string::npos);
  });
}

TEST(rank_that_went_because_of_another_is_not_blamed) {
  Teams teams(3);
  for (Team& team : teams.each) (void)team.enter(Deadline::after(0));
  teams[1].publish(2);
  teams[0].publish(3);
  teams[1].leave("the cause");
  teams[0].leave("rank 1 is gone");
  const Status status = teams[2].wait_for(0, 4, Deadline::after(10));
  CHECK(status.code == Code::peer_lost);
  CHECK(status.ranks == std::vector<int>{1});
}

TEST(rank_that_leaves_after_its_last_call_harms_nobody) {
  for (int round = 0; round < 50; ++round) {
    run_threads(3, [](Session& session) { CHECK_OK(session.barrier(Deadline::after(10))); });
  }
}

TEST(abort_reaches_everyone_with_the_first_reason) {
  run_threads(3, [](Session& session) {
    if (session.rank() == 0) session.abort("the first");
    const Status status = session.barrier(Deadline::after(10));
    CHECK(status.code == Code::aborted);
    CHECK(status.message == "the first");
    CHECK(status.ranks == std::vector<int>{0});
  });
}

TEST(killed_rank_is_named_within_100_ms) {
  for (int victim = 0; victim < 3; ++victim) {
    const auto pids = fork_ranks(3, [victim](Session& session) {
      if (session.rank() == victim) {
        ::usleep(50'000);
        ::kill(::getpid(), SIGKILL);
      }
      const Status status = session.barrier(Deadline::after(20));
      const bool right = status.code == Code::peer_lost &&
                         status.ranks == std::vector<int>{victim} &&
                         status.message.find("process is gone") != std::string::npos;
      return right ? 0 : 1;
    });
    CHECK(WIFSIGNALED(exit_status(pids[static_cast<std::size_t>(victim)], 10)));
    const auto start = std::chrono::steady_clock::now();
    for (int rank = 0; rank < 3; ++rank) {
      if (rank != victim) CHECK(exit_status(pids[static_cast<std::size_t>(rank)], 10) == 0);
    }
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    CHECK(took.count() < 0.1);
  }
}

TEST(how_a_process_ended_is_told) {
  for (const bool killed : {true, false}) {
    const pid_t pid = ::fork();
    if (pid == 0) {
      if (killed) ::kill(::getpid(), SIGKILL);
      ::_exit(3);
    }
    std::vector<Fd> pidfds(1);
    CHECK_OK(open_pidfd(pid, pidfds[0]));
    const Liveness liveness(std::move(pidfds));
    const Deadline deadline = Deadline::after(5);
    while (liveness.dead().empty()) CHECK(!deadline.expired());
    const std::string how = liveness.how_it_ended(0, pid);
    CHECK(how == (killed ? "killed by signal 9 (SIGKILL)" : "exited with code 3"));
    CHECK(exit_status(pid, 5) != -1);
  }
}

TEST(child_of_a_dead_rank_does_not_keep_it_alive) {
  const auto pids = fork_ranks(2, [](Session& session) {
    if (session.rank() == 1) {
      if (::fork() == 0) {  // inherits every descriptor and mapping, like a data-loader worker
        ::usleep(400'000);
        ::_exit(0);
      }
      ::kill(::getpid(), SIGKILL);
    }
    const Status status = session.barrier(Deadline::after(0.3));
    return status.code == Code::peer_lost ? 0 : 1;
  });
  CHECK(WIFSIGNALED(exit_status(pids[1], 10)));
  CHECK(exit_status(pids[0], 10) == 0);
}

TEST(forked_child_is_refused_and_its_end_harms_nobody) {
  const auto pids = fork_ranks(2, [](Session& session) {
    if (session.rank() == 0) {
      const pid_t child = ::fork();
      if (child == 0) {
        const Code code = session.barrier(Deadline::after(5)).code;
        session.leave("");  // as the destructor would
        ::_exit(code == Code::invalid ? 0 : 1);
      }
      if (exit_status(child, 5) != 0) return 1;
    }
    return session.barrier(Deadline::after(5)).ok() ? 0 : 2;
  });
  CHECK(exit_status(pids[0], 10) == 0);
  CHECK(exit_status(pids[1], 10) == 0);
}

TEST(who_waits_for_a_message_leaves_the_core_of_a_rank_before_it) {
  CpuMask allowed;
  CHECK(sched_getaffinity(0, sizeof(allowed.words),
                          reinterpret_cast<cpu_set_t*>(allowed.words.data())) == 0);
  if (allowed.count() < 2) return;  // there is nowhere to go
  Segment segment;
  CHECK_OK(Segment::create(segment_bytes(2, small_staging), segment));
  // The scheduler may have other ideas at any moment, but not each time.
  for (int attempt = 0; attempt < 50; ++attempt) {
    Team::format(segment.data(), 2, small_staging);
    Team first(segment.data(), 0, 2, Liveness());
    Team second(segment.data(), 1, 2, Liveness());
    first.part_from(1);  // says where it is, and stays
    second.part_from(0);
    if (static_cast<std::uint32_t>(sched_getcpu()) != first.slots()[0].core.load()) return;
  }
  CHECK(!"moved");
}
