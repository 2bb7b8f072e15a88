#include "store/socket.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <memory>
#include <vector>

#include "common/fork.h"
#include "common/interrupt.h"
#include "common/moment.h"

namespace gradsync::store {
namespace {

constexpr int backlog = 4096;

struct Endpoint {
  sockaddr_storage storage{};
  socklen_t size = 0;

  sockaddr* raw() { return reinterpret_cast<sockaddr*>(&storage); }
  const sockaddr* raw() const { return reinterpret_cast<const sockaddr*>(&storage); }
};

std::string unix_path(const std::string& name) { return "gradsync/" + name; }

Status unix_endpoint(const std::string& name, Endpoint& endpoint) {
  sockaddr_un address{};
  const std::string path = unix_path(name);
  // The first byte of sun_path stays zero: that is what makes the name abstract.
  if (name.empty() || path.size() + 1 > sizeof(address.sun_path)) {
    return Status::error(Code::invalid, "the name of a Unix store must have 1 to " +
                                            std::to_string(sizeof(address.sun_path) - 10) +
                                            " bytes, got " + std::to_string(name.size()));
  }
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, path.data(), path.size());
  std::memcpy(&endpoint.storage, &address, sizeof(address));
  endpoint.size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + path.size());
  return Status::success();
}

Status resolve(const Address& address, std::vector<Endpoint>& endpoints) {
  if (address.is_unix) return unix_endpoint(address.host, endpoints.emplace_back());
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const int failure =
      getaddrinfo(address.host.c_str(), std::to_string(address.port).c_str(), &hints, &found);
  if (failure != 0) {
    return Status::error(Code::connection,
                         "cannot resolve '" + address.host + "': " + gai_strerror(failure));
  }
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owner(found, freeaddrinfo);
  for (const addrinfo* item = found; item != nullptr; item = item->ai_next) {
    Endpoint& endpoint = endpoints.emplace_back();
    std::memcpy(&endpoint.storage, item->ai_addr, item->ai_addrlen);
    endpoint.size = item->ai_addrlen;
  }
  // IPv4 first on both sides, so that a name with both kinds means the same address everywhere.
  std::stable_partition(endpoints.begin(), endpoints.end(), [](const Endpoint& endpoint) {
    return endpoint.storage.ss_family == AF_INET;
  });
  return Status::success();
}

bool is_local(const Endpoint& endpoint) {
  if (endpoint.storage.ss_family == AF_UNIX) return true;
  if (endpoint.storage.ss_family == AF_INET) {
    const auto* in = reinterpret_cast<const sockaddr_in*>(&endpoint.storage);
    return (ntohl(in->sin_addr.s_addr) >> 24) == 127;
  }
  const auto* in6 = reinterpret_cast<const sockaddr_in6*>(&endpoint.storage);
  return IN6_IS_ADDR_LOOPBACK(&in6->sin6_addr);
}

std::uint16_t port_of(const Endpoint& endpoint) {
  if (endpoint.storage.ss_family == AF_INET) {
    return ntohs(reinterpret_cast<const sockaddr_in*>(&endpoint.storage)->sin_port);
  }
  if (endpoint.storage.ss_family == AF_INET6) {
    return ntohs(reinterpret_cast<const sockaddr_in6*>(&endpoint.storage)->sin6_port);
  }
  return 0;
}

Status describe(Listener& listener) {
  Endpoint bound;
  bound.size = sizeof(bound.storage);
  if (getsockname(listener.socket.fd(), bound.raw(), &bound.size) != 0) {
    return Status::from_errno("getsockname of the listening socket");
  }
  listener.port = port_of(bound);
  listener.only_local = is_local(bound);
  return Status::success();
}

Status bind_failure(const Address& address, int number) {
  if (number == EADDRINUSE) {
    return Status::error(Code::connection,
                         "cannot listen on " + address.text() + ": it is in use (EADDRINUSE)");
  }
  std::string text = "cannot listen on " + address.text() + ": " + std::strerror(number);
  if (number == EADDRNOTAVAIL) {
    text += ". This machine has no such address; give one of its own, or 0.0.0.0 for all of them";
  }
  return Status::error(Code::connection, text);
}

