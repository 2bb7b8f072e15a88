#include "memory/handoff.h"

#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>

#include "common/interrupt.h"
#include "common/moment.h"

namespace gradsync {
namespace {

#ifndef SO_PEERPIDFD
constexpr int SO_PEERPIDFD = 77;  // Linux 6.5
#endif

// The kernel's limit for one message is 253 (SCM_MAX_FD).
constexpr std::size_t descriptors_per_message = 128;

// Ranks that start together meet within this; to wake one that sleeps takes a third of it.
constexpr std::chrono::microseconds moment{1000};

// Waits are cut so that Ctrl-C is heard.
constexpr std::int64_t longest_nap_ns = 200'000'000;

struct Introduction {
  std::array<char, 8> magic{'g', 's', 'g', 'u', 'e', 's', 't', '1'};
  Secret secret{};
  std::int32_t index = -1;
  std::uint32_t words = 0;  // bytes that follow
};

socklen_t abstract_address(const std::string& name, sockaddr_un& address) {
  address = {};
  address.sun_family = AF_UNIX;
  const std::size_t length = std::min(name.size(), sizeof(address.sun_path) - 1);
  std::memcpy(address.sun_path + 1, name.data(), length);  // a leading NUL: no file
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + length);
}

Status require_same_user(const Fd& socket) {
  ucred peer{};
  socklen_t length = sizeof(peer);
  if (::getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &peer, &length) != 0) {
    return Status::from_errno("asking who is at the other end of a Unix socket");
  }
  if (peer.uid != ::geteuid()) {
    return Status::error(Code::unauthenticated, "the process at the other end runs as user " +
                                                    std::to_string(peer.uid) + ", this one as " +
                                                    std::to_string(::geteuid()));
  }
  return Status::success();
}

// Polls for as long as one may sleep in one go.
int nap(std::span<pollfd> entries, Deadline deadline) {
  const std::int64_t left = deadline.remaining_ns(longest_nap_ns);
  const timespec timeout{left / 1'000'000'000, left % 1'000'000'000};
  return ::ppoll(entries.data(), entries.size(), &timeout, nullptr);
}

// Waits for a socket; fails when `process` (a pidfd, may be invalid) says that its process is gone.
Status wait_until_ready(const Fd& socket, short events, Deadline deadline, const char* what,
                        const Fd& process = Fd()) {
  std::array<pollfd, 2> entries{{{socket.get(), events, 0}, {process.get(), POLLIN, 0}}};
  (void)try_for_a_moment([&] { return ::poll(entries.data(), entries.size(), 0) != 0; }, moment);
  while (true) {
    const int ready = nap(entries, deadline);
    if (ready > 0 && entries[0].revents != 0) return Status::success();
    if (ready > 0) return Status::error(Code::connection, "the other process is gone");
    if (ready < 0 && errno != EINTR) return Status::from_errno("poll");
    if (deadline.expired()) return Status::error(Code::timeout, what);
    if (interrupted()) return interrupted_status();
  }
}

Status receive_from_guest(const Fd& socket, char* to, std::size_t bytes, Deadline deadline) {
  std::size_t have = 0;
  while (have < bytes) {
    const Status status =
        wait_until_ready(socket, POLLIN, deadline, "a guest that does not finish its sentence");
    if (!status.ok()) return status;
    const ssize_t got = ::recv(socket.get(), to + have, bytes - have, MSG_DONTWAIT);
    if (got == 0) return Status::error(Code::connection, "a guest that hung up");
    if (got < 0 && errno != EAGAIN && errno != EINTR) return Status::from_errno("recv");
    if (got > 0) have += static_cast<std::size_t>(got);
  }
  return Status::success();
}

bool equal_in_constant_time(const Secret& a, const Secret& b) {
  unsigned difference = 0;
  for (std::size_t i = 0; i < a.size(); ++i) difference |= static_cast<unsigned>(a[i] ^ b[i]);
  return difference == 0;
}

}  // namespace

