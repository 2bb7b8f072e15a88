// Connecting to a server and shaking hands, as the client does it.
#pragma once

#include <cstdint>
#include <string>

#include "common/deadline.h"
#include "common/status.h"
#include "store/handshake.h"
#include "store/socket.h"

namespace gradsync::store {

struct DialOptions {
  Address address;
  std::string token;
  Id session{};
  Id instance{};      // the one server that is meant; zeros for any
  int tick_ms = 250;  // the longest that one send or receive on the socket blocks
};

struct Dialed {
  Socket socket;
  Id instance{};
  bool resumed = false;  // the server knew our session
};

// Tries until the deadline, for a server that has yet to start.
Status dial_patiently(const DialOptions& options, const Deadline& deadline, Dialed& dialed);

// Once, for a server that is known to have started.
Status dial_at_once(const DialOptions& options, const Deadline& deadline, Dialed& dialed);

// For a connection that broke. Code::connection: the server has gone for good. Code::timeout: it
// cannot be reached now.
Status dial_again(const DialOptions& options, std::uint64_t received, const Deadline& deadline,
                  Dialed& dialed);

}  // namespace gradsync::store
