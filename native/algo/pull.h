// Reading the same part of all other ranks' tensors into the cache, to reduce it there.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <vector>

#include "algo/direct.h"
#include "algo/staging.h"
#include "sync/team.h"

namespace gradsync {

// The own half of the staging space is the place for it: nobody reads more of it than the addresses
// at its beginning, and it is in the cache.
class Pull {
 public:
  // `addresses`: how many each rank has offered.
  Pull(Team& team, Staging& staging, Direct& direct, std::size_t addresses, std::size_t element)
      : team_(team), direct_(direct), element_(element) {
    const std::size_t header = Direct::header_bytes(addresses);
    const auto ranks = static_cast<std::size_t>(team.size());
    bytes_ = std::min((staging.capacity() - header) / ranks, most_bytes) / cache_line * cache_line;
    memory_ = staging.mine() + header;
    sources_.resize(ranks);
  }

  // How much can be read at a time.
  std::size_t elements() const { return std::max<std::size_t>(bytes_ / element_, 1); }
  // In rank order.
  std::span<const std::byte* const> sources() const { return sources_; }

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
      std::byte* const to = memory_ + part++ * bytes_;
      const Status status = direct_.read(peer, direct_.place(peer, index) + offset, to, bytes);
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
  std::byte* memory_ = nullptr;
  std::vector<const std::byte*> sources_;
};

}  // namespace gradsync
