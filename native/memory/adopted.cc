#include "memory/adopted.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
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

// Whether a range is memory of this process alone, with nothing behind it.
bool is_private(const std::byte* begin, std::size_t bytes) {
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen("/proc/self/maps", "re"),
                                                             std::fclose);
  if (file == nullptr) return false;
  std::uintptr_t known = number(begin);
  const std::uintptr_t end = known + bytes;
  std::array<char, 1024> line{};
  bool at_start = true;  // of a line: with a long path one may not fit
  while (known < end && std::fgets(line.data(), line.size(), file.get()) != nullptr) {
    const bool is_start = std::exchange(at_start, std::strchr(line.data(), '\n') != nullptr);
    unsigned long from = 0, to = 0, inode = 0;
    std::array<char, 5> rights{};
    if (!is_start || std::sscanf(line.data(), "%lx-%lx %4s %*x %*s %lu", &from, &to, rights.data(),
                                 &inode) != 4) {
      continue;
    }
    if (to <= known) continue;
    if (from > known || inode != 0 || std::strcmp(rights.data(), "rw-p") != 0) return false;
    known = to;
  }
  return known >= end;
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
// Of these, what a forked child copies.
std::atomic<std::size_t> bytes_to_copy{0};

}  // namespace

// All that this process has adopted, and what becomes of it in a fork.
struct Adoptions {
  std::mutex mutex;
  std::map<const std::byte*, Adopted*> all;
  std::uint64_t generation = 0;  // of the process that forks
  // On which a parent waits for its child. Open from the first adoption to the last: at a fork
  // there may be no descriptor left.
  std::array<int, 2> pipe{-1, -1};

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

  bool add(Adopted& adopted) {
    if (!open_pipe()) return false;
    all.insert_or_assign(adopted.data_, &adopted);
    adopted_bytes.fetch_add(adopted.length(), std::memory_order_relaxed);
    bytes_to_copy.fetch_add(adopted.copied_bytes(), std::memory_order_relaxed);
    return true;
  }
  void remove(const Adopted& adopted) {
    const auto found = all.find(adopted.data_);
    // In a forked child another one may have taken its place.
    if (found != all.end() && found->second == &adopted) all.erase(found);
    adopted_bytes.fetch_sub(adopted.length(), std::memory_order_relaxed);
    bytes_to_copy.fetch_sub(adopted.copied_bytes(), std::memory_order_relaxed);
    if (all.empty()) close_pipe();
  }

  bool open_pipe() { return pipe[0] >= 0 || ::pipe2(pipe.data(), O_CLOEXEC) == 0; }
  void close_pipe() {
    for (int& end : pipe) {
      if (end >= 0) ::close(std::exchange(end, -1));
    }
  }

  void before() {
    mutex.lock();
    generation = fork_generation();
    if (!all.empty()) (void)open_pipe();  // again, after a fork before this one
  }
  void after_in_parent() {
    if (pipe[0] >= 0) {
      ::close(std::exchange(pipe[1], -1));
      // Until the child has its copy, or has died. (Without a child the pipe has no other end.)
      char byte = 0;
      while (::read(pipe[0], &byte, 1) < 0 && errno == EINTR) continue;
      close_pipe();
      (void)open_pipe();
    }
    mutex.unlock();
  }
  void after_in_child() {
    // Only calls that are safe in the child of a process with threads; so the list stays.
    for (const auto& [data, adopted] : all) {
      if (adopted->made_in_ != generation) continue;  // its parent was a child itself
      // Better no child than one that writes to its parent's tensors.
      if (!adopted->part_from_parent()) std::abort();
    }
    close_pipe();
    mutex.unlock();
  }
};

std::byte* Adopted::begin() const { return data_ + to_page(data_); }

std::size_t Adopted::length() const {
  return (number(data_) + bytes_) / page_bytes * page_bytes - number(begin());
}

std::uint64_t Adopted::place() const {
  return arena_->place_of(room_ + number(data_) % page_bytes, bytes_);
}

bool Adopted::part_from_parent() const {
  if (in_child_ == InChild::copy) return make_private(begin(), length());
  return ::mmap(begin(), length(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED, arena_->fd(),
                offset_) != MAP_FAILED;
}

Status Adopted::adopt(std::shared_ptr<Arena> arena, int rank, std::byte* data, std::size_t bytes,
                      InChild in_child, std::unique_ptr<Adopted>& out) {
  std::unique_ptr<Adopted> made(new Adopted(std::move(arena), data, bytes, in_child));
  if (bytes < least_bytes + 2 * page_bytes || !is_private(made->begin(), made->length())) {
    return Status::error(Code::invalid, "memory that cannot be adopted");
  }
  if (bytes_to_copy.load(std::memory_order_relaxed) + made->copied_bytes() > most_bytes) {
    return Status::error(Code::no_space, "as much memory has been adopted as may be");
  }
  std::byte* room = nullptr;
  Status status = made->arena_->allocate(rank, number(data) % page_bytes + bytes, room);
  if (!status.ok()) return status;
  made->room_ = room;
  status = made->replace();
  if (status.ok()) {
    out = std::move(made);
  } else {
    made->room_ = nullptr;
    made->arena_->free(room);
  }
  return status;
}

Status Adopted::replace() {
  std::byte* const here = arena_->at(place()) + to_page(data_);
  // All pages at once instead of a fault for each; older kernels cannot.
  (void)::madvise(here, length(), MADV_POPULATE_WRITE);
  std::memcpy(here, begin(), length());
  offset_ = static_cast<off_t>(arena_->place_of(here, length()) - 1);
  Adoptions& registry = Adoptions::registry();
  const std::scoped_lock lock(registry.mutex);
  if (!registry.add(*this)) return Status::from_errno("opening a pipe for forks");
  // All pages at once: whoever reads meanwhile finds the old ones or the new ones.
  if (::mmap(begin(), length(), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | MAP_POPULATE,
             arena_->fd(), offset_) != MAP_FAILED) {
    return Status::success();
  }
  const Status status = Status::from_errno("mapping shared memory in place of private memory");
  registry.remove(*this);
  return status;
}

Adopted::~Adopted() { (void)release(); }

bool Adopted::release() {
  if (room_ == nullptr) return true;
  Adoptions& registry = Adoptions::registry();
  const std::scoped_lock lock(registry.mutex);
  // A forked child has had a copy of its own ever since.
  const bool is_ours = made_in_ == fork_generation();
  if (is_ours && !give_back()) return false;
  registry.remove(*this);
  std::byte* const room = std::exchange(room_, nullptr);
  if (is_ours) arena_->free(room);
  return true;
}

bool Adopted::give_back() const {
  if (!dies_with_memory_) return make_private(begin(), length());
  return ::mmap(begin(), length(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED,
                -1, 0) != MAP_FAILED;
}

void Adopted::retire(const Arena& arena, const std::byte* data) {
  Adoptions& registry = Adoptions::registry();
  const std::scoped_lock lock(registry.mutex);
  const auto found = registry.all.find(data);
  if (found == registry.all.end() || found->second->arena_.get() != &arena) return;
  Adopted& adopted = *found->second;
  if (!make_private(adopted.begin(), adopted.length())) return;
  registry.remove(adopted);
  adopted.room_ = nullptr;
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
