#include "memory/adopted.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "common/pages.h"

namespace gradsync {
namespace {

// A tensor of fewer whole pages is not worth two mappings.
constexpr std::size_t least_bytes = 16 * page_bytes;

std::uintptr_t number(const std::byte* address) {
  return reinterpret_cast<std::uintptr_t>(address);
}

// How far it is from an address to the next page.
std::size_t to_page(const std::byte* address) {
  return round_up(number(address), page_bytes) - number(address);
}

// A line of /proc/self/maps.
struct Mapping {
  unsigned long begin = 0, end = 0, offset = 0, inode = 0;
  std::array<char, 5> rights{};

  bool read(const char* line) {
    return std::sscanf(line, "%lx-%lx %4s %lx %*s %lu", &begin, &end, rights.data(), &offset,
                       &inode) == 5;
  }
  bool may(const char* what) const { return std::strcmp(rights.data(), what) == 0; }
};

// Whether a range is mapped all through, each part of it in the way that `is_right` wants.
template <typename IsRight>
bool is_mapped(const std::byte* begin, std::size_t bytes, IsRight is_right) {
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen("/proc/self/maps", "re"),
                                                             std::fclose);
  if (file == nullptr) return false;
  std::uintptr_t known = number(begin);
  const std::uintptr_t end = known + bytes;
  std::array<char, 1024> text{};
  bool at_start = true;  // of a line: with a long path one may not fit
  while (known < end && std::fgets(text.data(), text.size(), file.get()) != nullptr) {
    const bool is_start = std::exchange(at_start, std::strchr(text.data(), '\n') != nullptr);
    Mapping mapping;
    if (!is_start || !mapping.read(text.data()) || mapping.end <= known) continue;
    if (mapping.begin > known || !is_right(mapping)) return false;
    known = mapping.end;
  }
  return known >= end;
}

// Memory of this process alone, with nothing behind it.
bool is_private(const std::byte* begin, std::size_t bytes) {
  return is_mapped(begin, bytes, [](const Mapping& m) { return m.inode == 0 && m.may("rw-p"); });
}

// Puts private pages in place of shared ones, with the same in them.
bool make_private(std::byte* begin, std::size_t length) {
  void* const copy =
      ::mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (copy == MAP_FAILED) return false;
  std::memcpy(copy, begin, length);
  if (::mremap(copy, length, length, MREMAP_MAYMOVE | MREMAP_FIXED, begin) != MAP_FAILED) {
    return true;
  }
  ::munmap(copy, length);
  return false;
}

std::atomic<std::size_t> adopted_bytes{0};

}  // namespace

// All that this process has adopted, and what becomes of it in a fork.
struct Adoptions {
  std::mutex mutex;
  std::map<const std::byte*, const Adopted*> all;
  std::array<int, 2> pipe{-1, -1};
  std::uint64_t generation = 0;  // of the process that forks

  // Never destroyed: a child may be forked while static objects are being torn down.
  static Adoptions& registry() {
    static Adoptions* const one = [] {
      auto* made = new Adoptions;
      pthread_atfork([] { registry().before(); }, [] { registry().after_in_parent(); },
                     [] { registry().after_in_child(); });
      return made;
    }();
    return *one;
  }

  void before() {
    mutex.lock();
    generation = fork_generation();
    if (!all.empty() && ::pipe2(pipe.data(), O_CLOEXEC) != 0) pipe = {-1, -1};
  }
  void after_in_parent() {
    if (pipe[0] >= 0) {
      ::close(pipe[1]);
      // Until the child has its copy, or has died. (Without a child the pipe has no other end.)
      char byte = 0;
      while (::read(pipe[0], &byte, 1) < 0 && errno == EINTR) continue;
      ::close(pipe[0]);
      pipe = {-1, -1};
    }
    mutex.unlock();
  }
  void after_in_child() {
    // Only calls that are safe in the child of a process with threads; so the list stays.
    for (const auto& [data, adopted] : all) {
      if (adopted->made_in_ != generation) continue;  // its parent was a child itself
      // Better no child than one that writes to its parent's tensors.
      if (!make_private(adopted->begin(), adopted->length())) std::abort();
    }
    if (pipe[0] >= 0) {
      ::close(pipe[0]);
      ::close(pipe[1]);
      pipe = {-1, -1};
    }
    mutex.unlock();
  }
};

