// The store's server: one thread, one epoll loop, any number of clients. It listens on one address,
// lets in only who proves to know the token, and never waits for a peer.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "common/lent_thread.h"
#include "common/status.h"
#include "store/handshake.h"
#include "store/socket.h"

namespace gradsync::store {

struct ServerOptions {
  Address address;
  std::string token;
  int listen_fd = -1;  // take over this listening socket instead of binding `address`
  double handshake_timeout_s = 5.0;
  std::size_t max_strangers = 1024;  // connections that have not proved themselves yet
};

class ServerLoop;

// Keys that are there before anybody comes, with their values.
using Entries = std::vector<std::pair<std::string, std::string>>;

class Server {
 public:
  static Status start(const ServerOptions& options, std::unique_ptr<Server>& server);
  // The same in three steps: takes the address, where everybody is refused; lets them knock, with
  // keys that are there before anybody comes; answers them.
  static Status reserve(const ServerOptions& options, std::unique_ptr<Server>& server);
  Status listen(const Entries& entries);
  Status run();  // from any thread; does nothing when it was done before
  // Differs for every server ever started.
  const Id& instance() const;
  ~Server();  // stops: connections and the port are closed when it returns

  // The port it listens on, 0 on a Unix socket.
  std::uint16_t port() const { return port_; }

 private:
  Server() = default;

  std::unique_ptr<ServerLoop> loop_;
  std::mutex starting_;
  std::unique_ptr<LentThread> thread_;  // under the lock until it was started
  std::uint16_t port_ = 0;
  std::uint64_t generation_ = 0;
};

}  // namespace gradsync::store