int poll_ms(const Deadline& deadline) {
  return static_cast<int>(deadline.remaining_ns(100'000'000) / 1'000'000 + 1);
}

ConnectError kind_of(int number) {
  return number == ECONNREFUSED || number == ENOENT ? ConnectError::refused : ConnectError::failed;
}

// Waits for a connect that is under way; 0 or an errno, -1 when interrupted.
int finish_connect(int fd, const Deadline& deadline) {
  while (true) {
    pollfd waiting{fd, POLLOUT, 0};
    const int ready = ::poll(&waiting, 1, poll_ms(deadline));
    if (ready > 0) break;
    if (interrupted()) return -1;
    if (ready < 0 && errno != EINTR) return errno;
    if (deadline.expired()) return ETIMEDOUT;
  }
  int number = 0;
  socklen_t size = sizeof(number);
  if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &number, &size) != 0) return errno;
  return number;
}

ConnectError connect_one(const Endpoint& endpoint, const Deadline& deadline, int tick_ms,
                         Socket& socket, std::string& reason) {
  const int type = SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK;
  const int fd = ::socket(endpoint.storage.ss_family, type, 0);
  int number = fd < 0 ? errno : 0;
  socket = Socket(fd);
  if (number == 0 && ::connect(fd, endpoint.raw(), endpoint.size) != 0) {
    // EAGAIN on a Unix socket: the listener's queue is full, try again later.
    number = errno == EINPROGRESS || errno == EINTR ? finish_connect(fd, deadline) : errno;
  }
  if (number == -1) return ConnectError::stopped;
  if (number != 0) {
    socket.reset();
    reason = std::strerror(number);
    return kind_of(number);
  }
  const bool is_unix = endpoint.storage.ss_family == AF_UNIX;
  if (is_unix && !is_same_user(fd)) {
    reason = "the socket belongs to another user";
    return ConnectError::foreign;
  }
  tune(fd, is_unix);
  ::fcntl(fd, F_SETFL, ::fcntl(fd, F_GETFL) & ~O_NONBLOCK);
  const timeval tick{tick_ms / 1000, (tick_ms % 1000) * 1000};
  ::setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &tick, sizeof(tick));
  ::setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &tick, sizeof(tick));
  return ConnectError::none;
}

// Whether a failed send or receive may be tried again.
Status may_retry(const char* what, const Deadline& deadline) {
  if (errno != EAGAIN && errno != EINTR) {
    return Status::error(Code::connection, std::string(what) + ": " + std::strerror(errno));
  }
  if (interrupted()) return interrupted_status();
  if (deadline.expired()) return Status::error(Code::timeout, std::string(what) + ": no answer");
  return Status::success();
}

}  // namespace

std::string Address::text() const {
  if (is_unix) return "unix socket '" + host + "'";
  const bool is_v6 = host.find(':') != std::string::npos;
  return (is_v6 ? "[" + host + "]" : host) + ":" + std::to_string(port);
}

Socket::Socket(int fd) : fd_(fd), generation_(fork_generation()) {
  if (fd_ >= 0) close_in_children(fd_);
}

Socket::Socket(Socket&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)), generation_(other.generation_) {}

Socket& Socket::operator=(Socket&& other) noexcept {
  if (this != &other) {
    reset();
    fd_ = std::exchange(other.fd_, -1);
    generation_ = other.generation_;
  }
  return *this;
}

void Socket::reset() {
  const int fd = std::exchange(fd_, -1);
  // In a forked child the number is closed already and may belong to another file by now.
  if (fd < 0 || generation_ != fork_generation()) return;
  forget_in_children(fd);
  ::close(fd);
}

void Socket::release() {
  if (fd_ >= 0) forget_in_children(fd_);
  fd_ = -1;
}

