#include "store/server_loop.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "common/moment.h"

namespace gradsync::store {
namespace {

constexpr std::uint64_t listener_id = 0;
constexpr std::uint64_t wakeup_id = 1;
constexpr std::size_t read_limit = std::size_t{256} << 10;  // per peer and turn, for fairness
constexpr int max_accepts = 64;                             // per turn
constexpr std::chrono::milliseconds accept_pause{100};

Status add_to(int epoll, int fd, std::uint64_t id) {
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = id;
  if (::epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) != 0) {
    return Status::from_errno("epoll_ctl of the store's server");
  }
  return Status::success();
}

}  // namespace

Status ServerLoop::open(const Entries& entries) {
  Status status;
  // One that was handed over listens already, with a backlog that its owner chose.
  if (options_.listen_fd < 0) status = listen_at(options_.address, listener_);
  if (!status.ok()) return status;
  for (const auto& [key, value] : entries) service_.put(key, value);
  epoll_ = Socket(::epoll_create1(EPOLL_CLOEXEC));
  wakeup_ = Socket(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!epoll_.open() || !wakeup_.open()) return Status::from_errno("epoll of the store's server");
  accepting_ = true;
  status = add_to(epoll_.fd(), listener_.socket.fd(), listener_id);
  return status.ok() ? add_to(epoll_.fd(), wakeup_.fd(), wakeup_id) : status;
}

void ServerLoop::stop() {
  stopping_.store(true, std::memory_order_relaxed);
  const std::uint64_t one = 1;
  while (::write(wakeup_.fd(), &one, sizeof(one)) < 0 && errno == EINTR) {
  }
}

void ServerLoop::run() {
  std::array<epoll_event, 128> events;
  while (!stopping_.load(std::memory_order_relaxed)) {
    int count = 0;
    const auto wait = [&](int timeout_ms) {
      count = ::epoll_wait(epoll_.fd(), events.data(), static_cast<int>(events.size()), timeout_ms);
      return count != 0;
    };
    if (!try_for_a_moment([&] { return wait(0); }, moment)) wait(next_timeout_ms());
    for (int i = 0; i < count; ++i) on_event(events[static_cast<std::size_t>(i)]);
    run_timers();
  }
  // shutdown, and not only close: a process forked meanwhile may hold copies of the sockets.
  ::shutdown(listener_.socket.fd(), SHUT_RDWR);
  for (const auto& [id, connection] : connections_) ::shutdown(connection->fd(), SHUT_RDWR);
  connections_.clear();
  listener_.socket.reset();
}

