// Memory for tensors that every rank of a world has mapped. A world has one: a memfd that takes
// addresses but no memory until something is allocated in it. Every rank allocates in a range of
// its own, so allocating needs no agreement with anybody; and because all ranks map the same file,
// a place in it (an offset) is all that a peer has to know to read or write a tensor where it is.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

#include "common/fd.h"
#include "common/fork.h"
#include "common/status.h"

namespace gradsync {

class Arena {
 public:
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // Each rank's range is as large as the machine's memory.
  static Status create(int ranks, std::shared_ptr<Arena>& out);
  static Status map(Fd fd, int ranks, std::size_t range_bytes, std::shared_ptr<Arena>& out);

  int fd() const { return fd_.get(); }
  std::size_t range_bytes() const { return range_bytes_; }

  // Zeroed memory in the range of `rank`, which must be the caller's, reserved at once.
  Status allocate(int rank, std::size_t bytes, std::byte*& out);
  void free(std::byte* data);

  // Where memory lies, in a form that is the same for all ranks; 0 when it is not in here.
  std::uint64_t place_of(const std::byte* data, std::size_t bytes) const {
    const auto offset = reinterpret_cast<std::uintptr_t>(data) - base();
    if (offset >= total_bytes_ || bytes > total_bytes_ - offset) return 0;
    return offset + 1;
  }
  std::byte* at(std::uint64_t place) const { return data_ + (place - 1); }

 private:
  Arena(Fd fd, std::byte* data, std::size_t range_bytes, std::size_t total_bytes);
  static Status map_whole(Fd fd, int ranks, std::size_t range_bytes, std::shared_ptr<Arena>& out);
  std::uintptr_t base() const { return reinterpret_cast<std::uintptr_t>(data_); }
  // The first gap of `bytes` in a range, or the end of it.
  std::size_t find_gap(std::size_t begin, std::size_t bytes) const;

  Fd fd_;
  std::byte* data_;
  std::size_t range_bytes_;
  std::size_t total_bytes_;
  std::uint64_t opened_in_ = fork_generation();
  std::mutex mutex_;
  std::map<std::size_t, std::size_t> used_;  // offset -> bytes, of this process's allocations
};

}  // namespace gradsync