Status bind_to(const Address& address, Listener& listener) {
  std::vector<Endpoint> endpoints;
  if (Status status = resolve(address, endpoints); !status.ok()) return status;
  Status failure;
  for (const Endpoint& endpoint : endpoints) {
    const int type = SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK;
    listener.socket = Socket(::socket(endpoint.storage.ss_family, type, 0));
    const int fd = listener.socket.fd();
    const int on = 1;
    if (!address.is_unix && fd >= 0) {
      ::setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
      // "::" means IPv6 only: listening on IPv4 as well would be more than was asked for.
      if (endpoint.storage.ss_family == AF_INET6) {
        ::setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &on, sizeof(on));
      }
    }
    if (fd >= 0 && ::bind(fd, endpoint.raw(), endpoint.size) == 0) return describe(listener);
    if (failure.ok()) failure = bind_failure(address, errno);
  }
  listener.socket.reset();
  return failure;
}

Status listen_at(const Address& address, const Listener& listener) {
  if (::listen(listener.socket.fd(), backlog) == 0) return Status::success();
  return bind_failure(address, errno);
}

Status adopt_listener(int fd, Listener& listener) {
  int listening = 0;
  socklen_t size = sizeof(listening);
  if (getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listening, &size) != 0) {
    return Status::error(Code::invalid, "file descriptor " + std::to_string(fd) +
                                            " is no socket: " + std::strerror(errno));
  }
  if (listening == 0) {
    return Status::error(Code::invalid, "the socket with file descriptor " + std::to_string(fd) +
                                            " does not listen; call listen() on it first");
  }
  ::fcntl(fd, F_SETFL, ::fcntl(fd, F_GETFL) | O_NONBLOCK);
  ::fcntl(fd, F_SETFD, FD_CLOEXEC);
  listener.socket = Socket(fd);
  return describe(listener);
}

ConnectError connect_to(const Address& address, const Deadline& deadline, int tick_ms,
                        Socket& socket, std::string& reason) {
  std::vector<Endpoint> endpoints;
  if (const Status status = resolve(address, endpoints); !status.ok()) {
    reason = status.message;
    return ConnectError::failed;
  }
  ConnectError worst = ConnectError::refused;
  for (const Endpoint& endpoint : endpoints) {
    const ConnectError error = connect_one(endpoint, deadline, tick_ms, socket, reason);
    if (error == ConnectError::none || error == ConnectError::stopped) return error;
    worst = std::max(worst, error);
  }
  return worst;
}

bool is_same_user(int fd) {
  ucred peer{};
  socklen_t size = sizeof(peer);
  return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 && peer.uid == geteuid();
}

void tune(int fd, bool is_unix) {
  if (is_unix) return;
  const int on = 1;
  const int idle_s = 10;
  const int interval_s = 5;
  const int probes = 4;
  const unsigned int unread_ms = 60'000;
  ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  // A host that vanished without a word is noticed after 30 s even by one who only waits.
  ::setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof(on));
  ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle_s, sizeof(idle_s));
  ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &interval_s, sizeof(interval_s));
  ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof(probes));
  // The same for one who has sent something: the kernel's own patience is a quarter of an hour.
  ::setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &unread_ms, sizeof(unread_ms));
}

Status send_exactly(int fd, const void* bytes, std::size_t size, const Deadline& deadline) {
  const char* next = static_cast<const char*>(bytes);
  while (size > 0) {
    const ssize_t sent = ::send(fd, next, size, MSG_NOSIGNAL);
    if (sent > 0) {
      next += sent;
      size -= static_cast<std::size_t>(sent);
    } else if (Status status = may_retry("send", deadline); !status.ok()) {
      return status;
    }
  }
  return Status::success();
}

Status receive_exactly(int fd, void* bytes, std::size_t size, const Deadline& deadline) {
  char* next = static_cast<char*>(bytes);
  while (size > 0) {
    ssize_t got = 0;
    const bool came_soon = try_for_a_moment(
        [&] {
          got = ::recv(fd, next, size, MSG_DONTWAIT);
          return got >= 0 || errno != EAGAIN;
        },
        moment);
    if (!came_soon) got = ::recv(fd, next, size, 0);
    if (got == 0) return Status::error(Code::connection, "the other side closed the connection");
    if (got > 0) {
      next += got;
      size -= static_cast<std::size_t>(got);
    } else if (Status status = may_retry("receive", deadline); !status.ok()) {
      return status;
    }
  }
  return Status::success();
}

}  // namespace gradsync::store
