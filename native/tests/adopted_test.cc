// Private memory whose pages become shared ones where they are.
#include "memory/adopted.h"

#include <sys/mman.h>
#include <sys/resource.h>

#include <algorithm>
#include <cstring>
#include <thread>
#include <vector>

#include "algo/algorithm.h"
#include "common/pages.h"
#include "tests/calls.h"

using namespace gradsync;
using namespace gradsync::testing;

namespace {

constexpr std::size_t length = 40 * page_bytes;

// A tensor that begins and ends within pages, with something else before and after it.
struct Surrounded {
  std::vector<std::byte> all;
  std::byte* data;

  explicit Surrounded(std::size_t before = page_bytes + 100)
      : all(length + 4 * page_bytes, std::byte{1}) {
    data = all.data() + before;
    std::fill_n(data, length, std::byte{2});
  }
  bool has(std::byte value) const {
    return std::all_of(data, data + length, [&](std::byte each) { return each == value; });
  }
  bool is_alone() const {
    const auto is_one = [](std::byte each) { return each == std::byte{1}; };
    return std::all_of(all.data(), static_cast<const std::byte*>(data), is_one) &&
           std::all_of(static_cast<const std::byte*>(data) + length, all.data() + all.size(),
                       is_one);
  }
};

struct World {
  std::shared_ptr<Arena> arena;
  std::unique_ptr<Adopted> adopted;

  World() { CHECK_OK(Arena::create(1, arena)); }
  Status adopt(std::byte* data, std::size_t wanted = length,
               Adopted::InChild in_child = Adopted::InChild::copy) {
    return Adopted::adopt(arena, 0, data, wanted, in_child, adopted);
  }
  std::byte* seen_by_others(const std::byte* data) const {
    return arena->at(Adopted::place_of(*arena, data, length));
  }
};

}  // namespace

TEST(adopted_memory_keeps_its_address_and_what_is_in_it) {
  Surrounded tensor;
  World world;
  CHECK_OK(world.adopt(tensor.data));
  CHECK(tensor.has(std::byte{2}));
  std::byte* const other = world.seen_by_others(tensor.data);
  CHECK(other != tensor.data);
  Adopted::copy_edges(other, tensor.data, length);
  CHECK(std::equal(tensor.data, tensor.data + length, other));
  std::fill_n(other, length, std::byte{3});
  Adopted::copy_edges(tensor.data, other, length);
  CHECK(tensor.has(std::byte{3}));
  CHECK(tensor.is_alone());
}

TEST(memory_is_private_again_afterwards) {
  Surrounded tensor;
  World world;
  CHECK_OK(world.adopt(tensor.data));
  std::byte* const other = world.seen_by_others(tensor.data);
  world.adopted.reset();
  CHECK(tensor.has(std::byte{2}));
  CHECK(Adopted::place_of(*world.arena, tensor.data, length) == 0);
  other[length / 2] = std::byte{9};
  CHECK(tensor.has(std::byte{2}));
  // And can be adopted once more.
  CHECK_OK(world.adopt(tensor.data));
  world.adopted->dies_with_memory();
  world.adopted.reset();
  CHECK(tensor.data[length / 2] == std::byte{0});
  CHECK(tensor.is_alone());
}

TEST(only_the_very_tensor_counts_as_adopted) {
  Surrounded tensor;
  World world, another;
  CHECK_OK(world.adopt(tensor.data));
  CHECK(Adopted::place_of(*world.arena, tensor.data, length) != 0);
  CHECK(Adopted::place_of(*world.arena, tensor.data, length - 1) == 0);
  CHECK(Adopted::place_of(*world.arena, tensor.data + 1, length - 1) == 0);
  CHECK(Adopted::place_of(*another.arena, tensor.data, length) == 0);
}

