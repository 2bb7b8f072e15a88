// A few bytes that travel with the announcement of their call: nothing is staged, and peers find
// all they need in the line that they poll. The line of the staging space would have to come from
// the other core, too.
//   steps: 1   bytes moved: up to 8 by each rank
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include "common/deadline.h"
#include "common/few.h"
#include "common/status.h"
#include "sync/team.h"

namespace gradsync {

class Tiny {
 public:
  explicit Tiny(Team& team) : team_(team), words_(static_cast<std::size_t>(team.size())) {}

  // `bytes`: what one rank has for all others together.
  static bool fits(std::size_t bytes) { return bytes > 0 && bytes <= sizeof(std::uint64_t); }

  // Where this rank's pieces for each other rank stand, and those of the others for it.
  std::size_t offset(int from, int to, std::size_t bytes) const {
    return static_cast<std::size_t>(to < from ? to : to - 1) * bytes;
  }
  std::byte* mine(std::size_t offset = 0) { return at(team_.rank()) + offset; }
  const std::byte* of(int rank, std::size_t offset = 0) { return at(rank) + offset; }

  // Everybody's, in rank order.
  Few<const std::byte*> pieces() {
    Few<const std::byte*> found(words_.size());
    for (std::size_t rank = 0; rank < found.size(); ++rank)
      found[rank] = of(static_cast<int>(rank));
    return found;
  }

  // Announces the call with what `mine` holds; afterwards all ranks have agreed on it, and `of` is
  // theirs.
  Status exchange(std::uint64_t what, std::uint64_t count, Deadline deadline) {
    announce(what, count);
    const Status status = team_.agree(deadline);
    if (status.ok()) collect();
    return status;
  }
  // The same with `input`; then everybody's is in the outputs, of which there may be none.
  Status gather(std::uint64_t what, const std::byte* input, std::uint64_t count, std::size_t bytes,
                std::span<std::byte* const> outputs, Deadline deadline) {
    std::memcpy(mine(), input, bytes);
    const Status status = exchange(what, count, deadline);
    for (std::size_t rank = 0; status.ok() && rank < outputs.size(); ++rank) {
      std::memcpy(outputs[rank], of(static_cast<int>(rank)), bytes);
    }
    return status;
  }
  // The two parts of exchange(), for ranks that may agree on a call although not all carry: returns
  // how many do.
  void announce(std::uint64_t what, std::uint64_t count) {
    team_.announce_with(what, count, words_[static_cast<std::size_t>(team_.rank())]);
  }
  int collect() {
    int carriers = 0;
    for (int peer = 0; peer < team_.size(); ++peer) {
      const Announcement said = team_.call_of(peer);
      words_[static_cast<std::size_t>(peer)] = said.payload;
      if (said.carries) ++carriers;
    }
    return carriers;
  }

 private:
  std::byte* at(int rank) {
    return reinterpret_cast<std::byte*>(&words_[static_cast<std::size_t>(rank)]);
  }

  Team& team_;
  Few<std::uint64_t> words_;
};

}  // namespace gradsync
