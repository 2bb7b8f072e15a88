// The part of the channel that opens a broken connection again and repeats what was not answered.
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <limits>

#include "store/channel.h"

namespace gradsync::store {
namespace {

constexpr double reconnect_timeout_s = 10.0;

std::int64_t milliseconds_left(const Deadline& limit) {
  const std::int64_t left = limit.remaining_ns();
  // 0 means for ever on the wire; a limit that has just passed still gets its timeout reply.
  return left == std::numeric_limits<std::int64_t>::max() ? 0 : left / 1'000'000 + 1;
}

}  // namespace

// ----------------------------------------------------------------------------------------

// Called by the reader, without locks. Afterwards the connection works, or everybody has failed, or
// the caller's own time is over; then the next reader goes on trying.
void Channel::recover(const Deadline& guard) {
  const Sending sending(*this);
  const double left_s = static_cast<double>(guard.remaining_ns()) / 1e9;
  const Status status = reconnect(Deadline::after(std::min(reconnect_timeout_s, left_s)));
  if (status.ok() || (status.code == Code::timeout && guard.expired())) return;
  // What may pass, or was interrupted, is tried again by the next call.
  const bool for_good = status.code != Code::timeout && status.code != Code::interrupted;
  fail_all(status, for_good);
}

Status Channel::reconnect(const Deadline& deadline) {
  input_.clear();
  std::uint64_t received = 0;
  {
    const std::scoped_lock lock(mutex_);
    if (!broken_.ok()) return broken_;
    received = received_;
  }
  if (acknowledged_.load(std::memory_order_relaxed) > last_set_seq_) unacknowledged_.clear();
  Dialed dialed;
  if (Status status = dial_again(options_, received, deadline, dialed); !status.ok()) {
    return status;
  }
  if (dialed.instance != instance_) {
    return Status::error(Code::connection, "the store at " + options_.address.text() +
                                               " was restarted, its data is gone");
  }
  socket_ = std::move(dialed.socket);
  const std::string frames = unanswered();
  if (!dialed.resumed && last_seq_ > 0 && !frames.empty()) {
    return Status::error(Code::connection,
                         "the connection to the store at " + options_.address.text() +
                             " was lost for so long that the server forgot this client, with "
                             "requests under way");
  }
  return repeat(frames, deadline);
}

// Everything that the server may not have got, in the order of the numbers.
std::string Channel::unanswered() {
  const std::scoped_lock lock(mutex_);
  std::string frames;
  std::string_view sets = unacknowledged_;
  const auto take_sets_before = [&](std::uint64_t seq) {
    while (!sets.empty()) {
      RequestHeader header;
      std::memcpy(&header, sets.data(), sizeof(header));
      if (header.seq > seq) return;
      const std::size_t size = sizeof(header) + header.length;
      frames.append(sets.substr(0, size));
      sets.remove_prefix(size);
    }
  };
  for (Call* const call : pending_) {
    take_sets_before(call->seq);
    patch_request(call->frame, offsetof(RequestHeader, received), received_);
    patch_request(call->frame, offsetof(RequestHeader, timeout_ms), milliseconds_left(call->limit));
    frames.append(call->frame);
  }
  take_sets_before(std::numeric_limits<std::uint64_t>::max());
  return frames;
}

// Sends without ever only sending: the server may have replies for us that it wants to be rid of.
Status Channel::repeat(const std::string& frames, const Deadline& deadline) {
  std::size_t sent_bytes = 0;
  while (sent_bytes < frames.size()) {
    const ssize_t sent = ::send(socket_.fd(), frames.data() + sent_bytes,
                                frames.size() - sent_bytes, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent > 0) {
      sent_bytes += static_cast<std::size_t>(sent);
      continue;
    }
    // Cut again: the reader will notice and start over.
    if (errno != EAGAIN && errno != EINTR) break;
    pollfd waiting{socket_.fd(), POLLIN | POLLOUT, 0};
    ::poll(&waiting, 1, 100);
    if ((waiting.revents & POLLIN) != 0) {
      const std::scoped_lock lock(mutex_);
      char* const room = input_.room();
      const ssize_t got = ::recv(socket_.fd(), room, input_.room_size(), MSG_DONTWAIT);
      if (got > 0) input_.arrived(static_cast<std::size_t>(got));
      if (got == 0 || !deliver()) break;
    } else if (deadline.expired()) {
      ::shutdown(socket_.fd(), SHUT_RDWR);
      return Status::error(Code::timeout, "the store at " + options_.address.text() +
                                              " does not take the requests repeated to it");
    }
  }
  if (sent_bytes < frames.size()) ::shutdown(socket_.fd(), SHUT_RDWR);
  return Status::success();
}

void Channel::fail_all(const Status& status, bool for_good) {
  const std::scoped_lock lock(mutex_);
  if (for_good && broken_.ok()) {
    broken_ = status;
    is_broken_.store(true, std::memory_order_release);
  }
  for (Call* const call : pending_) {
    call->failure = status;
    call->done = true;
    call->wake.notify_one();
  }
  pending_.clear();
}

}  // namespace gradsync::store
