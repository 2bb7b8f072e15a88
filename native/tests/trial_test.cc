// Calls that may be staged or read directly: which way they go, and that both are right.
#include "algo/trial.h"

#include <map>
#include <set>

#include "memory/segment.h"
#include "tests/calls.h"

using namespace gradsync;
using namespace gradsync::testing;
using namespace std::chrono_literals;

namespace {

constexpr std::size_t piece = 100'000;  // bytes

// What two ranks know of a kind of call after they have tried it.
struct Tried {
  Segment segment;
  std::vector<std::unique_ptr<Team>> teams;
  std::vector<Trial> trials;

  Tried() {
    CHECK_OK(Segment::create(segment_bytes(2, small_staging), segment));
    Team::format(segment.data(), 2, small_staging);
    for (int rank = 0; rank < 2; ++rank) {
      teams.push_back(std::make_unique<Team>(segment.data(), rank, 2, Liveness()));
      trials.emplace_back(*teams.back());
    }
  }
  // One call, in which the ranks of `readers` read; returns whether it goes directly.
  bool call(const Trial::Part& part, std::vector<std::size_t> readers, Trial::Time direct,
            Trial::Time staged, bool any_shared = false) {
    const bool directly = trials[0].goes_directly(part);
    CHECK(trials[1].goes_directly(part) == directly);
    for (Trial& trial : trials) trial.count(part, any_shared, true);
    if (any_shared) return directly;
    for (const std::size_t rank : readers) {
      trials[rank].note(part, directly, directly ? direct : staged);
      trials[rank].note(part, directly, 1s);  // something came between
    }
    return directly;
  }
  // How many of some calls go directly.
  int calls(int count, const Trial::Part& part, Trial::Time direct, Trial::Time staged,
            bool any_shared = false) {
    int found = 0;
    for (int i = 0; i < count; ++i) {
      // The second time that they are asked: by then both have seen what either says.
      for (Trial& trial : trials) (void)trial.goes_directly(part);
      found += call(part, {0, 1}, direct, staged, any_shared) ? 1 : 0;
    }
    return found;
  }
};

constexpr Trial::Part gathering{Trial::Op::gather, piece};

}  // namespace

TEST(half_of_the_first_calls_go_directly_and_then_all_or_none) {
  Tried slow;
  CHECK(slow.calls(16, gathering, 20us, 10us) == 8);
  CHECK(slow.calls(5, gathering, 20us, 10us) == 0);
  CHECK(slow.calls(16, {Trial::Op::scatter, piece}, 10us, 20us) == 8);
  CHECK(slow.calls(5, {Trial::Op::scatter, piece}, 10us, 20us) == 5);
}

TEST(one_rank_that_found_staging_faster_is_enough) {
  Tried tried;
  for (int i = 0; i < 16; ++i) (void)tried.call(gathering, {1}, 20us, 10us);
  CHECK(tried.calls(5, gathering, 20us, 10us) == 0);
}

TEST(a_rank_that_has_not_seen_both_does_not_object) {
  Tried tried;
  for (int i = 0; i < 16; ++i) {
    const bool directly = tried.trials[0].goes_directly(gathering);
    (void)tried.call(gathering, {directly ? 0UL : 1UL}, 20us, 10us);
  }
  CHECK(tried.calls(5, gathering, 20us, 10us) == 5);
}

TEST(whoever_reads_sees_both_ways) {
  const auto check = [](const auto& root_of) {
    Tried tried;
    std::map<int, std::set<bool>> seen;
    for (int i = 0; i < 16; ++i) seen[root_of(i)].insert(tried.call(gathering, {0}, 20us, 10us));
    for (const auto& [root, ways] : seen) CHECK(ways.size() == 2);
  };
  for (const int roots : {1, 2, 3, 4, 5, 6}) check([roots](int call) { return call % roots; });
  for (const int in_a_row : {3, 4, 5, 8}) {
    check([in_a_row](int call) { return std::min(call / in_a_row, 16 / in_a_row - 1); });
  }
}

TEST(mixtures_of_shared_and_private_memory_go_directly_and_tell_nothing) {
  Tried tried;
  (void)tried.calls(1, gathering, 20us, 10us, true);
  CHECK(tried.calls(30, gathering, 20us, 10us, true) == 30);
  CHECK(tried.calls(1, gathering, 20us, 10us) == 1);  // none has seen yet that they have ended
  CHECK(tried.calls(16, gathering, 20us, 10us) == 8);
  CHECK(tried.calls(5, gathering, 20us, 10us) == 0);
}

TEST(what_takes_very_long_is_staged_so_that_it_makes_steps) {
  Tried tried;
  CHECK(tried.calls(20, {Trial::Op::gather, (64UL << 20) + 1}, 10us, 20us) == 0);
}

TEST(what_is_never_read_directly_is_no_part_of_a_trial) {
  Tried tried;
  CHECK(tried.calls(16, {Trial::Op::gather, std::size_t{100} << 20}, 10us, 20us) == 0);
  constexpr Trial::Part large{Trial::Op::gather, std::size_t{60} << 20};
  CHECK(tried.calls(16, large, 20us, 10us) == 8);
  CHECK(tried.calls(5, large, 20us, 10us) == 0);
}

TEST(calls_of_one_kind_are_compared_by_what_a_byte_takes) {
  Tried tried;
  (void)tried.calls(2, {Trial::Op::gather, std::size_t{8} << 20}, 8ms, 2ms);
  constexpr Trial::Part large{Trial::Op::gather, std::size_t{60} << 20};
  (void)tried.calls(14, large, 60ms, 18ms);
  CHECK(tried.calls(5, large, 60ms, 18ms) == 0);
}

TEST(kinds_are_apart_by_operation_and_by_size) {
  const auto kind = [](Trial::Op op, std::size_t bytes) { return Trial::Part{op, bytes}.kind(); };
  constexpr auto op = Trial::Op::all_to_all;
  CHECK(kind(op, 16 * 1024) == kind(op, 32 * 1024 - 1));
  CHECK(kind(op, 16 * 1024) + 1 == kind(op, 32 * 1024));
  CHECK(kind(op, 8 << 20) == kind(op, std::size_t{1} << 40));
  CHECK(kind(op, 8 << 20) + 1 == kind(Trial::Op::broadcast, 1));
  CHECK(kind(Trial::Op::scatter, std::size_t{1} << 40) < 64);
}

TEST(calls_are_right_before_while_and_after_they_are_tried) {
  constexpr int ranks = 3;
  const auto body = [](Session& session) {
    for (const std::size_t count : {5'000UL, 40'000UL}) {
      for (int call = 0; call < 20; ++call) {
        const int root = call % ranks;
        check_all_gather(session, count, call % 2 == 0);
        check_gather(session, count, root);
        check_scatter(session, count, root);
        check_reduce_scatter(session, evenly(session, count), call % 2 == 0);
        check_all_to_all(session, std::vector<std::size_t>(ranks * ranks, count));
        check_broadcast(session, count, root);
      }
    }
  };
  run_threads(ranks, body, small_staging, true);
}
