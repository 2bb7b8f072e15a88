#include "sync/neighbour.h"

#include <errno.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstring>

namespace gradsync {
namespace {

// The kernel moves a little less than 2 GiB at a time.
constexpr std::size_t most_at_once = std::size_t{1} << 30;

bool fetch(pid_t pid, std::byte* here, std::uint64_t there, std::size_t bytes) {
  while (bytes > 0) {
    const std::size_t length = std::min(bytes, most_at_once);
    const iovec local{here, length};
    const iovec remote{reinterpret_cast<void*>(there), length};
    const ssize_t moved = ::process_vm_readv(pid, &local, 1, &remote, 1, 0);
    if (moved < 0) return false;
    if (moved == 0) {
      errno = EFAULT;
      return false;
    }
    here += moved;
    there += static_cast<std::uint64_t>(moved);
    bytes -= static_cast<std::size_t>(moved);
  }
  return true;
}

}  // namespace

Beacon own_beacon() {
  // The upper half is the process: a forked child has a beacon of its own.
  static std::atomic<std::uint64_t> word{0};
  const auto pid = static_cast<std::uint64_t>(::getpid());
  std::uint64_t value = word.load(std::memory_order_relaxed);
  if (value >> 32 != pid) {
    const auto now = std::chrono::steady_clock::now().time_since_epoch().count();
    const std::uint64_t fresh = pid << 32 | (static_cast<std::uint64_t>(now) & 0xffff'ffff);
    // Whoever is first decides for all threads.
    if (word.compare_exchange_strong(value, fresh, std::memory_order_relaxed)) value = fresh;
  }
  return {reinterpret_cast<std::uint64_t>(&word), value};
}

Neighbour Neighbour::find(int pid, const Beacon& beacon) {
  Neighbour found;
  std::uint64_t value = 0;
  if (pid <= 0 ||
      !fetch(pid, reinterpret_cast<std::byte*>(&value), beacon.address, sizeof(value))) {
    return found;
  }
  if (value != beacon.value) return found;
  found.way_ = pid == ::getpid() ? Way::same_process : Way::kernel;
  found.pid_ = pid;
  return found;
}

bool Neighbour::read(std::byte* to, std::uint64_t from, std::size_t bytes) const {
  if (way_ == Way::kernel) return fetch(pid_, to, from, bytes);
  std::memcpy(to, reinterpret_cast<const std::byte*>(from), bytes);
  return true;
}

bool can_be_reached(std::span<const std::byte* const> places, std::size_t bytes) {
  constexpr std::size_t group = 16;
  std::array<std::byte, 2 * group> taken;
  for (std::size_t first = 0; first < places.size(); first += group) {
    std::array<iovec, 2 * group> remote;
    std::size_t count = 0;
    for (const std::byte* place : places.subspan(first, std::min(group, places.size() - first))) {
      if (place == nullptr) continue;
      auto* const begin = const_cast<std::byte*>(place);
      remote[count++] = {begin, 1};
      remote[count++] = {begin + bytes - 1, 1};
    }
    if (count == 0) continue;
    const iovec local{taken.data(), count};
    const ssize_t moved = ::process_vm_readv(::getpid(), &local, 1, remote.data(), count, 0);
    if (moved != static_cast<ssize_t>(count)) return false;
  }
  return true;
}

}  // namespace gradsync