int ServerLoop::next_timeout_ms() const {
  Clock::time_point next = service_.next_timer();
  if (!strangers_.empty()) next = std::min(next, strangers_.front().due);
  if (!accepting_) next = std::min(next, resume_at_);
  if (next == Clock::time_point::max()) return -1;
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(next - Clock::now());
  return static_cast<int>(std::clamp<std::int64_t>(left.count(), 0, 60'000));
}

void ServerLoop::run_timers() {
  const bool idle = strangers_.empty() && accepting_;
  if (idle && service_.next_timer() == Clock::time_point::max()) return;
  const auto now = Clock::now();
  drop_strangers(now);
  if (!accepting_ && resume_at_ <= now) resume_accepting();
  service_.run_timers(now);
  flush_touched();
}

void ServerLoop::on_event(const epoll_event& event) {
  if (event.data.u64 == wakeup_id) return;
  if (event.data.u64 == listener_id) {
    accept_all();
    return;
  }
  const auto found = connections_.find(event.data.u64);
  if (found == connections_.end()) return;  // dropped earlier in this turn
  on_connection(*found->second, event.events);
  flush_touched();
}

void ServerLoop::on_connection(Connection& connection, std::uint32_t events) {
  bool alive = true;
  if ((events & EPOLLOUT) != 0) {
    alive = write(connection);
    if (alive && connection.has_unserved) alive = handle_input(connection);
  }
  if (alive && (events & (EPOLLIN | EPOLLHUP | EPOLLERR)) != 0) {
    alive = connection.session != nullptr ? serve(connection) : check_hello(connection);
  }
  if (!alive) drop(connection);
}

// -- newcomers ---------------------------------------------------------------------------------

void ServerLoop::accept_all() {
  for (int i = 0; i < max_accepts && accept_one(); ++i) {
  }
}

bool ServerLoop::accept_one() {
  const int fd = ::accept4(listener_.socket.fd(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
  if (fd < 0) {
    const bool is_short = errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM;
    if (is_short) pause_accepting();
    return errno == EINTR || errno == ECONNABORTED;
  }
  Socket socket(fd);
  if (options_.address.is_unix && !is_same_user(fd)) return true;
  tune(fd, options_.address.is_unix);
  const std::uint64_t id = ++last_id_;
  auto connection = std::make_unique<Connection>(id, std::move(socket));
  if (!add_to(epoll_.fd(), fd, id).ok()) return true;
  connection->interest = EPOLLIN;
  greet(*connections_.emplace(id, std::move(connection)).first->second);
  return true;
}

// Out of descriptors: let strangers go first, and try again in a moment instead of spinning.
void ServerLoop::pause_accepting() {
  drop_strangers(Clock::time_point::max());
  ::epoll_ctl(epoll_.fd(), EPOLL_CTL_DEL, listener_.socket.fd(), nullptr);
  accepting_ = false;
  resume_at_ = Clock::now() + accept_pause;
}

void ServerLoop::resume_accepting() {
  accepting_ = add_to(epoll_.fd(), listener_.socket.fd(), listener_id).ok();
  resume_at_ = Clock::now() + accept_pause;
}

void ServerLoop::greet(Connection& connection) {
  const auto timeout = std::chrono::duration<double>(options_.handshake_timeout_s);
  const auto now = Clock::now();
  strangers_.push_back(
      {connection.id(), now + std::chrono::duration_cast<Clock::duration>(timeout)});
  ++stranger_count_;
  connection.hello.instance = instance_;
  bool alive = random_id(connection.hello.nonce).ok();
  connection.output.assign(reinterpret_cast<const char*>(&connection.hello),
                           sizeof(connection.hello));
  alive = alive && connection.flush();
  if (!alive) drop(connection);
  if (stranger_count_ > options_.max_strangers) drop_strangers(now);
}

Connection* ServerLoop::find_stranger(std::uint64_t id) {
  const auto found = connections_.find(id);
  if (found == connections_.end() || found->second->session != nullptr) return nullptr;
  return found->second.get();
}

// Drops those whose time is over, and the oldest while there are too many.
void ServerLoop::drop_strangers(Clock::time_point now) {
  while (!strangers_.empty()) {
    const Stranger& oldest = strangers_.front();
    Connection* const connection = find_stranger(oldest.id);
    const bool is_over = oldest.due <= now || stranger_count_ > options_.max_strangers;
    if (connection != nullptr && !is_over) return;
    strangers_.pop_front();
    if (connection != nullptr) drop(*connection);
  }
}

// Reads towards a hello of fixed size, and not a byte more before its proof is right.
bool ServerLoop::check_hello(Connection& connection) {
  ClientHello hello;
  const std::size_t missing = sizeof(hello) - connection.input.view().size();
  if (!connection.receive(missing)) return false;
  if (connection.input.view().size() < sizeof(hello)) return true;
  std::memcpy(&hello, connection.input.view().data(), sizeof(hello));
  connection.input.consume(sizeof(hello));

  const Digest proof = client_proof(options_.token, connection.hello, hello);
  ServerAnswer answer;
  const bool is_known = hello.magic == connection.hello.magic &&
                        equal_in_constant_time(proof.data(), hello.proof.data(), proof.size());
  if (is_known) {
    --stranger_count_;
    bool resumed = false;
    if (!service_.attach(connection, hello, resumed)) return false;
    answer.accepted = 1;
    answer.resumed = resumed ? 1 : 0;
    answer.proof = server_proof(options_.token, connection.hello, hello, answer);
  }
  connection.output.append(reinterpret_cast<const char*>(&answer), sizeof(answer));
  if (is_known) service_.repeat_replies(*connection.session);
  return write(connection) && is_known;
}

// -- members -----------------------------------------------------------------------------------

bool ServerLoop::serve(Connection& connection) {
  return connection.receive(read_limit) && handle_input(connection);
}

bool ServerLoop::handle_input(Connection& connection) {
  while (!(connection.has_unserved = connection.is_choked())) {
    std::size_t size = 0;
    const Parsed parsed = parse_request(connection.input.view(), request_, size);
    if (parsed == Parsed::incomplete) break;
    if (parsed == Parsed::malformed) return false;
    if (!service_.handle(*connection.session, request_)) return false;
    connection.input.consume(size);
  }
  watch(connection);
  return true;
}

bool ServerLoop::write(Connection& connection) {
  if (!connection.flush()) return false;
  watch(connection);
  return true;
}

void ServerLoop::flush_touched() {
  std::vector<Connection*>& touched = service_.touched();
  for (std::size_t i = 0; i < touched.size(); ++i) {
    Connection& connection = *touched[i];
    connection.is_touched = false;
    bool alive = !connection.is_doomed && write(connection);
    if (alive && connection.has_unserved) alive = handle_input(connection);
    if (!alive) drop(connection);
  }
  touched.clear();
}

// Registers for what the connection needs; a system call only when that has changed.
void ServerLoop::watch(Connection& connection) {
  const bool has_output = connection.pending_output() > 0 && !connection.is_touched;
  const std::uint32_t wanted =
      (connection.is_choked() ? 0U : EPOLLIN) | (has_output ? EPOLLOUT : 0U);
  if (wanted == connection.interest) return;
  epoll_event event{};
  event.events = wanted;
  event.data.u64 = connection.id();
  ::epoll_ctl(epoll_.fd(), EPOLL_CTL_MOD, connection.fd(), &event);
  connection.interest = wanted;
}

void ServerLoop::drop(Connection& connection) {
  if (connection.session != nullptr) {
    service_.detach(*connection.session);
  } else if (!connection.is_doomed) {
    --stranger_count_;
  }
  if (connection.is_touched) std::erase(service_.touched(), &connection);
  ::epoll_ctl(epoll_.fd(), EPOLL_CTL_DEL, connection.fd(), nullptr);
  ::shutdown(connection.fd(), SHUT_RDWR);
  connections_.erase(connection.id());
}

}  // namespace gradsync::store
