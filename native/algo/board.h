// Buckets of gradients that are averaged where they lie, while the ranks still compute.
//
// Every rank has the same buckets in the arena. It says of each when it is full (arrive), and
// reduces its slice of every bucket that is full everywhere whenever it comes by: when one of its
// own buckets is full, and while it waits at the end (finish). No thread is needed, and nobody
// waits before the end.
//   steps: 2 for all buckets together   bytes moved per rank: n read, n written
//
// Gradients that autograd has put elsewhere may be lent instead of copied in: only what other ranks
// reduce of them is copied; the own slice is read where it is.
//   bytes moved in addition: n - n / ranks in
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "algo/slice.h"
#include "algo/staging.h"
#include "common/deadline.h"
#include "common/status.h"
#include "reduce/reduce.h"
#include "sync/team.h"

namespace gradsync {

struct BucketShape {
  std::size_t count;  // elements
  Dtype dtype;
  std::size_t parts;  // parameters in it
};

// A gradient that is not in its bucket. Parts of a bucket follow each other.
struct LentPart {
  const std::byte* data;
  std::size_t count;  // elements
};

// What one rank says of one bucket, in the arena; followed by a byte for each part.
struct alignas(cache_line) BucketNotice {
  std::atomic<std::uint32_t> arrived{0};  // the pass in which it was last full
  std::uint32_t any_missing = 0;
  double weight = 1.0;
};

class Board {
 public:
  // Bytes of the notices of all buckets.
  static std::size_t notice_bytes(std::span<const BucketShape> shapes);

  // `notices[r]` and `buckets[r][b]` are where rank r has its notices and buckets.
  Board(Team& team, std::uint32_t number, std::vector<BucketShape> shapes,
        const std::vector<std::byte*>& notices, const std::vector<std::vector<std::byte*>>& buckets,
        std::shared_ptr<std::byte> own_notices);

  std::size_t size() const { return entries_.size(); }

  // This rank's bucket is full. `missing`, when given, has a byte for each part: 1 where this rank
  // has nothing to add (and left zeros). The result is the mean of the ranks' buckets, weighted.
  // `parts`, when given, are all of the bucket, which is elsewhere: it is copied, or, if we may
  // `keep` it until reduced() has passed the bucket, lent.
  Status arrive(std::size_t bucket, double weight, std::span<const std::uint8_t> missing,
                std::span<const LentPart> parts = {}, bool keep = false);
  // How many buckets of this pass, from the first, have been reduced by this rank.
  std::size_t reduced() const { return next_; }
  const BucketShape& shape(std::size_t bucket) const { return entries_.at(bucket).shape; }
  // Reduces what can be reduced; true when there was something.
  bool advance();
  // Ends the pass on all ranks.
  Status finish(Deadline deadline);

  // After finish(): the parts of a bucket that were missing on every rank.
  const std::vector<std::size_t>& missing_everywhere(std::size_t bucket) const {
    return entries_.at(bucket).missing_everywhere;
  }

 private:
  struct Entry {
    BucketShape shape;
    ReduceKernel average;
    WeightedKernel weighted;
    std::vector<BucketNotice*> notices;  // of each rank
    std::vector<std::byte*> data;
    std::vector<LentPart> lent;  // by this rank, in this pass
    std::vector<std::size_t> missing_everywhere;
  };

  static std::uint8_t* parts_of(BucketNotice* notice) {
    return reinterpret_cast<std::uint8_t*>(notice + 1);
  }
  bool is_full_everywhere(const Entry& entry) const;
  // Copies parts to this rank's bucket, all but a slice.
  void copy_without(Slice kept, std::span<const LentPart> parts, const Entry& entry) const;
  void reduce_own_slice(Entry& entry) const;
  // `own` is where this rank's elements are.
  void reduce_range(const Entry& entry, Slice range, const std::byte* own) const;
  static void find_missing(Entry& entry);

  Team& team_;
  std::uint32_t number_;  // among the boards of its group
  std::shared_ptr<std::byte> own_notices_;
  std::vector<Entry> entries_;
  std::size_t whole_ = 0;  // bytes of all buckets
  std::uint32_t pass_ = 1;
  std::size_t next_ = 0;  // the first bucket whose slice is not reduced yet
};

}  // namespace gradsync