Status peer_pidfd(const Fd& socket, Fd& out) {
  int number = -1;
  socklen_t length = sizeof(number);
  if (::getsockopt(socket.get(), SOL_SOCKET, SO_PEERPIDFD, &number, &length) == 0) {
    out = Fd(number);
    return Status::success();
  }
  // Older kernels: by number. The peer waits for our answer, so its pid cannot be recycled yet.
  ucred peer{};
  length = sizeof(peer);
  if (::getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &peer, &length) != 0) {
    return Status::from_errno("asking who is at the other end of a Unix socket");
  }
  return open_pidfd(peer.pid, out);
}

Status open_pidfd(int pid, Fd& out) {
  const long number = ::syscall(SYS_pidfd_open, pid, 0);
  if (number < 0) return Status::from_errno("pidfd_open of process " + std::to_string(pid));
  out = Fd(static_cast<int>(number));
  return Status::success();
}

Status Lobby::open(Lobby& out) {
  std::array<std::uint8_t, 16> random{};
  if (::getrandom(random.data(), random.size(), 0) != static_cast<ssize_t>(random.size()) ||
      ::getrandom(out.secret_.data(), out.secret_.size(), 0) !=
          static_cast<ssize_t>(out.secret_.size())) {
    return Status::from_errno("getrandom");
  }
  out.name_ = "gradsync-lobby-";
  for (const std::uint8_t byte : random) {
    constexpr const char* digits = "0123456789abcdef";
    out.name_ += digits[byte >> 4];
    out.name_ += digits[byte & 15];
  }
  return out.listen();
}

Status Lobby::open(const std::string& name, const Secret& secret, Lobby& out) {
  out.name_ = name;
  out.secret_ = secret;
  out.is_known_ = true;
  return out.listen();
}

Lobby::~Lobby() {
  // Not only closed: a process forked meanwhile has a copy, where guests would wait for ever.
  if (socket_.valid() && owner_ == ::getpid()) ::shutdown(socket_.get(), SHUT_RDWR);
}

Status Lobby::listen() {
  owner_ = ::getpid();
  socket_ = Fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket_.valid()) return Status::from_errno("opening a Unix socket");
  sockaddr_un address;
  const socklen_t length = abstract_address(name_, address);
  if (::bind(socket_.get(), reinterpret_cast<sockaddr*>(&address), length) != 0 ||
      ::listen(socket_.get(), 4096) != 0) {
    return Status::from_errno("listening on a Unix socket");
  }
  return Status::success();
}

