#include "algo/board.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <string>

#include "algo/algorithm.h"
#include "algo/rounds.h"
#include "reduce/far_copy.h"
#include "reduce/far_ways.h"

// What goes into large buckets is written past the caches, be that the faster way to copy or not:
// nobody reads it before the pass is over, and backward needs the caches. On a machine where it is
// not, a step of 18 MiB took 37.2 ms so and 37.5 ms otherwise, one of 32 MiB 35.4 and 35.9 (means
// of three runs each).
namespace gradsync {
namespace {

std::size_t notice_bytes_of(const BucketShape& shape) {
  return round_up(sizeof(BucketNotice) + shape.parts, cache_line);
}

}  // namespace

std::size_t Board::notice_bytes(std::span<const BucketShape> shapes) {
  std::size_t bytes = 0;
  for (const BucketShape& shape : shapes) bytes += notice_bytes_of(shape);
  return bytes;
}

Board::Board(Team& team, std::uint32_t number, std::vector<BucketShape> shapes,
             const std::vector<std::byte*>& notices,
             const std::vector<std::vector<std::byte*>>& buckets,
             std::shared_ptr<std::byte> own_notices)
    : team_(team), number_(number), own_notices_(std::move(own_notices)) {
  std::size_t offset = 0;
  for (std::size_t b = 0; b < shapes.size(); ++b) {
    Entry entry{shapes[b], nullptr, find_weighted_kernel(shapes[b].dtype), {}, {}, {}, {}};
    (void)find_kernel(shapes[b].dtype, Reduce::avg, entry.average);
    for (std::size_t rank = 0; rank < notices.size(); ++rank) {
      // Zeroed memory is a notice that never arrived: nothing has to be constructed.
      entry.notices.push_back(
          std::launder(reinterpret_cast<BucketNotice*>(notices[rank] + offset)));
      entry.data.push_back(buckets[rank][b]);
    }
    offset += notice_bytes_of(shapes[b]);
    whole_ += shapes[b].count * size_of(shapes[b].dtype);
    entries_.push_back(std::move(entry));
  }
}

Status Board::arrive(std::size_t bucket, double weight, std::span<const std::uint8_t> missing,
                     std::span<const LentPart> parts, bool keep) {
  if (bucket >= entries_.size()) {
    return Status::error(Code::invalid, "no bucket " + std::to_string(bucket) + " on a board of " +
                                            std::to_string(entries_.size()));
  }
  Entry& entry = entries_[bucket];
  BucketNotice& notice = *entry.notices[static_cast<std::size_t>(team_.rank())];
  if (notice.arrived.load(std::memory_order_relaxed) == pass_) {
    // Others may have reduced it since: what was added now would be lost, or counted by some.
    return Status::error(Code::invalid, "bucket " + std::to_string(bucket) +
                                            " was full already in this pass, which was not "
                                            "finished");
  }
  if (!missing.empty() && missing.size() != entry.shape.parts) {
    return Status::error(Code::invalid, std::to_string(missing.size()) + " flags for " +
                                            std::to_string(entry.shape.parts) + " parts");
  }
  const std::size_t element = size_of(entry.shape.dtype);
  const Slice own = slice_of(entry.shape.count, team_.rank(), team_.size(), element);
  if (keep) entry.lent.assign(parts.begin(), parts.end());
  if (!parts.empty()) copy_without(keep ? own : Slice{0, 0}, parts, entry);
  notice.weight = weight;
  notice.any_missing = missing.empty() ? 0 : 1;
  if (!missing.empty()) std::memcpy(parts_of(&notice), missing.data(), missing.size());
  // Releases the bucket and the fields above to whoever reads the pass.
  notice.arrived.store(pass_, std::memory_order_release);
  team_.nudge();
  advance();
  return Status::success();
}

bool Board::is_full_everywhere(const Entry& entry) const {
  return std::all_of(entry.notices.begin(), entry.notices.end(), [this](const BucketNotice* n) {
    return n->arrived.load(std::memory_order_acquire) == pass_;
  });
}

bool Board::advance() {
  const std::size_t before = next_;
  while (next_ < entries_.size() && is_full_everywhere(entries_[next_])) {
    reduce_own_slice(entries_[next_]);
    entries_[next_].lent.clear();
    ++next_;
  }
  return next_ != before;
}

void Board::copy_without(Slice kept, std::span<const LentPart> parts, const Entry& entry) const {
  const std::size_t element = size_of(entry.shape.dtype);
  std::byte* const bucket = entry.data[static_cast<std::size_t>(team_.rank())];
  std::size_t begin = 0;
  for (const LentPart& part : parts) {
    const std::size_t end = begin + part.count;
    const auto copy = [&](std::size_t from, std::size_t to) {
      std::byte* const there = bucket + from * element;
      const std::byte* const here = part.data + (from - begin) * element;
      if (from >= to || there == here) return;
      const auto copy_part = whole_ < far_copy_bytes ? copy_bytes : far_copy;
      copy_part(there, here, (to - from) * element);
    };
    copy(begin, std::min(end, kept.begin));
    copy(std::max(begin, kept.begin + kept.count), end);
    begin = end;
  }
}

void Board::reduce_own_slice(Entry& entry) const {
  const std::size_t element = size_of(entry.shape.dtype);
  const Slice own = slice_of(entry.shape.count, team_.rank(), team_.size(), element);
  if (own.count == 0) return;
  if (entry.lent.empty()) {
    const std::byte* const bucket = entry.data[static_cast<std::size_t>(team_.rank())];
    reduce_range(entry, own, bucket + own.begin * element);
    return;
  }
  std::size_t begin = 0;
  for (const LentPart& part : entry.lent) {
    const std::size_t from = std::max(begin, own.begin);
    const std::size_t to = std::min(begin + part.count, own.begin + own.count);
    if (from < to) reduce_range(entry, {from, to - from}, part.data + (from - begin) * element);
    begin += part.count;
  }
}

void Board::reduce_range(const Entry& entry, Slice range, const std::byte* own) const {
  const std::size_t element = size_of(entry.shape.dtype);
  const auto mine = static_cast<std::size_t>(team_.rank());
  std::vector<const std::byte*> sources;
  std::vector<std::byte*> destinations;
  std::vector<double> weights;
  Access access = access_to(whole_);
  access.past_caches = whole_ >= far_bytes;
  double total = 0;
  bool equal = true;
  for (std::size_t rank = 0; rank < entry.data.size(); ++rank) {
    destinations.push_back(entry.data[rank] + range.begin * element);
    sources.push_back(rank == mine ? own : destinations.back());
    weights.push_back(entry.notices[rank]->weight);
    total += weights.back();
    equal = equal && weights.back() == weights[0];
  }
  // Equal weights take the plain mean, whose bits do not depend on the weight.
  if (equal && total != 0) {
    entry.average(sources, destinations, range.count, access);
    return;
  }
  for (double& weight : weights) weight = total != 0 ? weight / total : 0.0;
  entry.weighted(sources, weights, destinations, range.count, access);
}

Status Board::finish(Deadline deadline) {
  const std::uint64_t what = pack_call(Op::finish_buckets, Dtype::u8, Reduce::sum, number_);
  team_.announce(what, pass_);
  // All have announced: all buckets have arrived. Meanwhile there may be something to do.
  Status status = team_.agree(deadline, [this] { return advance(); });
  if (!status.ok()) return status;
  advance();
  // Before the next step: after it the others may write the notices of the next pass.
  for (Entry& entry : entries_) find_missing(entry);
  team_.publish(team_.progress() + 1);
  status = team_.wait_for_all(team_.progress(), deadline);
  if (!status.ok()) return status;
  ++pass_;
  next_ = 0;
  return Status::success();
}

void Board::find_missing(Entry& entry) {
  entry.missing_everywhere.clear();
  const auto& notices = entry.notices;
  if (std::any_of(notices.begin(), notices.end(),
                  [](const BucketNotice* n) { return n->any_missing == 0; })) {
    return;
  }
  for (std::size_t part = 0; part < entry.shape.parts; ++part) {
    if (std::all_of(notices.begin(), notices.end(),
                    [part](BucketNotice* n) { return parts_of(n)[part] != 0; })) {
      entry.missing_everywhere.push_back(part);
    }
  }
}

}  // namespace gradsync
