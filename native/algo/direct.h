// One copy instead of two: ranks stage where their memory is instead of what is in it, agree on the
// call, and then each reads what it needs from there, where the kernel lets all ranks do that
// (sync/neighbour.h).
//   steps: 2 (announced; done with the others' memory)
//
// Who fails says so before it returns, because its memory may be anything afterwards; whoever has
// read from it looks for that.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include "algo/rounds.h"
#include "algo/staging.h"
#include "sync/team.h"

namespace gradsync {

// From how many bytes between two ranks on it is worth a system call, which takes 0.7 us and 45 ns
// for each page on top of the copy. Measured at 2 ranks on 2 cores, all_gather with pieces of 32
// KiB: 6.3 us against 5.7 us with staging; of 64 KiB: 8.2 against 9.5; of 128 KiB: 12.5
// against 17.5.
inline constexpr std::size_t direct_bytes = 48 * 1024;
// And up to how many it is faster: what comes from main memory the kernel copies at 2 to 4 GB/s,
// where two copies through a cache, on two cores at once, make 5 to 10. Not with more ranks than
// cores: each round of staging has to wait until all of them have had their turn.
inline constexpr std::size_t direct_most_bytes = 2 * 1024 * 1024;

class Direct {
 public:
  Direct(Team& team, Staging& staging, Rounds& rounds)
      : team_(team), staging_(staging), rounds_(rounds) {}

  // Whether to try, for transfers of so many bytes.
  static bool worthwhile(const Team& team, std::size_t bytes,
                         std::size_t most = direct_most_bytes) {
    return team.is_open() && bytes >= direct_bytes && (bytes <= most || team.is_crowded());
  }

  // Where in a half the addresses end, and a rank may use its own half as it likes.
  static std::size_t header_bytes(std::size_t addresses) {
    return round_up((1 + addresses) * sizeof(std::uint64_t), cache_line);
  }

  // Announces the call together with places of `bytes` bytes each, and says whether all ranks'
  // places can be reached, which all ranks answer alike. If not, the call goes on with rounds, the
  // first of which need not announce it again.
  Status offer(std::uint64_t what, std::uint64_t count, std::span<const std::byte* const> places,
               std::size_t bytes, bool& possible) {
    Status status = rounds_.turn();
    if (!status.ok()) return status;
    put(staging_.mine(), places, bytes);
    status = noted(rounds_.announce(what, count));
    if (status.ok()) possible = offered_by_all(0);
    return status;
  }

  // For calls whose halves begin with something else: the same, without the announcement.
  void put(std::byte* at, std::span<const std::byte* const> places, std::size_t bytes) {
    const std::uint64_t usable = team_.can_offer(places, bytes) ? 1 : 0;
    std::memcpy(at, &usable, sizeof(usable));
    if (!places.empty()) std::memcpy(at + sizeof(usable), places.data(), places.size_bytes());
  }
  bool offered_by_all(std::size_t offset) const {
    for (int peer = 0; peer < team_.size(); ++peer) {
      if (word(peer, offset) == 0) return false;
    }
    return true;
  }

  std::uint64_t place(int peer, std::size_t index, std::size_t offset = 0) const {
    return word(peer, offset + (1 + index) * sizeof(std::uint64_t));
  }
  Status read(int peer, std::uint64_t from, std::byte* to, std::size_t bytes) {
    return noted(team_.read_from(peer, to, from, bytes, rounds_.deadline()));
  }

  // Ends this rank's reading. Whose own memory others read must wait for them before the call
  // returns.
  void done() { rounds_.publish(); }
  Status wait_for(int peer) { return noted(rounds_.wait_for(peer)); }
  Status wait_for_all() { return noted(rounds_.wait_for_all()); }

 private:
  Status noted(Status status) {
    if (!status.ok()) team_.withdraw();
    return status;
  }
  std::uint64_t word(int peer, std::size_t offset) const {
    std::uint64_t value = 0;
    std::memcpy(&value, staging_.of(peer) + offset, sizeof(value));
    return value;
  }

  Team& team_;
  Staging& staging_;
  Rounds& rounds_;
};

}  // namespace gradsync
