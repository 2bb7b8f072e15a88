// Private memory that the other ranks can reach: its pages were replaced, where they are, by pages
// of an arena. Addresses stay, and so does what is there; whoever points to it notices nothing.
//
// Only whole pages can be replaced. What a tensor has on its first and its last one, which it may
// share with others, stays there, and the arena has room for a copy of it: a call brings these
// edges up to date before it begins, and takes them back when it is over.
//
// A forked child must not write to its parent's memory. It gets a copy of its own before fork()
// returns in either, so the copy is of one moment; or, where that would be too much to copy for
// what hardly any child looks at, pages that become its own when it writes to them, and until then
// show what is there at the time.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "common/fork.h"
#include "common/status.h"
#include "memory/arena.h"

namespace gradsync {

class Adopted {
 public:
  // What a forked child finds in the place of adopted memory.
  enum class InChild : std::uint8_t { copy, view };
  // At most so many bytes of a process that a forked child copies are adopted at a time.
  static constexpr std::size_t most_bytes = 256 * 1024 * 1024;

  // Fails, and changes nothing, when the memory is not the process's own (a file's, say, or shared
  // already), when there is too little of it, or no room. Nobody else may write to it meanwhile.
  static Status adopt(std::shared_ptr<Arena> arena, int rank, std::byte* data, std::size_t bytes,
                      InChild in_child, std::unique_ptr<Adopted>& out);
  ~Adopted();
  Adopted(const Adopted&) = delete;
  Adopted& operator=(const Adopted&) = delete;

  // Ends it: the memory is ordinary again. Returns false when the system refused; then the memory
  // must not be freed, nor this object.
  bool release();
  // What it holds need not be kept when this ends: it is freed then.
  void dies_with_memory() { dies_with_memory_ = true; }

  // Where in its arena a tensor is that was adopted as it is; 0 if it was not.
  static std::uint64_t place_of(const Arena& arena, const std::byte* data, std::size_t bytes);
  // Copies the edges of a tensor. Both sides are equally far from the beginning of a page.
  static void copy_edges(std::byte* to, const std::byte* from, std::size_t bytes);
  // Takes a tensor back after a call that failed: a rank that was stopped in it may still write.
  // What it writes to is not used again.
  static void retire(const Arena& arena, const std::byte* data);

 private:
  friend struct Adoptions;
  Adopted(std::shared_ptr<Arena> arena, std::byte* data, std::size_t bytes, InChild in_child)
      : arena_(std::move(arena)), data_(data), bytes_(bytes), in_child_(in_child) {}
  Status replace();
  // In a forked child: puts memory of its own in the place of its parent's. Only what is safe in
  // the child of a process with threads.
  bool part_from_parent() const;
  // How much of it a forked child copies.
  std::size_t copied_bytes() const { return in_child_ == InChild::copy ? length() : 0; }
  bool give_back() const;
  // The whole pages.
  std::byte* begin() const;
  std::size_t length() const;
  std::uint64_t place() const;

  std::shared_ptr<Arena> arena_;
  std::byte* data_;
  std::size_t bytes_;
  InChild in_child_;
  std::byte* room_ = nullptr;  // in the arena, from the beginning of the first page on
  off_t offset_ = 0;           // of the whole pages in the arena's file
  bool dies_with_memory_ = false;
  std::uint64_t made_in_ = fork_generation();
};

}  // namespace gradsync
