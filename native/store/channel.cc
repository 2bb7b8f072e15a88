#include "store/channel.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <limits>

#include "store/fork_guard.h"
#include "store/interrupt.h"

namespace gradsync::store {
namespace {

constexpr std::size_t max_unacknowledged = std::size_t{256} << 10;  // bytes, before a ping is due
constexpr std::chrono::milliseconds follower_tick{100};
constexpr double reconnect_timeout_s = 10.0;

template <typename T>
void patch(std::string& frame, std::size_t offset, const T& value) {
  std::memcpy(frame.data() + offset, &value, sizeof(value));
}

std::int64_t milliseconds_left(const Deadline& limit) {
  const std::int64_t left = limit.remaining_ns();
  // 0 means for ever on the wire; a limit that has just passed still gets its timeout reply.
  return left == std::numeric_limits<std::int64_t>::max() ? 0 : left / 1'000'000 + 1;
}

}  // namespace

Status Channel::open(DialOptions options, const Deadline& deadline) {
  options_ = std::move(options);
  generation_ = fork_generation();
  if (Status status = random_id(options_.session); !status.ok()) return status;
  Dialed dialed;
  if (Status status = dial_patiently(options_, deadline, dialed); !status.ok()) return status;
  socket_ = std::move(dialed.socket);
  instance_ = dialed.instance;
  return Status::success();
}

Channel::~Channel() {
  if (!socket_.open() || generation_ != fork_generation() || is_broken_) return;
  std::string frame;
  RequestHeader header;
  header.op = Op::bye;
  header.seq = last_seq_ + 1;
  header.received = received_;
  end_request(frame, begin_request(frame, header));
  static_cast<void>(::send(socket_.fd(), frame.data(), frame.size(), MSG_NOSIGNAL | MSG_DONTWAIT));
}

void Channel::cut() {
  const std::scoped_lock lock(send_mutex_);
  if (check_fork().ok()) ::shutdown(socket_.fd(), SHUT_RDWR);
}

Status Channel::check_fork() const {
  if (generation_ == fork_generation()) return Status::success();
  return Status::error(Code::connection,
                       "this store was opened before the process was forked, and its connection "
                       "belongs to the parent. Open a new store in the child");
}

// -- sending
// ----------------------------------------------------------------------------------------

Status Channel::call(Call& call) {
  if (Status status = check_fork(); !status.ok()) return status;
  if (Status status = begin(call); !status.ok()) return status;
  std::unique_lock lock(mutex_);
  while (!call.done) {
    if (reading_) {
      follow(lock, call);
    } else {
      lead(lock, call);
    }
  }
  return call.failure;
}

Status Channel::begin(Call& call) {
  const std::scoped_lock sending(send_mutex_);
  call.seq = ++last_seq_;
  call.done = false;
  call.failure = Status::success();
  patch(call.frame, offsetof(RequestHeader, seq), call.seq);
  {
    const std::scoped_lock lock(mutex_);
    if (!broken_.ok()) return broken_;
    patch(call.frame, offsetof(RequestHeader, received), received_);
    pending_.push_back(&call);
  }
  Status status = send_frame(call.frame.data(), call.frame.size(), call.guard);
  // A broken connection is the reader's to mend: the request will be repeated.
  if (status.ok() || status.code == Code::connection) return Status::success();
  const std::scoped_lock lock(mutex_);
  std::erase(pending_, &call);
  return status;
}

// On any failure the connection is cut, since nobody knows how much of the frame has gone out.
Status Channel::send_frame(const char* bytes, std::size_t size, const Deadline& guard) {
  Status status = send_exactly(socket_.fd(), bytes, size, guard);
  if (!status.ok()) ::shutdown(socket_.fd(), SHUT_RDWR);
  return status;
}

Status Channel::post(std::string_view key, std::string_view value, const Deadline& guard) {
  if (Status status = check_fork(); !status.ok()) return status;
  bool is_cut = false;
  bool is_due = false;
  {
    const std::scoped_lock sending(send_mutex_);
    if (is_broken_.load(std::memory_order_acquire)) {
      const std::scoped_lock lock(mutex_);
      return broken_;
    }
    if (acknowledged_.load(std::memory_order_relaxed) > last_set_seq_) unacknowledged_.clear();
    RequestHeader header;
    header.op = Op::set;
    header.seq = last_set_seq_ = ++last_seq_;
    header.keys = header.values = 1;
    const std::size_t start = begin_request(unacknowledged_, header);
    put_string(unacknowledged_, key);
    put_string(unacknowledged_, value);
    end_request(unacknowledged_, start);
    Status status = send_unacknowledged(start, guard);
    is_cut = status.code == Code::connection;
    if (!status.ok() && !is_cut) return status;
    is_due = unacknowledged_.size() > max_unacknowledged;
  }
  if (is_due) {
    Call ping;
    ping.guard = guard;
    end_request(ping.frame, begin_request(ping.frame, RequestHeader{}));
    Status status = this->call(ping);
    const std::scoped_lock sending(send_mutex_);
    if (acknowledged_.load(std::memory_order_relaxed) > last_set_seq_) unacknowledged_ = {};
    return status;
  }
  if (!is_cut) return Status::success();
  std::unique_lock lock(mutex_);
  if (!reading_ && broken_.ok()) {
    reading_ = true;
    lock.unlock();
    recover();
    lock.lock();
    hand_over();
  }
  return broken_;
}

Status Channel::send_unacknowledged(std::size_t start, const Deadline& guard) {
  Status status = send_frame(unacknowledged_.data() + start, unacknowledged_.size() - start, guard);
  // The caller is told that it failed, so it must not be repeated later.
  if (!status.ok() && status.code != Code::connection) unacknowledged_.resize(start);
  return status;
}

// Best effort: a parked request that nobody waits for any more would steal from a queue.
void Channel::cancel(std::uint64_t seq) {
  const std::scoped_lock sending(send_mutex_);
  std::string frame;
  RequestHeader header;
  header.op = Op::cancel;
  header.seq = ++last_seq_;
  header.number = static_cast<std::int64_t>(seq);
  end_request(frame, begin_request(frame, header));
  const ssize_t sent =
      ::send(socket_.fd(), frame.data(), frame.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  if (sent > 0 && static_cast<std::size_t>(sent) < frame.size()) {
    ::shutdown(socket_.fd(), SHUT_RDWR);
  }
}

// -- receiving
// --------------------------------------------------------------------------------------

// Reads for everybody until its own call is done.
void Channel::lead(std::unique_lock<std::mutex>& lock, Call& call) {
  reading_ = true;
  while (!call.done) {
    const bool is_quiet = !receive(lock);
    if (!call.done && gives_up(lock, call, is_quiet)) break;
  }
  hand_over();
}

void Channel::follow(std::unique_lock<std::mutex>& lock, Call& call) {
  const bool is_tick = call.wake.wait_for(lock, follower_tick) == std::cv_status::timeout;
  if (!call.done && is_tick) static_cast<void>(gives_up(lock, call, true));
}

bool Channel::gives_up(std::unique_lock<std::mutex>& lock, Call& call, bool check_signals) {
  bool is_interrupted = false;
  if (check_signals) {
    // The hook may run the program's own signal handlers, which may use this store.
    lock.unlock();
    is_interrupted = interrupted();
    lock.lock();
    if (call.done) return true;
  }
  if (!is_interrupted && !call.guard.expired()) return false;
  std::erase(pending_, &call);
  call.done = true;
  call.failure = is_interrupted
                     ? interrupted_status()
                     : Status::error(Code::timeout, "the store at " + options_.address.text() +
                                                        " does not answer; its process is stopped, "
                                                        "overloaded, or its host is unreachable");
  const std::uint64_t seq = call.seq;
  lock.unlock();
  cancel(seq);
  lock.lock();
  return true;
}

// One receive, and the delivery of what it brought. False when nothing came for a tick.
bool Channel::receive(std::unique_lock<std::mutex>& lock) {
  lock.unlock();
  char* const room = input_.room();
  const ssize_t got = ::recv(socket_.fd(), room, input_.room_size(), 0);
  const int number = errno;
  lock.lock();
  if (got > 0) {
    input_.arrived(static_cast<std::size_t>(got));
    if (deliver()) return true;
  } else if (got < 0 && (number == EAGAIN || number == EINTR)) {
    return false;
  }
  lock.unlock();
  recover();
  lock.lock();
  return true;
}

// Hands the complete replies in the input to those who wait for them. False: not a reply.
bool Channel::deliver() {
  while (true) {
    ReplyHeader header;
    const std::string_view bytes = input_.view();
    const Parsed parsed = parse_reply_header(bytes, header);
    if (parsed == Parsed::incomplete) return true;
    if (parsed == Parsed::malformed) return false;
    const auto found = std::find_if(pending_.begin(), pending_.end(),
                                    [&](const Call* call) { return call->seq == header.seq; });
    const bool is_wanted = found != pending_.end();
    if (!read_reply(bytes, header, is_wanted ? (*found)->reply : unwanted_)) return false;
    if (header.counted != 0) ++received_;
    if (header.seq > acknowledged_.load(std::memory_order_relaxed)) {
      acknowledged_.store(header.seq, std::memory_order_relaxed);
    }
    input_.consume(reply_bytes(header));
    if (!is_wanted) continue;
    Call& call = **found;
    pending_.erase(found);
    call.done = true;
    call.wake.notify_one();
  }
}

// The reading end is free: somebody who still waits takes it.
void Channel::hand_over() {
  reading_ = false;
  if (!pending_.empty()) pending_.front()->wake.notify_one();
}

// -- mending
// ----------------------------------------------------------------------------------------

// Called by the reader, without locks. Afterwards the connection works, or everybody has failed.
void Channel::recover() {
  const std::scoped_lock sending(send_mutex_);
  const Status status = reconnect();
  if (!status.ok()) fail_all(status);
}

Status Channel::reconnect() {
  input_.clear();
  std::uint64_t received = 0;
  {
    const std::scoped_lock lock(mutex_);
    if (!broken_.ok()) return broken_;
    received = received_;
  }
  if (acknowledged_.load(std::memory_order_relaxed) > last_set_seq_) unacknowledged_.clear();
  Dialed dialed;
  const Deadline deadline = Deadline::after(reconnect_timeout_s);
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
  return repeat(frames);
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
    patch(call->frame, offsetof(RequestHeader, received), received_);
    patch(call->frame, offsetof(RequestHeader, timeout_ms), milliseconds_left(call->limit));
    frames.append(call->frame);
  }
  take_sets_before(std::numeric_limits<std::uint64_t>::max());
  return frames;
}

// Sends without ever only sending: the server may have replies for us that it wants to be rid of.
Status Channel::repeat(const std::string& frames) {
  std::size_t sent_bytes = 0;
  const Deadline deadline = Deadline::after(reconnect_timeout_s);
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
      return Status::error(Code::connection, "the store at " + options_.address.text() +
                                                 " does not take the requests repeated to it");
    }
  }
  if (sent_bytes < frames.size()) ::shutdown(socket_.fd(), SHUT_RDWR);
  return Status::success();
}

void Channel::fail_all(const Status& status) {
  const std::scoped_lock lock(mutex_);
  if (broken_.ok()) broken_ = status;
  is_broken_.store(true, std::memory_order_release);
  for (Call* const call : pending_) {
    call->failure = broken_;
    call->done = true;
    call->wake.notify_one();
  }
  pending_.clear();
}

}  // namespace gradsync::store
