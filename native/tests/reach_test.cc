// Ranks that read each other's memory: who is reached, what is not offered, who gives up.
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>

#include <fstream>

#include "tests/calls.h"

using namespace gradsync;
using namespace gradsync::testing;

namespace {

// Memory that only its own process can read, which the kernel refuses to others; null where the
// kernel has no such thing.
float* secret_floats(std::size_t count) {
#ifdef SYS_memfd_secret
  const Fd file(static_cast<int>(::syscall(SYS_memfd_secret, 0)));
  const std::size_t bytes = count * sizeof(float);
  if (file.get() < 0 || ::ftruncate(file.get(), static_cast<off_t>(bytes)) != 0) return nullptr;
  void* const memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file.get(), 0);
  return memory == MAP_FAILED ? nullptr : static_cast<float*>(memory);
#else
  (void)count;
  return nullptr;
#endif
}

}  // namespace

TEST(neighbours_are_reached_by_their_beacon_and_not_by_their_number_alone) {
  std::uint64_t value = 0x1234;
  const Beacon right{reinterpret_cast<std::uint64_t>(&value), value};
  CHECK(Neighbour::find(::getpid(), right).reachable());
  CHECK(!Neighbour::find(::getpid(), {right.address, value + 1}).reachable());
  CHECK(!Neighbour::find(::getpid(), {0, value}).reachable());
  CHECK(!Neighbour::find(0, right).reachable());
  const Pipe ready;
  const pid_t pid = ::fork();
  CHECK(pid >= 0);
  if (pid == 0) {
    value = 0x5678;
    ready.send("x", 1);
    ::pause();
  }
  char told = 0;
  ready.receive(&told, 1);
  CHECK(!Neighbour::find(pid, right).reachable());
  const Neighbour child = Neighbour::find(pid, {right.address, 0x5678});
  CHECK(child.reachable());
  std::uint64_t theirs = 0;
  CHECK(child.read(reinterpret_cast<std::byte*>(&theirs), right.address, sizeof(theirs)));
  CHECK(theirs == 0x5678 && value == 0x1234);
  CHECK(!child.read(reinterpret_cast<std::byte*>(&theirs), 0, sizeof(theirs)));
  ::kill(pid, SIGKILL);
  (void)exit_status(pid, 10);
  CHECK(!child.read(reinterpret_cast<std::byte*>(&theirs), right.address, sizeof(theirs)));
}

TEST(memory_that_cannot_be_read_is_not_offered) {
  const std::vector<std::byte> good(10);
  const std::byte* const places[] = {good.data(), nullptr};
  CHECK(can_be_reached(places, good.size()));
  auto* const hole = static_cast<std::byte*>(
      ::mmap(nullptr, page_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  const std::byte* const bad[] = {good.data(), hole};
  CHECK(!can_be_reached(bad, 1));
  ::munmap(hole, page_bytes);
}

TEST(one_rank_whose_memory_is_secret_makes_all_ranks_stage) {
  static constexpr std::size_t count = 30'000;  // 120 KB
  constexpr int ranks = 3;
  const auto body = [](Session& session) {
    const int rank = session.rank();
    Floats own = filled(rank, ranks * count);
    float* const secret = rank == 1 ? secret_floats(own.size()) : nullptr;
    float* const data = secret != nullptr ? secret : own.data();
    std::copy(own.begin(), own.end(), data);
    auto* const input = reinterpret_cast<std::byte*>(data);
    List all = List::empty({count, count, count});
    CHECK_OK(session.all_gather(input, count, Dtype::f32, all.outputs(), soon()));
    for (int peer = 0; peer < ranks; ++peer) {
      CHECK(all.tensors[static_cast<std::size_t>(peer)] == filled(peer, count));
    }
    const std::vector<const std::byte*> pieces{input, input + count * 4, input + 2 * count * 4};
    const std::vector<std::size_t> counts(ranks, count);
    CHECK_OK(session.all_to_all({pieces, counts}, {all.outputs(), counts}, Dtype::f32, soon()));
    for (int peer = 0; peer < ranks; ++peer) {
      const Floats whole = filled(peer, ranks * count);
      const auto begin = whole.begin() + static_cast<std::ptrdiff_t>(count) * rank;
      CHECK(std::equal(begin, begin + count, all.tensors[static_cast<std::size_t>(peer)].begin()));
    }
    Floats part(count);
    CHECK_OK(session.reduce_scatter(pieces, counts, bytes(part), Dtype::f32, Reduce::sum, soon()));
    const Floats sum = summed(ranks, ranks * count);
    CHECK(std::equal(part.begin(), part.end(),
                     sum.begin() + static_cast<std::ptrdiff_t>(count) * rank));
    const auto from = rank == 1 ? pieces : std::vector<const std::byte*>{};
    CHECK_OK(session.scatter(from, bytes(part), count, Dtype::f32, 1, soon()));
    const Floats given = filled(1, ranks * count);
    CHECK(std::equal(part.begin(), part.end(),
                     given.begin() + static_cast<std::ptrdiff_t>(count) * rank));
    CHECK_OK(session.gather(input, count, Dtype::f32,
                            rank == 0 ? all.outputs() : std::vector<std::byte*>{}, 0, soon()));
    CHECK(rank != 0 || all.tensors[1] == filled(1, count));
    CHECK_OK(session.broadcast(input, count, Dtype::f32, 1, soon()));
    CHECK(std::equal(data, data + count, filled(1, count).begin()));
    if (secret != nullptr) ::munmap(secret, own.size() * sizeof(float));
  };
  run_threads(ranks, body, small_staging, true);
}

TEST(ranks_in_processes_read_each_other_where_the_kernel_lets_them) {
  std::ifstream file("/proc/sys/kernel/yama/ptrace_scope");
  int scope = 0;
  file >> scope;
  std::uint64_t word = 1, copy = 0;
  const iovec from{&word, sizeof(word)}, to{&copy, sizeof(copy)};
  if (scope != 0 || ::process_vm_readv(::getpid(), &to, 1, &from, 1, 0) < 0) return;
  for (const pid_t pid : fork_ranks(2, [](Session& session) {
         (void)session.reads_directly();     // looks, at the first time
         CHECK_OK(session.barrier(soon()));  // who has come there has looked
         return session.reads_directly() ? 0 : 1;
       })) {
    CHECK(exit_status(pid, 30) == 0);
  }
}

TEST(what_was_read_from_a_rank_that_gave_up_does_not_count) {
  Teams teams(2);
  std::thread other([&] { CHECK_OK(teams[1].enter(soon())); });
  CHECK_OK(teams[0].enter(soon()));
  other.join();
  CHECK(!teams[1].is_open());  // not before all have looked
  CHECK(teams[0].is_open());
  std::uint64_t theirs = 7;
  std::uint64_t mine = 0;
  const auto read = [&] {
    return teams[0].read_from(1, reinterpret_cast<std::byte*>(&mine),
                              reinterpret_cast<std::uint64_t>(&theirs), sizeof(mine), soon());
  };
  CHECK_OK(read());
  CHECK(mine == 7);
  teams[1].withdraw();
  CHECK(read().code == Code::system);
  CHECK(teams[1].check_aborted().code == Code::aborted);  // nobody waits for rank 0 any more
}
