#include "memory/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <limits>
#include <string>
#include <utility>

#include "common/cgroup.h"

namespace gradsync {
namespace {

// Without these a peer could shrink the file under us, and touching it would be SIGBUS.
constexpr int seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

// Asking takes 0.1 ms and more. Whoever has no such bytes left has none for his own heap either.
constexpr std::size_t too_small_to_ask = 64 * 1024;

// For the machine and for our control group.
double available_bytes() {
  std::ifstream file("/proc/meminfo");
  std::string name;
  double kibibytes = 0;
  double available = std::numeric_limits<double>::infinity();
  while (file >> name >> kibibytes) {
    if (name == "MemAvailable:") available = kibibytes * 1024;
    file.ignore(std::numeric_limits<std::streamsize>::max(), '\n');
  }
  return std::min(available, cgroup_memory_left());
}

}  // namespace

Status reserve_memory(const Fd& fd, std::size_t offset, std::size_t bytes) {
  const double available =
      bytes < too_small_to_ask ? static_cast<double>(bytes) : available_bytes();
  if (static_cast<double>(bytes) > available) {
    return Status::error(Code::no_space, "no room for " + std::to_string(bytes) +
                                             " bytes of shared memory: " +
                                             std::to_string(static_cast<std::uint64_t>(available)) +
                                             " are available");
  }
  // fallocate rather than posix_fallocate: the latter falls back to writing every page on file
  // systems that lack it, and reports through its return value.
  int result = 0;
  do {
    result = ::fallocate(fd.get(), 0, static_cast<off_t>(offset), static_cast<off_t>(bytes));
  } while (result != 0 && errno == EINTR);
  if (result == 0) return Status::success();
  return Status::from_errno("reserving " + std::to_string(bytes) + " bytes of shared memory");
}

Status create_memfd(const char* name, std::size_t bytes, Fd& out) {
  Fd fd(::memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd.valid()) return Status::from_errno("memfd_create");
  const auto length = static_cast<off_t>(bytes);
  if (length < 0 || ::ftruncate(fd.get(), length) != 0) {
    return Status::from_errno("sizing " + std::to_string(bytes) + " bytes of shared memory",
                              length < 0 ? EINVAL : errno);
  }
  if (::fcntl(fd.get(), F_ADD_SEALS, seals) != 0) return Status::from_errno("sealing a memfd");
  out = std::move(fd);
  return Status::success();
}

Status check_memfd(const Fd& fd, std::size_t bytes) {
  struct stat info{};
  if (::fstat(fd.get(), &info) != 0) return Status::from_errno("fstat of shared memory");
  if (info.st_size < 0 || static_cast<std::size_t>(info.st_size) < bytes) {
    return Status::error(Code::invalid, "shared memory of " + std::to_string(info.st_size) +
                                            " bytes where " + std::to_string(bytes) +
                                            " were announced");
  }
  if ((::fcntl(fd.get(), F_GET_SEALS) & seals) != seals) {
    return Status::error(Code::invalid, "shared memory that is not sealed against resizing");
  }
  return Status::success();
}

Segment::Segment(Segment&& other) noexcept { *this = std::move(other); }

Segment& Segment::operator=(Segment&& other) noexcept {
  std::swap(fd_, other.fd_);
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

Segment::~Segment() {
  if (data_ != nullptr) ::munmap(data_, size_);
}

Status Segment::create(std::size_t bytes, std::size_t reserved, Segment& out) {
  Fd fd;
  Status status = create_memfd("gradsync", bytes, fd);
  if (status.ok()) status = reserve_memory(fd, 0, reserved);
  return status.ok() ? out.map_here(std::move(fd), bytes) : status;
}

Status Segment::reserve(std::size_t offset, std::size_t bytes) const {
  return reserve_memory(fd_, offset, bytes);
}

Status Segment::map(Fd fd, std::size_t bytes, Segment& out) {
  const Status status = check_memfd(fd, bytes);
  return status.ok() ? out.map_here(std::move(fd), bytes) : status;
}

Status Segment::map_here(Fd fd, std::size_t bytes) {
  void* address = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  if (address == MAP_FAILED) return Status::from_errno("mapping shared memory");
  if (data_ != nullptr) ::munmap(data_, size_);
  fd_ = std::move(fd);
  data_ = static_cast<std::byte*>(address);
  size_ = bytes;
  return Status::success();
}

}  // namespace gradsync
