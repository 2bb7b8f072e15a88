// Boards: who has what where is exchanged once, through the collectives themselves.
#include <memory>
#include <vector>

#include "session/session.h"

namespace gradsync {
namespace {

// What the ranks tell each other: the place of the notices, then for each bucket its place and what
// it is, which must be the same everywhere.
constexpr std::size_t words_per_bucket = 4;

std::vector<std::uint64_t> describe(std::uint64_t notices, std::span<const std::uint64_t> places,
                                    std::span<const BucketShape> shapes) {
  std::vector<std::uint64_t> words{notices};
  for (std::size_t b = 0; b < shapes.size(); ++b) {
    words.insert(words.end(), {places[b], shapes[b].count,
                               static_cast<std::uint64_t>(shapes[b].dtype), shapes[b].parts});
  }
  return words;
}

Status compare(const std::vector<std::vector<std::uint64_t>>& tables, int rank) {
  Status verdict;
  const auto& mine = tables[static_cast<std::size_t>(rank)];
  for (std::size_t peer = 0; peer < tables.size(); ++peer) {
    for (std::size_t word = 1; word < mine.size(); ++word) {
      const bool is_place = (word - 1) % words_per_bucket == 0;
      if (is_place || tables[peer][word] == mine[word]) continue;
      verdict.code = Code::mismatch;
      verdict.message = "the ranks have different buckets";
      if (verdict.ranks.empty() || verdict.ranks.back() != static_cast<int>(peer)) {
        verdict.ranks.push_back(static_cast<int>(peer));
      }
    }
  }
  return verdict;
}

}  // namespace

Status Session::make_board(std::span<std::byte* const> buckets, std::vector<BucketShape> shapes,
                           Deadline deadline, std::unique_ptr<Board>& out) {
  std::vector<std::uint64_t> places;
  for (std::size_t b = 0; b < shapes.size(); ++b) {
    if (find_weighted_kernel(shapes[b].dtype) == nullptr) {
      return Status::error(Code::invalid, "there is no mean of elements of this type");
    }
    places.push_back(staging_.place_of(buckets[b], shapes[b].count * size_of(shapes[b].dtype)));
    if (places.back() == 0) {
      return Status::error(Code::invalid, "a bucket that is not in shared memory");
    }
  }
  std::byte* notices = nullptr;
  const std::size_t bytes = Board::notice_bytes(shapes);
  Status status = arena_->allocate(arena_rank_, std::max<std::size_t>(bytes, 1), notices);
  if (!status.ok()) return status;
  const std::shared_ptr<std::byte> keeper(notices,
                                          [arena = arena_](std::byte* data) { arena->free(data); });

  const auto mine = describe(arena_->place_of(notices, bytes), places, shapes);
  std::vector<std::vector<std::uint64_t>> tables(static_cast<std::size_t>(size()),
                                                 std::vector<std::uint64_t>(mine.size()));
  std::vector<std::byte*> outputs;
  for (auto& table : tables) outputs.push_back(reinterpret_cast<std::byte*>(table.data()));
  status = all_gather(reinterpret_cast<const std::byte*>(mine.data()), mine.size(), Dtype::u64,
                      outputs, deadline);
  if (status.ok()) status = compare(tables, rank());
  if (!status.ok()) return status;

  std::vector<std::byte*> all_notices;
  std::vector<std::vector<std::byte*>> all_buckets;
  for (const auto& table : tables) {
    all_notices.push_back(arena_->at(table[0]));
    all_buckets.emplace_back();
    for (std::size_t b = 0; b < shapes.size(); ++b) {
      all_buckets.back().push_back(arena_->at(table[1 + b * words_per_bucket]));
    }
  }
  out = std::make_unique<Board>(team_, ++boards_, std::move(shapes), all_notices, all_buckets,
                                keeper);
  return Status::success();
}

}  // namespace gradsync
