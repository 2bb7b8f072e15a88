// Collectives on tensors in the arena: that they move nothing through the staging space.
#include <cstring>

#include "algo/algorithm.h"
#include "memory/segment.h"
#include "tests/calls.h"

using namespace gradsync;
using namespace gradsync::testing;

namespace {

constexpr std::size_t count = 50'000;
constexpr auto mark = std::byte{0xA5};
// Where the ranks tell each other their places.
constexpr std::size_t header = 256;

// One rank with tensors in the arena: its own, and one for each rank to give and to get.
struct Rank {
  Team team;
  Staging staging;
  float* mine = nullptr;
  std::vector<const std::byte*> given;
  std::vector<std::byte*> got;
  std::vector<std::size_t> counts;

  Rank(std::byte* memory, int rank, int ranks, Arena& arena)
      : team(memory, rank, ranks, Liveness()),
        staging(team, &arena),
        counts(static_cast<std::size_t>(ranks), count) {
    CHECK_OK(team.enter(soon()));
    mine = make(arena, 0);
    for (int piece = 0; piece < ranks; ++piece) {
      given.push_back(reinterpret_cast<const std::byte*>(make(arena, piece)));
      got.push_back(reinterpret_cast<std::byte*>(make(arena, -1)));
    }
    std::memset(team.staging(rank), static_cast<int>(mark), team.staging_bytes());
  }

  float* make(Arena& arena, int piece) {
    std::byte* data = nullptr;
    CHECK_OK(arena.allocate(team.rank(), count * sizeof(float), data));
    const Floats values = filled(team.rank(), count, piece);
    std::memcpy(data, values.data(), count * sizeof(float));
    return reinterpret_cast<float*>(data);
  }
  std::byte* own() { return reinterpret_cast<std::byte*>(mine); }
  Floats received(int from) const {
    const auto* const data = reinterpret_cast<const float*>(got[static_cast<std::size_t>(from)]);
    return {data, data + count};
  }
  void check_untouched() const {
    const std::byte* const begin = team.staging(team.rank());
    for (std::size_t at = 0; at < team.staging_bytes(); ++at) {
      if (at % staging.capacity() >= header) CHECK(begin[at] == mark);
    }
  }
};

void run_shared(int ranks, const std::function<void(Rank&)>& body) {
  const std::size_t size = segment_bytes(static_cast<std::size_t>(ranks), small_staging);
  Segment segment;
  CHECK_OK(Segment::create(size, size, segment));
  std::shared_ptr<Arena> arena;
  CHECK_OK(Arena::create(ranks, arena));
  Team::format(segment.data(), ranks, small_staging, false);
  std::vector<std::thread> threads;
  for (int number = 0; number < ranks; ++number) {
    threads.emplace_back([&, number] {
      Rank rank(segment.data(), number, ranks, *arena);
      CHECK_OK(barrier(rank.team, soon()));
      body(rank);
      rank.check_untouched();
      rank.team.leave("");
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace

TEST(tensors_in_the_arena_are_read_where_they_are) {
  for (const int ranks : {2, 3}) {
    run_shared(ranks, [ranks](Rank& r) {
      const int rank = r.team.rank();
      const auto root_only = [&](auto list) { return rank == 1 ? list : decltype(list){}; };
      CHECK_OK(all_gather(r.team, r.staging, r.own(), count, Dtype::f32, r.got, soon()));
      for (int from = 0; from < ranks; ++from) CHECK(r.received(from) == filled(from, count));

      CHECK_OK(all_to_all(r.team, r.staging, {r.given, r.counts}, {r.got, r.counts}, Dtype::f32,
                          soon()));
      for (int from = 0; from < ranks; ++from) CHECK(r.received(from) == filled(from, count, rank));

      CHECK_OK(
          gather(r.team, r.staging, r.given[0], count, Dtype::f32, root_only(r.got), 1, soon()));
      CHECK(rank != 1 || r.received(0) == filled(0, count));

      CHECK_OK(
          scatter(r.team, r.staging, root_only(r.given), r.got[0], count, Dtype::f32, 1, soon()));
      CHECK(r.received(0) == filled(1, count, rank));

      CHECK_OK(reduce_scatter(r.team, r.staging, r.given, r.counts, r.got[0], Dtype::f32,
                              Reduce::sum, soon()));
      CHECK(r.received(0) == summed(ranks, count, rank));

      CHECK_OK(reduce(r.team, r.staging, r.own(), count, Dtype::f32, Reduce::sum, 1, soon()));
      CHECK(Floats(r.mine, r.mine + count) ==
            (rank == 1 ? summed(ranks, count) : filled(rank, count)));

      CHECK_OK(broadcast(r.team, r.staging, r.own(), count, Dtype::f32, 0, soon()));
      CHECK(Floats(r.mine, r.mine + count) == filled(0, count));
    });
  }
}