TEST(memory_that_is_not_private_is_not_adopted) {
  Surrounded tensor;  // outlives its adoption
  World world;
  const auto map = [](int rights, int flags) {
    return static_cast<std::byte*>(::mmap(nullptr, length, rights, flags | MAP_ANONYMOUS, -1, 0));
  };
  std::byte* const shared = map(PROT_READ | PROT_WRITE, MAP_SHARED);
  std::byte* const fixed = map(PROT_READ, MAP_PRIVATE);
  std::byte* const holed = map(PROT_READ | PROT_WRITE, MAP_PRIVATE);
  ::munmap(holed + 20 * page_bytes, page_bytes);
  for (std::byte* const data : {shared, fixed, holed}) {
    CHECK(world.adopt(data).code == Code::invalid);
    ::munmap(data, length);
  }
  CHECK(world.adopt(tensor.data, 17 * page_bytes).code == Code::invalid);  // too small
  CHECK_OK(world.adopt(tensor.data));
  World another;
  CHECK(another.adopt(tensor.data).code == Code::invalid);  // it is the first one's
  CHECK(tensor.has(std::byte{2}));
}

TEST(there_is_a_limit) {
  World world;
  const std::size_t many = Adopted::most_bytes + page_bytes;
  void* const data =
      ::mmap(nullptr, many, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  CHECK(world.adopt(static_cast<std::byte*>(data), many).code == Code::no_space);
  // Not for what no child copies.
  CHECK_OK(world.adopt(static_cast<std::byte*>(data), many, Adopted::InChild::view));
  Surrounded tensor;
  World another;
  CHECK_OK(another.adopt(tensor.data));
  world.adopted.reset();
  ::munmap(data, many);
}

TEST(what_a_forked_child_writes_to_a_view_is_its_own) {
  Surrounded tensor;
  World world;
  CHECK_OK(world.adopt(tensor.data, length, Adopted::InChild::view));
  const Pipe told;
  const pid_t child = ::fork();
  if (child == 0) {
    const bool was = tensor.has(std::byte{2});
    std::fill_n(tensor.data, length / 2, std::byte{5});
    told.send("x", 1);
    const pid_t grandchild = ::fork();
    if (grandchild == 0) ::_exit(tensor.data[0] == std::byte{5} ? 0 : 1);
    const bool is_well = exit_status(grandchild, 30) == 0;
    world.adopted.reset();
    std::fill_n(tensor.data, length, std::byte{6});
    ::_exit(was && is_well && tensor.has(std::byte{6}) && tensor.is_alone() ? 0 : 1);
  }
  char byte = 0;
  told.receive(&byte, 1);
  CHECK(tensor.has(std::byte{2}));
  CHECK(exit_status(child, 30) == 0);
  CHECK(tensor.has(std::byte{2}));
}

TEST(a_fork_needs_no_descriptor) {
  Surrounded tensor;
  World world;
  CHECK_OK(world.adopt(tensor.data));
  std::vector<Fd> all;
  rlimit limit{};
  CHECK(::getrlimit(RLIMIT_NOFILE, &limit) == 0);
  const rlimit few{64, limit.rlim_max};
  CHECK(::setrlimit(RLIMIT_NOFILE, &few) == 0);
  while (true) {
    Fd fd(::open("/dev/null", O_RDONLY | O_CLOEXEC));
    if (!fd.valid()) break;
    all.push_back(std::move(fd));
  }
  const pid_t child = ::fork();
  if (child == 0) ::_exit(tensor.has(std::byte{2}) ? 0 : 1);
  std::fill_n(tensor.data, length, std::byte{4});
  CHECK(exit_status(child, 30) == 0);
  CHECK(::setrlimit(RLIMIT_NOFILE, &limit) == 0);
}

TEST(a_forked_child_has_a_copy_of_its_own) {
  Surrounded tensor;
  World world;
  CHECK_OK(world.adopt(tensor.data));
  const Pipe told;
  const pid_t child = ::fork();
  if (child == 0) {
    char byte = 0;
    told.receive(&byte, 1);
    const bool was = tensor.has(std::byte{2});
    std::fill_n(tensor.data, length, std::byte{5});
    // A child of its own: what the first one has is private by now, and copied as anything is.
    const pid_t grandchild = ::fork();
    if (grandchild == 0) ::_exit(tensor.has(std::byte{5}) ? 0 : 1);
    const bool is_well = exit_status(grandchild, 30) == 0;
    world.adopted.reset();
    ::_exit(was && is_well && tensor.has(std::byte{5}) ? 0 : 1);
  }
  std::fill_n(tensor.data, length, std::byte{4});
  told.send("x", 1);
  CHECK(exit_status(child, 30) == 0);
  CHECK(tensor.has(std::byte{4}));
  Adopted::copy_edges(world.seen_by_others(tensor.data), tensor.data, length);
  CHECK(std::equal(tensor.data, tensor.data + length, world.seen_by_others(tensor.data)));
}

TEST(what_a_rank_writes_after_a_call_has_failed_does_not_reach_the_tensor) {
  const std::size_t size = segment_bytes(2, small_staging);
  Segment segment;
  CHECK_OK(Segment::create(size, size, segment));
  std::shared_ptr<Arena> arena;
  CHECK_OK(Arena::create(2, arena));
  Team::format(segment.data(), 2, small_staging, false);
  Surrounded first, second;
  std::unique_ptr<Adopted> adopted[2];
  CHECK_OK(Adopted::adopt(arena, 0, first.data, length, Adopted::InChild::copy, adopted[0]));
  CHECK_OK(Adopted::adopt(arena, 1, second.data, length, Adopted::InChild::copy, adopted[1]));
  std::byte* const room = arena->at(Adopted::place_of(*arena, first.data, length));
  std::thread stopped([&] {
    // Agrees to the call, and is stopped before it is over.
    Team team(segment.data(), 1, 2, Liveness());
    CHECK_OK(team.enter(soon()));
    team.announce(pack_call(Op::all_reduce, Dtype::u8, Reduce::sum, 0), length,
                  Adopted::place_of(*arena, second.data, length));
    CHECK_OK(team.agree(soon()));
  });
  Team team(segment.data(), 0, 2, Liveness());
  Staging staging(team, arena.get());
  CHECK_OK(team.enter(soon()));
  const Status status =
      all_reduce(team, staging, first.data, length, Dtype::u8, Reduce::sum, Deadline::after(0.2));
  stopped.join();
  CHECK(status.code == Code::timeout);
  std::fill_n(first.data, length, std::byte{5});
  std::fill_n(room, length, std::byte{7});
  CHECK(first.has(std::byte{5}));
  CHECK(first.is_alone());
  // Nobody gets that room, also when the tensor has gone.
  CHECK(adopted[0]->release());
  std::byte* fresh = nullptr;
  CHECK_OK(arena->allocate(0, length, fresh));
  CHECK(fresh >= room + length || fresh + length <= room);
}

TEST(adopted_tensors_are_reduced_where_they_are) {
  static constexpr std::size_t count = 100'001;
  for (const int ranks : {2, 3}) {
    run_threads(ranks, [ranks](Session& session) {
      const int rank = session.rank();
      // Each at another place within its first page.
      Floats room(count + 1024);
      float* const data = room.data() + 16 + 100 * rank;
      std::unique_ptr<Adopted> adopted;
      const auto adopt = [&] {
        return Adopted::adopt(session.arena(), session.arena_rank(),
                              reinterpret_cast<std::byte*>(data), count * sizeof(float),
                              Adopted::InChild::view, adopted);
      };
      for (const int adopting : {1, ranks}) {  // first only rank 0, then all
        if (rank < adopting && adopted == nullptr) CHECK_OK(adopt());
        const Floats values = filled(rank, count);
        std::copy(values.begin(), values.end(), data);
        CHECK_OK(session.barrier(soon()));
        CHECK_OK(session.all_reduce(reinterpret_cast<std::byte*>(data), count, Dtype::f32,
                                    Reduce::sum, soon()));
        CHECK(Floats(data, data + count) == summed(ranks, count));
      }
      CHECK(std::all_of(room.data(), data, [](float each) { return each == 0; }));
      CHECK(std::all_of(data + count, room.data() + room.size(),
                        [](float each) { return each == 0; }));
    });
  }
}
