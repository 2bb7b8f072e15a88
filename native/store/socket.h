// Sockets of the store: addresses, listening, connecting. TCP, or Unix in the abstract namespace,
// which leaves no file and whose peers the kernel vouches for.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <utility>

#include "common/deadline.h"
#include "common/status.h"

namespace gradsync::store {

struct Address {
  bool is_unix = false;
  std::string host;  // the name of an abstract Unix socket when is_unix
  std::uint16_t port = 0;

  std::string text() const;
};

// Owns a file descriptor that forked children do not keep.
class Socket {
 public:
  Socket() = default;
  explicit Socket(int fd);
  Socket(Socket&& other) noexcept;
  Socket& operator=(Socket&& other) noexcept;
  ~Socket() { reset(); }

  int fd() const { return fd_; }
  bool open() const { return fd_ >= 0; }
  void reset();
  // Gives the descriptor up without closing it.
  void release();

 private:
  int fd_ = -1;
  std::uint64_t generation_ = 0;
};

struct Listener {
  Socket socket;
  std::uint16_t port = 0;   // 0 on Unix
  bool only_local = false;  // nobody from another host can connect
};

// Takes exactly this address; port 0 takes a free one. EADDRINUSE is spelled out by name. Whoever
// connects is refused until listen_at().
Status bind_to(const Address& address, Listener& listener);
Status listen_at(const Address& address, const Listener& listener);

// Takes over a socket that somebody else has bound and set listening. `fd` stays the caller's when
// this fails.
Status adopt_listener(int fd, Listener& listener);

// How long to try before sleeping. Measured on two cores (64 clients in 4 processes): 50 us a round
// trip without, 25 us with 20 us on both sides; 50 us was no better, and not yielding in between
// was worse.
inline constexpr std::chrono::microseconds moment{20};

enum class ConnectError : std::uint8_t {
  none,
  refused,  // nobody listens there
  failed,   // anything else that may pass: no route, no such name (yet), too slow
  foreign,  // the listener belongs to another user
  stopped,  // interrupted by the user
};

// One attempt to connect. The socket blocks, with `tick_ms` as the longest send or receive call.
ConnectError connect_to(const Address& address, const Deadline& deadline, int tick_ms,
                        Socket& socket, std::string& reason);

// Whether the other end of a Unix socket runs as our effective user.
bool is_same_user(int fd);

// Options for a connected socket of either side: no delay, and a dead host is noticed.
void tune(int fd, bool is_unix);

// Exactly `size` bytes, or an error. For the handshake, on sockets from connect_to.
Status send_exactly(int fd, const void* bytes, std::size_t size, const Deadline& deadline);
Status receive_exactly(int fd, void* bytes, std::size_t size, const Deadline& deadline);

}  // namespace gradsync::store
