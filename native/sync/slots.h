// What lives where in a group's shared memory: a header, then one slot per rank, then the ranks'
// staging space. Plain data and atomics only; every process that maps it must agree on this file.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

#include "common/cores.h"
#include "common/pages.h"
#include "sync/neighbour.h"

namespace gradsync {

inline constexpr std::size_t cache_line = 64;
inline constexpr std::uint64_t layout_magic = 0x6772616473796e32;  // "gradsyn2"

// What a rank announces with a call. Peers read it anyway to learn that the rank has arrived, so
// comparing it on every call costs nothing. The words are relaxed atomics: they are ordered by the
// progress word, and a peer that reads them too late (a bug) must not be undefined behaviour.
struct Announcement {
  std::uint64_t sequence = 0;  // number of the call in its group, from 1
  std::uint64_t what = 0;      // op, dtype, reduce op and root packed by the algorithms
  std::uint64_t count = 0;     // elements
  std::uint64_t time_ns = 0;   // monotonic clock when the call began
  std::uint64_t place = 0;     // where in the arena the rank's tensor lies; 0: in memory of its own
  bool carries = false;        // whether what others need of the rank comes along:
  std::uint64_t payload = 0;

  // Everything else differs between ranks that agree.
  bool same_call(const Announcement& other) const {
    return sequence == other.sequence && what == other.what && count == other.count;
  }
};

// Bits of `what` that are the slot's own: a rank's payload stands where the count would, and the
// count, of which there is not much then, in `what`.
inline constexpr std::uint64_t carries_bit = std::uint64_t{1} << 25;
inline constexpr unsigned carried_count_shift = 26;
inline constexpr std::uint64_t carried_count_mask = std::uint64_t{63} << carried_count_shift;

template <std::size_t Count>
using Words = std::array<std::atomic<std::uint64_t>, Count>;

// A text of which the end is kept when it is too long (that of a traceback says most), by whole
// characters.
inline std::string fitted(const std::string& text, std::size_t bytes) {
  std::size_t start = text.size() - (text.size() < bytes ? text.size() : bytes);
  while (start > 0 && start < text.size() && (text[start] & 0xC0) == 0x80) ++start;
  return text.substr(start);
}

// A text about something with a number, which its owner may replace while others read it: a reader
// that sees words of a newer text sees that the number has changed, too.
template <std::size_t Bytes>
class TextCell {
 public:
  // `about` must not be 0, nor that of the text before.
  void store(std::uint64_t about, const std::string& text) {
    std::array<char, Bytes> bytes{};
    const std::string kept = fitted(text, Bytes - 1);
    kept.copy(bytes.data(), kept.size());
    about_.store(0, std::memory_order_relaxed);
    for (std::size_t i = 0; i < words_.size(); ++i) {
      std::uint64_t word = 0;
      std::memcpy(&word, bytes.data() + i * sizeof(word), sizeof(word));
      words_[i].store(word, std::memory_order_release);
    }
    about_.store(about, std::memory_order_release);
  }
  // 0 when there is none, or it is being replaced.
  std::uint64_t about() const { return about_.load(std::memory_order_acquire); }
  // Empty unless it is about `wanted`.
  std::string load(std::uint64_t wanted) const {
    std::array<char, Bytes + 1> bytes{};
    if (wanted == 0 || about() != wanted) return "";
    for (std::size_t i = 0; i < words_.size(); ++i) {
      const std::uint64_t word = words_[i].load(std::memory_order_acquire);
      std::memcpy(bytes.data() + i * sizeof(word), &word, sizeof(word));
    }
    return about_.load(std::memory_order_relaxed) == wanted ? bytes.data() : "";
  }

 private:
  static_assert(Bytes % sizeof(std::uint64_t) == 0);
  std::atomic<std::uint64_t> about_{0};
  std::array<std::atomic<std::uint64_t>, Bytes / sizeof(std::uint64_t)> words_{};
};

enum class Presence : std::uint32_t {
  absent = 0,  // zeroed memory: has not mapped it yet
  active,
  left,    // said goodbye; whatever it published before is still good
  failed,  // left with an error; `note` says which
};

// What the others must know of a rank before the first call.
struct Identity {
  std::int32_t pid = 0;  // in the rank's own pid namespace; for messages only
  CpuMask affinity;
  Beacon beacon;           // in the rank's own memory
  std::uint32_t core = 0;  // where it runs at the moment
  double cpus = 0;         // granted by its control groups

