#include "memory/arena.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <string>
#include <utility>

#include "common/pages.h"
#include "memory/segment.h"

namespace gradsync {
namespace {

// Large tensors begin at the places where huge pages do.
constexpr std::size_t huge_page = 2 * 1024 * 1024;

std::size_t alignment_for(std::size_t bytes) { return bytes >= huge_page ? huge_page : page_bytes; }

}  // namespace

Arena::Arena(Fd fd, std::byte* data, std::size_t range_bytes, std::size_t total_bytes)
    : fd_(std::move(fd)), data_(data), range_bytes_(range_bytes), total_bytes_(total_bytes) {}

Arena::~Arena() { ::munmap(data_, total_bytes_); }

Status Arena::create(int ranks, std::shared_ptr<Arena>& out) {
  const auto pages = static_cast<std::size_t>(::sysconf(_SC_PHYS_PAGES));
  const std::size_t range = round_up(pages * page_bytes, huge_page);
  Fd fd;
  const Status status = create_memfd("gradsync-arena", range * static_cast<std::size_t>(ranks), fd);
  return status.ok() ? map_whole(std::move(fd), ranks, range, out) : status;
}

Status Arena::map(Fd fd, int ranks, std::size_t range_bytes, std::shared_ptr<Arena>& out) {
  const Status status = check_memfd(fd, range_bytes * static_cast<std::size_t>(ranks));
  return status.ok() ? map_whole(std::move(fd), ranks, range_bytes, out) : status;
}

Status Arena::map_whole(Fd fd, int ranks, std::size_t range_bytes, std::shared_ptr<Arena>& out) {
  const std::size_t total = range_bytes * static_cast<std::size_t>(ranks);
  void* const address =
      ::mmap(nullptr, total, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd.get(), 0);
  if (address == MAP_FAILED) return Status::from_errno("mapping an arena");
  (void)::madvise(address, total, MADV_DONTDUMP);  // other ranks' tensors are in it as well
  out.reset(new Arena(std::move(fd), static_cast<std::byte*>(address), range_bytes, total));
  return Status::success();
}

std::size_t Arena::find_gap(std::size_t begin, std::size_t bytes) const {
  const std::size_t unit = alignment_for(bytes);
  std::size_t candidate = round_up(begin, unit);
  for (auto next = used_.lower_bound(begin); next != used_.end(); ++next) {
    if (next->first >= candidate + bytes) break;
    candidate = round_up(next->first + next->second, unit);
  }
  return candidate;
}

Status Arena::allocate(int rank, std::size_t bytes, std::byte*& out) {
  if (fork_generation() != opened_in_) {
    return Status::error(Code::invalid, "a forked child has no shared memory of its own");
  }
  bytes = round_up(bytes, page_bytes);
  const std::size_t begin = static_cast<std::size_t>(rank) * range_bytes_;
  const std::lock_guard<std::mutex> lock(mutex_);
  const std::size_t offset = find_gap(begin, bytes);
  if (bytes > range_bytes_ || offset + bytes > begin + range_bytes_) {
    return Status::error(Code::no_space, "no room for " + std::to_string(bytes) +
                                             " bytes in an arena of " +
                                             std::to_string(range_bytes_) + " bytes");
  }
  const Status status = reserve_memory(fd_, offset, bytes);
  if (!status.ok()) return status;
  used_.emplace(offset, bytes);
  out = data_ + offset;
  return Status::success();
}

void Arena::free(std::byte* data) {
  // A forked child has the object, but the memory is its parent's.
  if (fork_generation() != opened_in_) return;
  const auto offset = static_cast<std::size_t>(data - data_);
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = used_.find(offset);
  if (found == used_.end()) return;
  (void)::fallocate(fd_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                    static_cast<off_t>(offset), static_cast<off_t>(found->second));
  used_.erase(found);
}

}  // namespace gradsync
