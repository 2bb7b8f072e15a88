// Reading the same part of all other ranks' tensors, to reduce it: private ones into the cache,
// those in the arena where they are.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>

#include "algo/direct.h"
#include "algo/staging.h"
#include "common/few.h"
#include "sync/team.h"

namespace gradsync {

// The own half of the staging space is the place for it: nobody reads more of it than the addresses
// at its beginning, and it is in the cache.
class Pull {
 public:
  Pull(Team& team, Staging& staging, Direct& direct, std::size_t element)
      : team_(team),
        direct_(direct),
        element_(element),
        memory_(staging.mine() + direct.header()),
        sources_(static_cast<std::size_t>(team.size())) {
    const std::size_t room = staging.capacity() - direct.header();
    bytes_ = std::min(room / sources_.size(), most_bytes) / cache_line * cache_line;
  }

  // How much can be read at a time.
  std::size_t elements() const { return std::max<std::size_t>(bytes_ / element_, 1); }
  // In rank order.
  std::span<const std::byte* const> sources() const { return sources_.all(); }

  // Reads a part of what each other rank has offered at `index`; `own` is this rank's.
  Status read(std::size_t index, std::size_t offset, std::size_t bytes, const std::byte* own) {
    std::size_t part = 0;
    for (int n = 0; n < team_.size(); ++n) {
      const int peer = (team_.rank() + n) % team_.size();
      const auto place = static_cast<std::size_t>(peer);
      if (n == 0) {
        sources_[place] = own;
        continue;
      }
      const std::uint64_t from = direct_.place(peer, index);
      if (const std::byte* const here = direct_.mapped(from)) {
        sources_[place] = here + offset;
        continue;
      }
      std::byte* const to = memory_ + part++ * bytes_;
      const Status status = direct_.read(peer, from + offset, to, bytes);
      if (!status.ok()) return status;
      sources_[place] = to;
    }
    return Status::success();
  }

 private:
  // At 128 KiB the system call is a tenth of the time, and two parts fit a second-level cache.
  static constexpr std::size_t most_bytes = 128 * 1024;

  Team& team_;
  Direct& direct_;
  std::size_t element_;
  std::size_t bytes_ = 0;
  std::byte* memory_;
  Few<const std::byte*> sources_;
};

}  // namespace gradsync
