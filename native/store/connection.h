// One peer of the server: its socket, what has arrived from it, and what it has yet to take.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include "store/buffer.h"
#include "store/handshake.h"
#include "store/socket.h"

namespace gradsync::store {

struct Session;

class Connection {
 public:
  Connection(std::uint64_t id, Socket socket) : id_(id), socket_(std::move(socket)) {}

  std::uint64_t id() const { return id_; }
  int fd() const { return socket_.fd(); }

  // One read of at most `limit` bytes. False: the peer has gone.
  bool receive(std::size_t limit);
  // Writes as much as the peer takes without waiting. False: the peer has gone.
  bool flush();

  std::size_t pending_output() const { return output.size() - written_; }
  // Too many unread replies: nothing more is read from this peer until it has taken some.
  bool is_choked() const { return pending_output() > max_pending_output; }

  Buffer input;
  std::string output;
  ServerHello hello;           // what it was greeted with
  Session* session = nullptr;  // set once it has proved itself
  std::uint32_t interest = 0;  // the epoll events it is registered for
  bool is_touched = false;     // stands in the list of connections to flush
  bool has_unserved = false;   // choked before all requests in the input were served
  bool is_doomed = false;      // to be dropped by the next flush

 private:
  static constexpr std::size_t max_pending_output = std::size_t{4} << 20;
  static constexpr std::size_t keep_output = std::size_t{1} << 20;

  std::uint64_t id_;
  Socket socket_;
  std::size_t written_ = 0;
};

}  // namespace gradsync::store
