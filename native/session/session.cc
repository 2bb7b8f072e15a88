#include "session/session.h"

#include <numeric>
#include <sstream>
#include <utility>

#include "common/interrupt.h"

namespace gradsync {
namespace {

// Messages come after what the team needs.
std::size_t mail_offset(int ranks, std::size_t staging_bytes) {
  return segment_bytes(static_cast<std::size_t>(ranks), staging_bytes);
}

std::vector<int> all_ranks(int ranks) {
  std::vector<int> all(static_cast<std::size_t>(ranks));
  std::iota(all.begin(), all.end(), 0);
  return all;
}

}  // namespace

Session::Session(std::shared_ptr<Segment> segment, std::shared_ptr<Arena> arena, int arena_rank,
                 int rank, int ranks, Liveness liveness)
    : segment_(std::move(segment)),
      arena_(std::move(arena)),
      arena_rank_(arena_rank),
      team_(segment_->data(), rank, ranks, std::move(liveness)),
      staging_(team_, arena_.get()),
      answerer_(team_.slots()[rank]),
      whereabouts_(segment_, team_.slots(), all_ranks(ranks)),
      mail_(team_, segment_, mail_offset(ranks, team_.staging_bytes())) {}

Status Session::make_memory(int ranks, std::size_t staging_bytes, bool open, Segment& out) {
  const MailLayout mail{static_cast<std::size_t>(ranks)};
  const std::size_t offset = mail_offset(ranks, staging_bytes);
  const std::size_t head = staging_offset(static_cast<std::size_t>(ranks));
  Status status = Segment::create(offset + mail.total_bytes(), head, out);
  if (status.ok()) status = out.reserve(offset, mail.reserved_bytes());
  if (status.ok()) Team::format(out.data(), ranks, staging_bytes, open);
  return status;
}

Status Session::reserve_staging() {
  const auto offset = static_cast<std::size_t>(team_.staging(rank()) - segment_->data());
  Status status = segment_->reserve(offset, round_up(team_.staging_bytes(), page_bytes));
  has_staging_ = status.ok();
  if (!status.ok()) team_.abort(status.message);  // the others wait for a call that never comes
  return status;
}

Session::~Session() {
  if (is_ours()) {
    // The worker may be waiting for the lock of whoever destroys us.
    run_unlocked([this] { close(Deadline::after(0)); });
  } else {
    queue_.forget_worker();
  }
}

void Session::close(Deadline deadline) {
  if (!is_ours()) return;
  queue_.drain(deadline);
  mail_.close(deadline);
  team_.cancel();
  queue_.close();
  leave("");
}

std::shared_ptr<Ticket> Session::post(Queue::Call call) {
  if (is_ours()) return queue_.post(std::move(call));
  auto refused = std::make_shared<Ticket>();
  refused->complete(not_ours());
  return refused;
}

Status Session::not_ours() const {
  return Status::error(Code::invalid, "this process is a fork of rank " + std::to_string(rank()) +
                                          " and not a rank itself; only the rank may use its "
                                          "group, so pass it what it shall send");
}

template <typename Call>
Status Session::run(Deadline deadline, Call call) {
  if (!is_ours()) return not_ours();
  return queue_.run(deadline, [&] { return guarded(deadline, call); });
}

template <typename Call>
Status Session::guarded(Deadline deadline, Call& call) {
  if (!broken_.ok()) return broken_;
  const std::uint64_t before = team_.sequence();
  Status status = team_.check_aborted();
  if (!has_staging_ && status.ok()) status = reserve_staging();
  team_.begin(deadline.start());
  if (status.ok()) status = call();
  if (status.ok()) return status;
  let_go_of_lock();  // what follows waits for others
  if (status.code != Code::invalid) broken_ = status;
  // Whoever gives up must not let a rank that comes later believe that all were there. (A lost peer
  // or a mismatch is seen by every rank on its own.)
  if (status.code == Code::timeout || status.code == Code::interrupted) {
    std::ostringstream why;
    why << "rank " << rank() << " gave up on call #" << team_.call() << ": " << status.message;
    for (const int peer : status.ranks)
      why << (peer == status.ranks[0] ? " (missing: " : ", ") << peer;
    if (!status.ranks.empty()) why << ")";
    team_.abort(why.str(), true);
  }
  if (status.code == Code::aborted && team_.sequence() != before) team_.abandon();
  if (!broken_.ok()) look_into(status);
  // Ctrl-C reaches all ranks at once, and some see the others go before they see the signal.
  if (status.code != Code::interrupted && interrupted()) return interrupted_status();
  return status;
}

Status Session::barrier(Deadline deadline) {
  return run(deadline, [&] { return gradsync::barrier(team_, deadline); });
}

Status Session::broadcast(std::byte* data, std::size_t count, Dtype dtype, int root,
                          Deadline deadline) {
  return run(deadline, [&] {
    const Status status = check_root(root);
    if (!status.ok()) return status;
    return gradsync::broadcast(team_, staging_, data, count, dtype, root, deadline);
  });
}

Status Session::all_reduce(std::byte* data, std::size_t count, Dtype dtype, Reduce reduce,
                           Deadline deadline) {
  return run(deadline, [&] {
    return gradsync::all_reduce(team_, staging_, data, count, dtype, reduce, deadline);
  });
}

Status Session::finish(Board& board, Deadline deadline) {
  return run(deadline, [&] { return board.finish(deadline); });
}

Status Session::check_root(int root) const {
  if (root >= 0 && root < size()) return Status::success();
  std::ostringstream text;
  text << "no rank " << root << " in a group of " << size();
  return Status::error(Code::invalid, text.str());
}

Status Session::check_list(const char* what, std::size_t entries, bool needed) const {
  const std::size_t wanted = needed ? static_cast<std::size_t>(size()) : 0;
  if (entries == wanted) return Status::success();
  std::ostringstream text;
  text << entries << " " << what << " on rank " << rank() << " of " << size() << ", which needs "
       << wanted;
  return Status::error(Code::invalid, text.str());
}

Status Session::reduce(std::byte* data, std::size_t count, Dtype dtype, Reduce reduce, int root,
                       Deadline deadline) {
  return run(deadline, [&] {
    const Status status = check_root(root);
    if (!status.ok()) return status;
    return gradsync::reduce(team_, staging_, data, count, dtype, reduce, root, deadline);
  });
}

Status Session::all_gather(const std::byte* input, std::size_t count, Dtype dtype,
                           std::span<std::byte* const> outputs, Deadline deadline) {
  return run(deadline, [&] {
    const Status status = check_list("outputs", outputs.size());
    if (!status.ok()) return status;
    return gradsync::all_gather(team_, staging_, input, count, dtype, outputs, deadline);
  });
}

Status Session::all_gather_uneven(const std::byte* input, const Pieces<std::byte>& outputs,
                                  Dtype dtype, Deadline deadline) {
  return run(deadline, [&] {
    Status status = check_list("outputs", outputs.data.size());
    if (status.ok()) status = check_list("counts", outputs.counts.size());
    if (!status.ok()) return status;
    return gradsync::all_gather_uneven(team_, staging_, input, outputs, dtype, deadline);
  });
}

Status Session::gather(const std::byte* input, std::size_t count, Dtype dtype,
                       std::span<std::byte* const> outputs, int root, Deadline deadline) {
  return run(deadline, [&] {
    Status status = check_root(root);
    if (status.ok()) status = check_list("outputs", outputs.size(), rank() == root);
    if (!status.ok()) return status;
    return gradsync::gather(team_, staging_, input, count, dtype, outputs, root, deadline);
  });
}

Status Session::scatter(std::span<const std::byte* const> inputs, std::byte* output,
                        std::size_t count, Dtype dtype, int root, Deadline deadline) {
  return run(deadline, [&] {
    Status status = check_root(root);
    if (status.ok()) status = check_list("inputs", inputs.size(), rank() == root);
    if (!status.ok()) return status;
    return gradsync::scatter(team_, staging_, inputs, output, count, dtype, root, deadline);
  });
}

Status Session::reduce_scatter(std::span<const std::byte* const> inputs,
                               std::span<const std::size_t> counts, std::byte* output, Dtype dtype,
                               Reduce reduce, Deadline deadline) {
  return run(deadline, [&] {
    Status status = check_list("inputs", inputs.size());
    if (status.ok()) status = check_list("counts", counts.size());
    if (!status.ok()) return status;
    return gradsync::reduce_scatter(team_, staging_, inputs, counts, output, dtype, reduce,
                                    deadline);
  });
}

Status Session::all_to_all(const Pieces<const std::byte>& inputs, const Pieces<std::byte>& outputs,
                           Dtype dtype, Deadline deadline) {
  return run(deadline, [&] {
    Status status = check_list("inputs", inputs.data.size());
    if (status.ok()) status = check_list("input counts", inputs.counts.size());
    if (status.ok()) status = check_list("outputs", outputs.data.size());
    if (status.ok()) status = check_list("output counts", outputs.counts.size());
    if (!status.ok()) return status;
    return gradsync::all_to_all(team_, staging_, inputs, outputs, dtype, deadline);
  });
}

std::vector<RankReport> Session::report() const {
  std::vector<RankReport> all;
  for (int rank = 0; rank < size(); ++rank) all.push_back(team_.report(rank));
  return all;
}

}  // namespace gradsync
