#include "session/founding.h"

#include <poll.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <span>
#include <string>
#include <utility>

namespace gradsync {
namespace {

// What the host sends to each guest, followed by the memory, the arena of a new world, and one
// pidfd per rank.
struct Welcome {
  std::uint64_t segment_bytes = 0;  // 0: the group could not be formed
  std::uint64_t arena_range_bytes = 0;
  std::uint32_t ranks = 0;
  std::uint32_t words_bytes = 0;  // of what follows before the descriptors
  // Only when it could not be formed: why, and which ranks it is about.
  Code code = Code::ok;
  std::uint32_t rank_count = 0;
  std::array<std::int32_t, 16> about{};
  std::array<char, 256> why{};
};

// The sockets of a process that is killed are closed a moment before its end is known.
constexpr int to_die = 1000;  // ms

bool ends_within(const Fd& process, int timeout_ms) {
  pollfd entry{process.get(), POLLIN, 0};
  return ::poll(&entry, 1, timeout_ms) > 0;
}

constexpr const char* left_early = "left before the group was formed";

std::span<const std::uint8_t> bytes_of(const Welcome& welcome) {
  return {reinterpret_cast<const std::uint8_t*>(&welcome), sizeof(welcome)};
}

std::span<std::uint8_t> room_in(std::string& text) {
  return {reinterpret_cast<std::uint8_t*>(text.data()), text.size()};
}

Welcome refusal(const Status& status) {
  Welcome welcome;
  welcome.code = status.code;
  welcome.rank_count =
      static_cast<std::uint32_t>(std::min(status.ranks.size(), welcome.about.size()));
  std::copy_n(status.ranks.begin(), welcome.rank_count, welcome.about.begin());
  status.message.copy(welcome.why.data(), welcome.why.size() - 1);
  return welcome;
}

// What a guest learns from a refusal.
Status reason_of(Welcome& welcome) {
  const auto count = std::min<std::size_t>(welcome.rank_count, welcome.about.size());
  welcome.why.back() = '\0';
  return Status::error(welcome.code, welcome.why.data(),
                       {welcome.about.begin(), welcome.about.begin() + count});
}

// What a guest's words begin with.
struct About {
  Identity identity;
  std::int32_t ranks = 0;  // of the group that it expects
};

std::string with_about(int ranks, const std::string& words) {
  const About own{Identity::own(), ranks};
  return std::string(reinterpret_cast<const char*>(&own), sizeof(own)) + words;
}

bool take_about(std::string& words, About& out) {
  if (words.size() < sizeof(out)) return false;
  std::memcpy(&out, words.data(), sizeof(out));
  words.erase(0, sizeof(out));
  return true;
}

Status check_welcome(Welcome& welcome, int ranks, bool has_world) {
  if (welcome.segment_bytes == 0) return reason_of(welcome);
  if (welcome.ranks != static_cast<std::uint32_t>(ranks)) {
    return Status::error(Code::invalid, "a group of " + std::to_string(welcome.ranks) +
                                            " ranks where " + std::to_string(ranks) +
                                            " were expected");
  }
  if ((welcome.arena_range_bytes == 0) != has_world) {
    return Status::error(Code::invalid, "one rank forms a world, another a sub-group of one");
  }
  return Status::success();
}

}  // namespace

void Founder::prepare(int ranks, std::size_t staging_bytes, const Session* world) {
  ranks_ = ranks;
  prepared_ = Session::make_memory(ranks, staging_bytes, true, segment_);
  if (world != nullptr) {
    arena_ = world->arena();
  } else if (prepared_.ok()) {
    prepared_ = Arena::create(ranks, arena_);
  }
}

// Opens a pidfd of every process that is known.
Status Founder::watch(const std::vector<int>& pids) {
  expected_.resize(pids.size());
  for (std::size_t i = 1; i < pids.size(); ++i) {
    // Any other failure only means that this one cannot be watched on its way.
    if (pids[i] <= 0 || open_pidfd(pids[i], expected_[i]).ok() || errno != ESRCH) continue;
    expected_.clear();
    return Status::error(Code::peer_lost, "ended before the group was formed",
                         {static_cast<int>(i)});
  }
  return Status::success();
}

Status Founder::gather(const std::vector<int>& pids, Deadline deadline) {
  Status status = expected_.empty() ? watch(pids) : Status::success();
  const std::size_t before = guests_.size();
  if (status.ok()) status = lobby_.gather(ranks_, deadline, expected_, guests_);
  identities_.resize(static_cast<std::size_t>(ranks_));
  for (std::size_t i = before; i < guests_.size(); ++i) {
    Guest& guest = guests_[i];
    About about;
    if (!take_about(guest.words, about)) {
      status = Status::error(Code::invalid, "a guest of another version", {guest.index});
    } else if (lobby_.is_known() && about.ranks != ranks_) {
      // Any other lobby tells its guests how many they are, and each finds out for itself.
      status = Status::error(Code::invalid, "a guest of another world", {guest.index});
    }
    identities_[static_cast<std::size_t>(guest.index)] = about.identity;
  }
  if (status.ok()) leave_guests_cores();
  // Guests who know the lobby's name come again, or look elsewhere, when it is gone.
  if (!status.ok() && status.code != Code::timeout && !lobby_.is_known()) turn_away(status);
  return status;
}

void Founder::leave_guests_cores() const {
  CpuMask taken;
  for (const Guest& guest : guests_) {
    taken.add(identities_[static_cast<std::size_t>(guest.index)].core);
  }
  if (taken.has(static_cast<std::uint32_t>(::sched_getcpu()))) move_off(taken);
}

void Founder::turn_away(const Status& why) {
  const Welcome welcome = refusal(why);
  for (const Guest& guest : guests_) {
    (void)send_descriptors(guest.socket, bytes_of(welcome), {}, Deadline::after(1.0));
  }
}

Status Founder::check_guests() const {
  for (const Guest& guest : guests_) {
    if (has_hung_up(guest.socket)) {
      return Status::error(Code::peer_lost, left_early, {guest.index});
    }
  }
  return Status::success();
}

Status Founder::found(const Session* world, const std::string& words, Deadline deadline,
                      std::unique_ptr<Session>& out) {
  std::vector<Fd> pidfds(static_cast<std::size_t>(ranks_));
  Status status = prepared_;
  if (status.ok()) status = open_pidfd(::getpid(), pidfds[0]);
  if (!status.ok()) {
    turn_away(status);
    return status;
  }
  identities_[0] = Identity::own();
  Team::introduce(segment_.data(), identities_);
  for (Guest& guest : guests_)
    pidfds[static_cast<std::size_t>(guest.index)] = std::move(guest.pidfd);
  std::vector<int> descriptors{segment_.fd()};
  if (world == nullptr) descriptors.push_back(arena_->fd());
  for (const Fd& fd : pidfds) descriptors.push_back(fd.get());
  Welcome welcome;
  welcome.segment_bytes = segment_.size();
  welcome.ranks = static_cast<std::uint32_t>(ranks_);
  welcome.arena_range_bytes = world == nullptr ? arena_->range_bytes() : 0;
  welcome.words_bytes = static_cast<std::uint32_t>(words.size());
  std::string message(reinterpret_cast<const char*>(&welcome), sizeof(welcome));
  message += words;
  Status failure;
  for (const Guest& guest : guests_) {
    status = send_descriptors(guest.socket, room_in(message), descriptors, deadline);
    // One that has died is found by its pidfd, by the others as well.
    const bool is_gone = status.code == Code::connection;
    const Fd& process = pidfds[static_cast<std::size_t>(guest.index)];
    if (status.ok() || (is_gone && ends_within(process, to_die))) continue;
    failure = is_gone ? Status::error(Code::peer_lost, left_early, {guest.index}) : status;
  }
  out = std::make_unique<Session>(std::make_shared<Segment>(std::move(segment_)), std::move(arena_),
                                  world != nullptr ? world->arena_rank() : 0, 0, ranks_,
                                  Liveness(std::move(pidfds)));
  status = out->enter(deadline);
  if (status.ok() && failure.ok()) return status;
  // Those who were let in believe in a group.
  if (status.ok()) status = failure;
  out->abort("the group could not be formed: " + status.message);
  out.reset();
  return status;
}

Status join_founder(Fd socket, const Secret& secret, int rank, int ranks, const Session* world,
                    Deadline deadline, std::string& words, std::unique_ptr<Session>& out) {
  Status status = introduce(socket, rank, secret, with_about(ranks, words));
  if (!status.ok()) return status;
  Fd host_process;
  status = peer_pidfd(socket, host_process);
  if (!status.ok()) return status;
  Welcome welcome;
  std::vector<Fd> received;
  status = receive_descriptors(socket, {reinterpret_cast<std::uint8_t*>(&welcome), sizeof(welcome)},
                               0, deadline, host_process, received);
  if (status.ok()) status = check_welcome(welcome, ranks, world != nullptr);
  if (!status.ok()) return status;
  const std::size_t memories = world == nullptr ? 2 : 1;
  words.assign(welcome.words_bytes, '\0');
  status = receive_descriptors(socket, room_in(words), static_cast<std::size_t>(ranks) + memories,
                               deadline, host_process, received);
  if (!status.ok()) return status;
  Segment segment;
  status = Segment::map(std::move(received[0]), welcome.segment_bytes, segment);
  std::shared_ptr<Arena> arena = world != nullptr ? world->arena() : nullptr;
  if (status.ok() && world == nullptr) {
    status = Arena::map(std::move(received[1]), ranks, welcome.arena_range_bytes, arena);
  }
  if (!status.ok()) return status;
  received.erase(received.begin(), received.begin() + static_cast<std::ptrdiff_t>(memories));
  out = std::make_unique<Session>(std::make_shared<Segment>(std::move(segment)), std::move(arena),
                                  world != nullptr ? world->arena_rank() : rank, rank, ranks,
                                  Liveness(std::move(received)));
  return out->enter(deadline);
}

Status found_local(int ranks, std::size_t staging_bytes, const std::vector<const Session*>& worlds,
                   std::vector<std::unique_ptr<Session>>& out, bool open) {
  const auto segment = std::make_shared<Segment>();
  Status status = Session::make_memory(ranks, staging_bytes, open, *segment);
  std::shared_ptr<Arena> arena = worlds.empty() ? nullptr : worlds.front()->arena();
  if (status.ok() && worlds.empty()) status = Arena::create(ranks, arena);
  if (!status.ok()) return status;
  for (int rank = 0; rank < ranks; ++rank) {
    const int range = worlds.empty() ? rank : worlds[static_cast<std::size_t>(rank)]->arena_rank();
    out.push_back(std::make_unique<Session>(segment, arena, range, rank, ranks, Liveness()));
  }
  return Status::success();
}

}  // namespace gradsync