  static Identity own();
};

// Owned by one rank: only it writes, all others read (but for `sleepers` and `question`, and what
// a founder says of the ranks that it has met).
struct alignas(cache_line) Slot {
  // Counts the steps that the rank has published; wraps around. Also the futex word.
  std::atomic<std::uint32_t> progress{0};
  // How many ranks sleep on `progress`; a publisher that sees none saves the system call.
  std::atomic<std::uint32_t> sleepers{0};
  // Where it ran when it announced its last call.
  std::atomic<std::uint32_t> core{0};
  // What it announced: two of them, because a rank announces call n+1 while slow peers still read
  // what it said of call n, but nobody can reach call n+2 before all have announced n+1 and so
  // finished reading n. What all peers compare on every call is in the line that they poll.
  std::array<Words<3>, 2> compared;                      // sequence, what, count
  alignas(cache_line) std::array<Words<2>, 2> detailed;  // time_ns, place

  void announce(const Announcement& a) {
    Words<2>& second = detailed[a.sequence & 1];
    second[0].store(a.time_ns, std::memory_order_relaxed);
    second[1].store(a.place, std::memory_order_relaxed);
    // What others poll comes last.
    Words<3>& first = compared[a.sequence & 1];
    first[0].store(a.sequence, std::memory_order_relaxed);
    first[1].store(a.carries ? a.what | carries_bit | a.count << carried_count_shift : a.what,
                   std::memory_order_relaxed);
    first[2].store(a.carries ? a.payload : a.count, std::memory_order_relaxed);
  }
  // Time and place are 0.
  Announcement announced_call(std::uint64_t sequence) const {
    const Words<3>& words = compared[sequence & 1];
    Announcement said{words[0].load(std::memory_order_relaxed),
                      words[1].load(std::memory_order_relaxed),
                      words[2].load(std::memory_order_relaxed)};
    if ((said.what & carries_bit) == 0) return said;
    said.carries = true;
    said.payload = said.count;
    said.count = (said.what & carried_count_mask) >> carried_count_shift;
    said.what &= ~(carries_bit | carried_count_mask);
    return said;
  }
  Announcement announced(std::uint64_t sequence) const {
    Announcement all = announced_call(sequence);
    const Words<2>& words = detailed[sequence & 1];
    all.time_ns = words[0].load(std::memory_order_relaxed);
    all.place = words[1].load(std::memory_order_relaxed);
    return all;
  }

  alignas(cache_line) std::atomic<Presence> presence{Presence::absent};
  Identity identity;
  std::atomic<std::uint32_t> reaches_all{0};  // 1: it can read all others' memory
  // What it would rather have done in another way; what that is, its readers know.
  std::atomic<std::uint64_t> objections{0};
  // 1: it has given up on a call in which others read its memory, which may be anything by now.
  std::atomic<std::uint32_t> withdrawn{0};
  // 1 + the rank because of which this one gave up in the middle of a step; 0: nobody.
  std::atomic<std::uint32_t> blames{0};
  std::array<char, 4096> note{};  // why it failed, NUL-terminated; written before `presence`

  // Which line asked for a call, by the call's number. Published when the call fails or takes long.
  TextCell<256> site;
  // Where the rank's program stands, by the question that it answers: see whereabouts.h. Only of
  // use in a world's memory.
  std::atomic<std::uint32_t> question{0};  // how often peers have asked; futex word
  std::atomic<std::uint32_t> listening{0};
  TextCell<4096> standing;
};

struct alignas(cache_line) Header {
  std::uint64_t magic = 0;
  std::uint32_t ranks = 0;
  std::uint64_t staging_bytes = 0;  // per rank
  bool open = false;                // ranks may look for a way into each other's memory
  bool introduced = false;          // all identities are there before anybody enters
  // 1 + the rank that aborted the group, 0 while nobody has. `reason` is written by the first to
  // move `aborting` from 0, before `aborted` is set.
  std::atomic<std::uint32_t> aborting{0};
  std::atomic<std::uint32_t> aborted{0};
  bool gave_up = false;  // the aborter ran out of time; written like `reason`
  std::array<char, 1024> reason{};
};

inline constexpr std::size_t slots_offset() { return round_up(sizeof(Header), cache_line); }

// Half a page away from where large tensors begin in theirs: a core takes a load for one that has
// to wait for a store whose address has the same last 12 bits. All-reduce of 256 KiB to 1 MiB at 2
// ranks takes 12 % longer when staging begins where pages do.
inline constexpr std::size_t staging_offset(std::size_t ranks) {
  return round_up(slots_offset() + ranks * sizeof(Slot), page_bytes) + page_bytes / 2;
}

inline constexpr std::size_t segment_bytes(std::size_t ranks, std::size_t staging_bytes) {
  return round_up(staging_offset(ranks) + ranks * round_up(staging_bytes, page_bytes), page_bytes);
}

static_assert(offsetof(Slot, detailed) == cache_line, "one line to poll and to compare");
static_assert(sizeof(Slot) % cache_line == 0, "neighbouring slots must not share a cache line");
static_assert(std::atomic<std::uint64_t>::is_always_lock_free,
              "words in shared memory must be lock-free");
static_assert(std::atomic<Presence>::is_always_lock_free);

}  // namespace gradsync