Adopted::Adopted(std::shared_ptr<Arena> arena, std::byte* data, std::size_t bytes, std::byte* room)
    : arena_(std::move(arena)), data_(data), bytes_(bytes), room_(room) {}

std::byte* Adopted::begin() const { return data_ + to_page(data_); }

std::size_t Adopted::length() const {
  return (number(data_) + bytes_) / page_bytes * page_bytes - number(begin());
}

std::uint64_t Adopted::place() const {
  return arena_->place_of(room_ + number(data_) % page_bytes, bytes_);
}

Status Adopted::adopt(std::shared_ptr<Arena> arena, int rank, std::byte* data, std::size_t bytes,
                      std::unique_ptr<Adopted>& out) {
  std::unique_ptr<Adopted> made(new Adopted(std::move(arena), data, bytes, nullptr));
  if (bytes < least_bytes + 2 * page_bytes || !is_private(made->begin(), made->length())) {
    return Status::error(Code::invalid, "memory that cannot be adopted");
  }
  if (adopted_bytes.load(std::memory_order_relaxed) + made->length() > most_bytes) {
    return Status::error(Code::no_space, "as much memory has been adopted as may be");
  }
  const std::size_t room_bytes = number(data) % page_bytes + bytes;
  Status status = made->arena_->allocate(rank, room_bytes, made->room_);
  if (status.ok()) status = made->replace();
  if (status.ok()) out = std::move(made);
  return status;
}

Status Adopted::replace() {
  std::byte* const here = arena_->at(place()) + to_page(data_);
  // All pages at once instead of a fault for each; older kernels cannot.
  (void)::madvise(here, length(), MADV_POPULATE_WRITE);
  std::memcpy(here, begin(), length());
  const auto offset = static_cast<off_t>(arena_->place_of(here, length()) - 1);
  Adoptions& registry = Adoptions::registry();
  const std::scoped_lock lock(registry.mutex);
  // All pages at once: whoever reads meanwhile finds the old ones or the new ones.
  if (::mmap(begin(), length(), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | MAP_POPULATE,
             arena_->fd(), offset) == MAP_FAILED) {
    const Status status = Status::from_errno("mapping shared memory in place of private memory");
    arena_->free(std::exchange(room_, nullptr));
    return status;
  }
  registry.all.insert_or_assign(data_, this);
  adopted_bytes.fetch_add(length(), std::memory_order_relaxed);
  return Status::success();
}

Adopted::~Adopted() {
  if (room_ == nullptr) return;
  {
    Adoptions& registry = Adoptions::registry();
    const std::scoped_lock lock(registry.mutex);
    registry.all.erase(data_);
    adopted_bytes.fetch_sub(length(), std::memory_order_relaxed);
    // A forked child has had a copy of its own ever since.
    if (made_in_ != fork_generation()) return;
    if (!give_back()) return;  // it stays shared, if it is there; whoever gets it cannot tell
  }
  arena_->free(room_);
}

bool Adopted::give_back() const {
  if (!dies_with_memory_) {
    // Somebody else's memory, who may have unmapped it: then it is not for us to touch.
    struct stat arena{};
    if (::fstat(arena_->fd(), &arena) != 0) return false;
    const bool is_here = is_mapped(begin(), length(), [&](const Mapping& mapping) {
      return mapping.inode == arena.st_ino && mapping.may("rw-s");
    });
    return is_here && make_private(begin(), length());
  }
  return ::mmap(begin(), length(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED,
                -1, 0) != MAP_FAILED;
}

std::uint64_t Adopted::place_of(const Arena& arena, const std::byte* data, std::size_t bytes) {
  if (adopted_bytes.load(std::memory_order_relaxed) == 0) return 0;
  Adoptions& registry = Adoptions::registry();
  const std::scoped_lock lock(registry.mutex);
  const auto found = registry.all.find(data);
  if (found == registry.all.end()) return 0;
  const Adopted& adopted = *found->second;
  return adopted.arena_.get() == &arena && adopted.bytes_ == bytes ? adopted.place() : 0;
}

void Adopted::copy_edges(std::byte* to, const std::byte* from, std::size_t bytes) {
  const std::size_t head = std::min(bytes, to_page(from));
  const std::size_t tail = (number(from) + bytes) % page_bytes;
  std::memcpy(to, from, head);
  std::memcpy(to + bytes - tail, from + bytes - tail, tail);
}

}  // namespace gradsync
