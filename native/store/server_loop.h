// The loop inside the server's thread: accepts, checks proofs, moves bytes, keeps the timers.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <unordered_map>

#include "common/status.h"
#include "store/connection.h"
#include "store/server.h"
#include "store/service.h"

struct epoll_event;

namespace gradsync::store {

class ServerLoop {
 public:
  ServerLoop(const ServerOptions& options, Listener listener)
      : options_(options), listener_(std::move(listener)) {}

  Status choose_instance() { return random_id(instance_); }
  const Id& instance() const { return instance_; }
  Status open(const Entries& entries);  // once, before run
  void run();                           // until stop
  void stop();                          // from any thread

 private:
  using Clock = Service::Clock;

  struct Stranger {  // accepted, not yet proved; in order of arrival
    std::uint64_t id;
    Clock::time_point due;
  };

  int next_timeout_ms() const;
  void run_timers();
  void on_event(const epoll_event& event);
  void on_connection(Connection& connection, std::uint32_t events);

  void accept_all();
  bool accept_one();
  void pause_accepting();
  void resume_accepting();
  void greet(Connection& connection);
  bool check_hello(Connection& connection);
  void drop_strangers(Clock::time_point now);
  Connection* find_stranger(std::uint64_t id);

  bool serve(Connection& connection);
  bool handle_input(Connection& connection);
  bool write(Connection& connection);
  void flush_touched();
  void watch(Connection& connection);
  void drop(Connection& connection);

  ServerOptions options_;
  Listener listener_;
  Id instance_{};
  Socket epoll_;
  Socket wakeup_;
  std::atomic<bool> stopping_{false};

  std::uint64_t last_id_ = 1;  // 0 and 1 mean the listener and the wakeup
  std::unordered_map<std::uint64_t, std::unique_ptr<Connection>> connections_;
  std::deque<Stranger> strangers_;
  std::size_t stranger_count_ = 0;
  bool accepting_ = false;
  Clock::time_point resume_at_{};
  Service service_;
  Request request_;
};

}  // namespace gradsync::store
