// How many elements each rank's piece has, where that differs from rank to rank: the table stands
// at the beginning of what every rank stages in the first round, so that all ranks see every
// difference before anything is written.
#pragma once

#include <cstddef>
#include <cstring>
#include <span>
#include <sstream>
#include <vector>

#include "algo/staging.h"
#include "common/status.h"
#include "sync/team.h"

namespace gradsync {

// Compares the tables that all ranks have staged; all have announced the call by now.
inline Status compare_counts(const Team& team, const Staging& staging,
                             std::span<const std::size_t> counts) {
  Status verdict;
  for (int peer = 0; peer < team.size(); ++peer) {
    if (std::memcmp(staging.of(peer), counts.data(), counts.size_bytes()) != 0) {
      verdict.ranks.push_back(peer);
    }
  }
  if (verdict.ranks.empty()) return verdict;
  std::ostringstream text;
  text << "the ranks expect pieces of different sizes: ";
  std::vector<std::size_t> theirs(counts.size());
  for (int peer = 0; peer < team.size(); ++peer) {
    std::memcpy(theirs.data(), staging.of(peer), counts.size_bytes());
    text << (peer == 0 ? "" : "; ") << "rank " << peer << ":";
    for (const std::size_t count : theirs) text << " " << count;
  }
  verdict.code = Code::mismatch;
  verdict.message = text.str();
  return verdict;
}

}  // namespace gradsync
