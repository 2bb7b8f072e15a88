#include "session/session.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>
#include <sstream>
#include <utility>

#include "common/interrupt.h"

namespace gradsync {
namespace {

// What the host sends to each guest, followed by the memory, the arena of a new world, and one
// pidfd per rank.
struct Welcome {
  std::uint64_t segment_bytes = 0;  // 0: the group could not be formed
  std::uint64_t arena_range_bytes = 0;
  std::uint32_t ranks = 0;
  // Only when it could not be formed: why, and which ranks it is about.
  Code code = Code::ok;
  std::uint32_t rank_count = 0;
  std::array<std::int32_t, 16> about{};
  std::array<char, 256> why{};
};

std::span<const std::uint8_t> bytes_of(const Welcome& welcome) {
  return {reinterpret_cast<const std::uint8_t*>(&welcome), sizeof(welcome)};
}

// The guests that came must not wait for their own deadline when the group cannot be formed.
void send_away(const std::vector<Guest>& guests, const Status& status) {
  Welcome welcome;
  welcome.code = status.code;
  welcome.rank_count =
      static_cast<std::uint32_t>(std::min(status.ranks.size(), welcome.about.size()));
  std::copy_n(status.ranks.begin(), welcome.rank_count, welcome.about.begin());
  status.message.copy(welcome.why.data(), welcome.why.size() - 1);
  for (const Guest& guest : guests) {
    (void)send_descriptors(guest.socket, bytes_of(welcome), {}, Deadline::after(1.0));
  }
}

// Messages come after what the team needs.
std::size_t mail_offset(int ranks, std::size_t staging_bytes) {
  return segment_bytes(static_cast<std::size_t>(ranks), staging_bytes);
}

Status make_segment(int ranks, std::size_t staging_bytes, Segment& out) {
  const MailLayout mail{static_cast<std::size_t>(ranks)};
  const std::size_t offset = mail_offset(ranks, staging_bytes);
  return Segment::create(offset + mail.total_bytes(), offset + mail.reserved_bytes(), out);
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

Status Session::host(Lobby lobby, const std::vector<int>& pids, std::size_t staging_bytes,
                     const Session* world, Deadline deadline, std::unique_ptr<Session>& out) {
  const auto ranks = static_cast<int>(pids.size());
  std::vector<Fd> expected(pids.size());
  Status status;
  for (std::size_t i = 1; i < pids.size(); ++i) {
    // Any other failure only means that this one cannot be watched on its way.
    if (pids[i] <= 0 || open_pidfd(pids[i], expected[i]).ok() || errno != ESRCH) continue;
    status = Status::error(Code::peer_lost, "its process ended before the group was formed",
                           {static_cast<int>(i)});
  }
  std::vector<Guest> guests;
  if (status.ok()) status = lobby.gather(ranks, deadline, expected, guests);
  Segment segment;
  if (status.ok()) {
    status = make_segment(ranks, staging_bytes, segment);
  }
  std::shared_ptr<Arena> arena = world != nullptr ? world->arena_ : nullptr;
  if (status.ok() && world == nullptr) status = Arena::create(ranks, arena);
  std::vector<Fd> pidfds(static_cast<std::size_t>(ranks));
  if (status.ok()) status = open_pidfd(::getpid(), pidfds[0]);
  if (!status.ok()) {
    send_away(guests, status);
    return status;
  }
  Team::format(segment.data(), ranks, staging_bytes);

  for (Guest& guest : guests)
    pidfds[static_cast<std::size_t>(guest.index)] = std::move(guest.pidfd);
  std::vector<int> descriptors{segment.fd()};
  if (world == nullptr) descriptors.push_back(arena->fd());
  for (const Fd& fd : pidfds) descriptors.push_back(fd.get());
  Welcome welcome;
  welcome.segment_bytes = segment.size();
  welcome.ranks = static_cast<std::uint32_t>(ranks);
  welcome.arena_range_bytes = world == nullptr ? arena->range_bytes() : 0;
  for (const Guest& guest : guests) {
    status = send_descriptors(guest.socket, bytes_of(welcome), descriptors, deadline);
    // A guest that died meanwhile is found by its pidfd when the team enters.
    if (!status.ok() && status.code != Code::connection) return status;
  }
  out = std::make_unique<Session>(std::make_shared<Segment>(std::move(segment)), std::move(arena),
                                  world != nullptr ? world->arena_rank_ : 0, 0, ranks,
                                  Liveness(std::move(pidfds)));
  return out->enter(deadline);
}

Status Session::join(Fd socket, const Secret& secret, int rank, int ranks, const Session* world,
                     Deadline deadline, std::unique_ptr<Session>& out) {
  Status status = introduce(socket, rank, secret);
  if (!status.ok()) return status;
  Fd host_process;
  status = peer_pidfd(socket, host_process);
  if (!status.ok()) return status;
  Welcome welcome;
  std::vector<Fd> received;
  status = receive_descriptors(socket, {reinterpret_cast<std::uint8_t*>(&welcome), sizeof(welcome)},
                               0, deadline, host_process, received);
  if (!status.ok()) return status;
  if (welcome.segment_bytes == 0) {
    const auto count = std::min<std::size_t>(welcome.rank_count, welcome.about.size());
    welcome.why.back() = '\0';
    return Status::error(welcome.code, welcome.why.data(),
                         {welcome.about.begin(), welcome.about.begin() + count});
  }
  if (welcome.ranks != static_cast<std::uint32_t>(ranks)) {
    return Status::error(Code::invalid, "a group of " + std::to_string(welcome.ranks) +
                                            " ranks where " + std::to_string(ranks) +
                                            " were expected");
  }
  if ((welcome.arena_range_bytes == 0) != (world != nullptr)) {
    return Status::error(Code::invalid, "one rank forms a world, another a sub-group of one");
  }
  const std::size_t memories = world == nullptr ? 2 : 1;
  status = receive_descriptors(socket, {}, static_cast<std::size_t>(ranks) + memories, deadline,
                               host_process, received);
  if (!status.ok()) return status;
  Segment segment;
  status = Segment::map(std::move(received[0]), welcome.segment_bytes, segment);
  std::shared_ptr<Arena> arena = world != nullptr ? world->arena_ : nullptr;
  if (status.ok() && world == nullptr) {
    status = Arena::map(std::move(received[1]), ranks, welcome.arena_range_bytes, arena);
  }
  if (!status.ok()) return status;
  received.erase(received.begin(), received.begin() + static_cast<std::ptrdiff_t>(memories));
  out = std::make_unique<Session>(std::make_shared<Segment>(std::move(segment)), std::move(arena),
                                  world != nullptr ? world->arena_rank_ : rank, rank, ranks,
                                  Liveness(std::move(received)));
  return out->enter(deadline);
}

Status Session::local(int ranks, std::size_t staging_bytes,
                      std::vector<std::unique_ptr<Session>>& out, bool open) {
  const auto segment = std::make_shared<Segment>();
  Status status = make_segment(ranks, staging_bytes, *segment);
  if (!status.ok()) return status;
  std::shared_ptr<Arena> arena;
  status = Arena::create(ranks, arena);
  if (!status.ok()) return status;
  Team::format(segment->data(), ranks, staging_bytes, open);
  for (int rank = 0; rank < ranks; ++rank) {
    out.push_back(std::make_unique<Session>(segment, arena, rank, rank, ranks, Liveness()));
  }
  return Status::success();
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
  return queue_.run(deadline, [&] { return guarded(call); });
}

template <typename Call>
Status Session::guarded(Call& call) {
  if (!broken_.ok()) return broken_;
  Status status = team_.check_aborted();
  team_.begin();
  if (status.ok()) status = call();
  if (status.ok()) return status;
  let_go_of_lock();  // what follows waits for others
  if (status.code != Code::invalid) broken_ = status;
  // Whoever gives up must not let a rank that comes later believe that all were there. (A lost peer
  // or a mismatch is seen by every rank on its own.)
  if (status.code == Code::timeout || status.code == Code::interrupted) {
    std::ostringstream why;
    why << "rank " << rank() << " gave up on call #" << sequence() << ": " << status.message;
    for (const int peer : status.ranks)
      why << (peer == status.ranks[0] ? " (missing: " : ", ") << peer;
    if (!status.ranks.empty()) why << ")";
    team_.abort(why.str(), true);
  }
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
