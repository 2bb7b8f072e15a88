#include "common/fork.h"

#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <mutex>
#include <set>

namespace gradsync {
namespace {

struct Registry {
  std::mutex mutex;
  std::set<int> fds;
};

std::atomic<std::uint64_t> generation{0};
std::uint64_t generation_of_fds = 0;  // guarded by the registry's mutex

// Never destroyed: a child may be forked while static objects are being torn down.
Registry& registry() {
  static Registry* const one = [] {
    auto* made = new Registry;
    pthread_atfork([] { registry().mutex.lock(); }, [] { registry().mutex.unlock(); },
                   [] {
                     // The list is not cleared: freeing memory is not safe here.
                     if (generation_of_fds == generation.load(std::memory_order_relaxed)) {
                       for (const int fd : registry().fds) ::close(fd);
                     }
                     generation.fetch_add(1, std::memory_order_relaxed);
                     registry().mutex.unlock();
                   });
    return made;
  }();
  return *one;
}

// The fds listed before a fork are closed in the child; their numbers may mean other files now.
void drop_stale(Registry& all) {
  const std::uint64_t now = fork_generation();
  if (generation_of_fds != now) all.fds.clear();
  generation_of_fds = now;
}

}  // namespace

std::uint64_t fork_generation() {
  (void)registry();  // from the first question on, forks are counted
  return generation.load(std::memory_order_relaxed);
}

void close_in_children(int fd) {
  Registry& all = registry();
  const std::scoped_lock lock(all.mutex);
  drop_stale(all);
  all.fds.insert(fd);
}

void forget_in_children(int fd) {
  Registry& all = registry();
  const std::scoped_lock lock(all.mutex);
  drop_stale(all);
  all.fds.erase(fd);
}

}  // namespace gradsync
