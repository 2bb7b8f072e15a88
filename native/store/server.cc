#include "store/server.h"

#include <system_error>
#include <utility>

#include "common/fork.h"
#include "store/server_loop.h"

namespace gradsync::store {
namespace {

Status check_token(const ServerOptions& options, const Listener& listener) {
  if (listener.only_local || !options.token.empty()) return Status::success();
  return Status::error(
      Code::invalid,
      "refusing to listen on " + options.address.text() +
          " without a token: anybody who reaches this address could read and change the job's "
          "data. Set GRADSYNC_TOKEN to the same secret on every host, or listen on 127.0.0.1");
}

}  // namespace

Status Server::start(const ServerOptions& options, std::unique_ptr<Server>& server) {
  std::unique_ptr<Server> made;
  Status status = reserve(options, made);
  if (status.ok()) status = made->listen({});
  if (status.ok()) status = made->run();
  if (status.ok()) server = std::move(made);
  return status;
}

Status Server::reserve(const ServerOptions& options, std::unique_ptr<Server>& server) {
  Listener listener;
  const bool adopt = options.listen_fd >= 0;
  Status status =
      adopt ? adopt_listener(options.listen_fd, listener) : bind_to(options.address, listener);
  if (status.ok()) status = check_token(options, listener);
  if (status.ok() && adopt && listener.port != options.address.port) {
    status =
        Status::error(Code::connection,
                      "the socket given to listen on has port " + std::to_string(listener.port) +
                          ", but the store's port is " + std::to_string(options.address.port));
  }
  if (!status.ok()) {
    if (adopt) listener.socket.release();
    return status;
  }
  std::unique_ptr<Server> made(new Server);
  made->port_ = listener.port;
  made->generation_ = fork_generation();
  made->loop_ = std::make_unique<ServerLoop>(options, std::move(listener));
  if (status = made->loop_->choose_instance(); !status.ok()) return status;
  server = std::move(made);
  return Status::success();
}

Status Server::listen(const Entries& entries) { return loop_->open(entries); }

const Id& Server::instance() const { return loop_->instance(); }

Status Server::run() {
  // A forked child has none of what the thread needs, and perhaps a lock that nobody will unlock.
  if (generation_ != fork_generation()) {
    return Status::error(Code::connection, "a forked child cannot run its parent's store");
  }
  const std::lock_guard<std::mutex> lock(starting_);
  if (thread_ != nullptr) return Status::success();
  Status status;
  try {
    thread_ = std::make_unique<LentThread>([loop = loop_.get()] { loop->run(); });
  } catch (const std::system_error& error) {
    status = Status::from_errno("starting the store's server", error.code().value());
  }
  return status;
}

Server::~Server() {
  if (generation_ != fork_generation()) {
    // A forked child has neither the thread nor the sockets; what the thread was doing at the
    // moment of the fork is unknown, so its memory is left alone.
    static_cast<void>(thread_.release());
    static_cast<void>(loop_.release());
    return;
  }
  if (thread_ == nullptr) return;
  loop_->stop();
  thread_->wait();
}

}  // namespace gradsync::store
