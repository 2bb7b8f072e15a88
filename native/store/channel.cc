#include "store/channel.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstring>

#include "common/fork.h"
#include "common/interrupt.h"
#include "common/moment.h"

namespace gradsync::store {
namespace {

constexpr std::size_t max_unacknowledged = std::size_t{256} << 10;  // bytes, before a ping is due
constexpr std::chrono::milliseconds follower_tick{100};

}  // namespace

thread_local const Channel* Channel::Sending::current = nullptr;

Status Channel::open(DialOptions options, const Deadline& deadline, bool patient) {
  options_ = std::move(options);
  generation_ = fork_generation();
  if (Status status = random_id(options_.session); !status.ok()) return status;
  Dialed dialed;
  const Status status = patient ? dial_patiently(options_, deadline, dialed)
                                : dial_at_once(options_, deadline, dialed);
  if (!status.ok()) return status;
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
  if (!check_use().ok()) return;
  const Sending sending(*this);
  ::shutdown(socket_.fd(), SHUT_RDWR);
}

Status Channel::check_use() const {
  // A send that blocks lets the program's signal handlers run; they cannot send in its middle.
  if (Sending::current == this) {
    return Status::error(Code::connection,
                         "a signal handler used a store while its thread was sending to it");
  }
  if (generation_ == fork_generation()) return Status::success();
  return Status::error(Code::connection,
                       "this store was opened before the process was forked, and its connection "
                       "belongs to the parent. Open a new store in the child");
}

Status Channel::silent_status() const {
  return Status::error(Code::timeout, "the store at " + options_.address.text() +
                                          " does not answer; its process is stopped, overloaded, "
                                          "or its host is unreachable");
}

// -- sending -----------------------------------------------------------------------------------

Status Channel::call(Call& call) {
  if (Status status = check_use(); !status.ok()) return status;
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
  const Sending sending(*this);
  call.seq = ++last_seq_;
  call.done = false;
  call.failure = Status::success();
  patch_request(call.frame, offsetof(RequestHeader, seq), call.seq);
  {
    const std::scoped_lock lock(mutex_);
    if (!broken_.ok()) return broken_;
    patch_request(call.frame, offsetof(RequestHeader, received), received_);
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
  return status.code == Code::timeout ? silent_status() : status;
}

Status Channel::post(std::string_view key, std::string_view value, const Deadline& guard) {
  if (Status status = check_use(); !status.ok()) return status;
  bool is_cut = false;
  bool is_due = false;
  {
    const Sending sending(*this);
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
    const Sending sending(*this);
    if (acknowledged_.load(std::memory_order_relaxed) > last_set_seq_) unacknowledged_ = {};
    return status;
  }
  if (!is_cut) return Status::success();
  std::unique_lock lock(mutex_);
  if (!reading_ && broken_.ok()) {
    reading_ = true;
    lock.unlock();
    recover(guard);
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
  const Sending sending(*this);
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

// -- receiving ---------------------------------------------------------------------------------

// Reads for everybody until its own call is done.
void Channel::lead(std::unique_lock<std::mutex>& lock, Call& call) {
  reading_ = true;
  while (!call.done) {
    const bool is_quiet = !receive(lock, call.guard);
    if (call.done) break;
    if (is_quiet) {
      // A signal handler may use this store: while it runs, somebody else has to be able to read.
      hand_over();
      static_cast<void>(gives_up(lock, call, true));
      return;
    }
    if (gives_up(lock, call, false)) break;
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
  call.failure = is_interrupted ? interrupted_status() : silent_status();
  const std::uint64_t seq = call.seq;
  lock.unlock();
  cancel(seq);
  lock.lock();
  return true;
}

// One receive, and the delivery of what it brought. False when nothing came for a tick.
bool Channel::receive(std::unique_lock<std::mutex>& lock, const Deadline& guard) {
  lock.unlock();
  char* const room = input_.room();
  ssize_t got = 0;
  const bool came_soon = try_for_a_moment(
      [&] {
        got = ::recv(socket_.fd(), room, input_.room_size(), MSG_DONTWAIT);
        return got >= 0 || errno != EAGAIN;
      },
      moment);
  if (!came_soon) got = ::recv(socket_.fd(), room, input_.room_size(), 0);
  const int number = errno;
  lock.lock();
  if (got > 0) {
    input_.arrived(static_cast<std::size_t>(got));
    if (deliver()) return true;
  } else if (got < 0 && (number == EAGAIN || number == EINTR)) {
    return false;
  }
  lock.unlock();
  recover(guard);
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
    if (!is_wanted) {
      unwanted_ = {};
      continue;
    }
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

}  // namespace gradsync::store
