// A piece of memory that several processes have mapped: a memfd, so it has no name and leaves no
// file behind, whoever is killed and when. Its size is reserved up front, so a shortage is an error
// here and never SIGBUS later.
#pragma once

#include <cstddef>

#include "common/fd.h"
#include "common/status.h"

namespace gradsync {

// Creates a memfd of `bytes`, sealed against resizing, that takes no memory yet.
Status create_memfd(const char* name, std::size_t bytes, Fd& out);
// Refuses a memfd of another process that is too small or not sealed.
Status check_memfd(const Fd& fd, std::size_t bytes);

// Takes memory for a part of a memfd now, so that a shortage is an error here and never a SIGBUS or
// the kernel's choice of whom to kill later. A memfd has no file system with a size: the kernel
// would go on until it kills somebody. So it is asked first what is there.
Status reserve_memory(const Fd& fd, std::size_t offset, std::size_t bytes);

class Segment {
 public:
  Segment() = default;
  Segment(Segment&& other) noexcept;
  Segment& operator=(Segment&& other) noexcept;
  ~Segment();

  // Creates zeroed memory of `bytes`, reserved and sealed against resizing.
  static Status create(std::size_t bytes, Segment& out) { return create(bytes, bytes, out); }
  // The same with only the first `reserved` bytes reserved; the rest must be, before it is touched.
  static Status create(std::size_t bytes, std::size_t reserved, Segment& out);
  Status reserve(std::size_t offset, std::size_t bytes) const;
  // Maps memory that another process created; refuses a file that is too small or not sealed.
  static Status map(Fd fd, std::size_t bytes, Segment& out);

  std::byte* data() const { return data_; }
  std::size_t size() const { return size_; }
  int fd() const { return fd_.get(); }

 private:
  Status map_here(Fd fd, std::size_t bytes);

  Fd fd_;
  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace gradsync