Status Lobby::gather(int count, Deadline deadline, const std::vector<Fd>& expected,
                     std::vector<Guest>& guests) {
  while (static_cast<int>(guests.size()) < count - 1) {
    Status status = wait_for_guest(count, deadline, expected, guests);
    if (!status.ok()) return status;
    Fd socket(::accept4(socket_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (!socket.valid()) {
      if (errno == EAGAIN || errno == EINTR || errno == ECONNABORTED) continue;
      return Status::from_errno("accepting on a Unix socket");
    }
    // A stranger, a silent or a duplicate guest is dropped and costs at most this pause. It does
    // not depend on the deadline, which may be a short slice of a longer wait: a guest that has
    // just reached us, and was not let run since, must not find the door shut. (Where it knows the
    // name it comes again.)
    const double patience_s = is_known_ ? 0.2 : 2.0;
    status = admit(std::move(socket), count, Deadline::after(patience_s), guests);
    if (is_known_ && status.code == Code::invalid) return status;
  }
  return Status::success();
}

Status Lobby::wait_for_guest(int count, Deadline deadline, const std::vector<Fd>& expected,
                             const std::vector<Guest>& guests) const {
  std::vector<int> missing;
  std::vector<pollfd> entries{{socket_.get(), POLLIN, 0}};
  for (int index = 1; index < count; ++index) {
    const bool came = std::any_of(guests.begin(), guests.end(),
                                  [index](const Guest& g) { return g.index == index; });
    if (came) continue;
    missing.push_back(index);
    const auto at = static_cast<std::size_t>(index);
    entries.push_back({at < expected.size() ? expected[at].get() : -1, POLLIN, 0});
  }
  const std::size_t first_guest = entries.size();
  if (is_known_) {
    for (const Guest& guest : guests) entries.push_back({guest.socket.get(), POLLRDHUP, 0});
  }
  (void)try_for_a_moment([&] { return ::poll(entries.data(), entries.size(), 0) != 0; }, moment);
  while (true) {
    const int ready = nap(entries, deadline);
    if (ready < 0 && errno != EINTR) return Status::from_errno("poll");
    // Strangers that come one after the other must not keep us beyond the deadline.
    const bool may_admit = !is_known_ || !deadline.expired();
    if (ready > 0 && entries[0].revents != 0 && may_admit) return Status::success();
    for (std::size_t i = 1; ready > 0 && i < entries.size(); ++i) {
      if (entries[i].revents == 0) continue;
      const int index = i < first_guest ? missing[i - 1] : guests[i - first_guest].index;
      return Status::error(Code::peer_lost, "ended before the group was formed", {index});
    }
    if (deadline.expired()) {
      return Status::error(Code::timeout, "not every rank came to map the shared memory", missing);
    }
    if (interrupted()) return interrupted_status();
  }
}

Status Lobby::admit(Fd socket, int count, Deadline deadline, std::vector<Guest>& guests) {
  Status status = require_same_user(socket);
  if (!status.ok()) return status;
  Introduction hello;
  status = receive_from_guest(socket, reinterpret_cast<char*>(&hello), sizeof(hello), deadline);
  if (!status.ok()) return status;
  const bool known = hello.magic == Introduction{}.magic &&
                     equal_in_constant_time(hello.secret, secret_) && hello.words <= most_words;
  if (!known) return Status::error(Code::unauthenticated, "not a guest of this lobby");
  const bool fits =
      hello.index > 0 && hello.index < count &&
      std::none_of(
          guests.begin(), guests.end(), [&](const Guest& g) { return g.index == hello.index; });
  if (!fits) return Status::error(Code::invalid, "a guest that is one too many");
  Guest guest;
  guest.index = hello.index;
  guest.words.resize(hello.words);
  status = receive_from_guest(socket, guest.words.data(), guest.words.size(), deadline);
  if (status.ok()) status = peer_pidfd(socket, guest.pidfd);
  if (!status.ok()) return status;
  guest.socket = std::move(socket);
  guests.push_back(std::move(guest));
  return Status::success();
}

bool has_hung_up(const Fd& socket) {
  pollfd entry{socket.get(), POLLRDHUP, 0};
  return ::poll(&entry, 1, 0) != 0;
}

Status reach_lobby(const std::string& name, Fd& out, std::chrono::microseconds moment) {
  Fd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!socket.valid()) return Status::from_errno("opening a Unix socket");
  sockaddr_un address;
  const socklen_t length = abstract_address(name, address);
  const auto connects = [&] {
    return ::connect(socket.get(), reinterpret_cast<sockaddr*>(&address), length) == 0;
  };
  if (!try_for_a_moment(connects, moment)) {
    return Status::error(Code::connection, "no way to " + name + ": " + std::strerror(errno));
  }
  const Status status = require_same_user(socket);
  if (!status.ok()) return status;
  out = std::move(socket);
  return Status::success();
}

Status introduce(const Fd& socket, int index, const Secret& secret, const std::string& words) {
  if (words.size() > most_words) {
    return Status::error(Code::invalid, "an introduction of " + std::to_string(words.size()) +
                                            " bytes, of " + std::to_string(most_words) +
                                            " at most");
  }
  Introduction hello;
  hello.secret = secret;
  hello.index = index;
  hello.words = static_cast<std::uint32_t>(words.size());
  std::string message(reinterpret_cast<const char*>(&hello), sizeof(hello));
  message += words;
  const ssize_t sent = ::send(socket.get(), message.data(), message.size(), MSG_NOSIGNAL);
  if (sent == static_cast<ssize_t>(message.size())) return Status::success();
  return Status::error(Code::connection,
                       std::string("sending to a lobby: ") + std::strerror(errno));
}

Status send_descriptors(const Fd& socket, std::span<const std::uint8_t> message,
                        std::span<const int> descriptors, Deadline deadline) {
  std::size_t done = 0;
  bool first = true;
  while (first || done < descriptors.size()) {
    const std::size_t batch = std::min(descriptors_per_message, descriptors.size() - done);
    std::uint8_t filler = 0;  // a message that carries descriptors needs at least a byte
    iovec part{first ? const_cast<std::uint8_t*>(message.data()) : &filler,
               first ? message.size() : 1};
    alignas(cmsghdr) std::array<char, CMSG_SPACE(descriptors_per_message * sizeof(int))> control{};
    msghdr header{};
    header.msg_iov = &part;
    header.msg_iovlen = 1;
    if (batch > 0) {
      header.msg_control = control.data();
      header.msg_controllen = CMSG_SPACE(batch * sizeof(int));
      cmsghdr* entry = CMSG_FIRSTHDR(&header);
      entry->cmsg_level = SOL_SOCKET;
      entry->cmsg_type = SCM_RIGHTS;
      entry->cmsg_len = CMSG_LEN(batch * sizeof(int));
      std::memcpy(CMSG_DATA(entry), descriptors.data() + done, batch * sizeof(int));
    }
    const Status ready = wait_until_ready(socket, POLLOUT, deadline, "sending descriptors");
    if (!ready.ok()) return ready;
    const ssize_t sent = ::sendmsg(socket.get(), &header, MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent != static_cast<ssize_t>(part.iov_len)) {
      return Status::error(Code::connection,
                           std::string("sending descriptors: ") + std::strerror(errno));
    }
    done += batch;
    first = false;
  }
  return Status::success();
}

Status receive_descriptors(const Fd& socket, std::span<std::uint8_t> message, std::size_t count,
                           Deadline deadline, const Fd& sender, std::vector<Fd>& out) {
  std::size_t have = 0;
  std::uint8_t filler = 0;
  while (have < message.size() || out.size() < count) {
    const bool body = have < message.size();
    iovec part{body ? message.data() + have : &filler, body ? message.size() - have : 1};
    alignas(cmsghdr) std::array<char, CMSG_SPACE(descriptors_per_message * sizeof(int))> control{};
    msghdr header{};
    header.msg_iov = &part;
    header.msg_iovlen = 1;
    header.msg_control = control.data();
    header.msg_controllen = control.size();
    const Status ready =
        wait_until_ready(socket, POLLIN, deadline, "waiting for shared memory", sender);
    if (!ready.ok()) return ready;
    const ssize_t got = ::recvmsg(socket.get(), &header, MSG_CMSG_CLOEXEC);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) {
      return Status::error(Code::connection, "the rank that holds the shared memory hung up");
    }
    for (cmsghdr* entry = CMSG_FIRSTHDR(&header); entry != nullptr;
         entry = CMSG_NXTHDR(&header, entry)) {
      if (entry->cmsg_level != SOL_SOCKET || entry->cmsg_type != SCM_RIGHTS) continue;
      const std::size_t numbers = (entry->cmsg_len - CMSG_LEN(0)) / sizeof(int);
      for (std::size_t i = 0; i < numbers; ++i) {
        int number = -1;
        std::memcpy(&number, CMSG_DATA(entry) + i * sizeof(int), sizeof(int));
        out.emplace_back(number);
      }
    }
    if ((header.msg_flags & MSG_CTRUNC) != 0) {
      return Status::error(Code::system,
                           "descriptors were cut off: the limit of open files is too low");
    }
    if (body) have += static_cast<std::size_t>(got);
  }
  return Status::success();
}

}  // namespace gradsync
