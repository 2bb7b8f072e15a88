#include "store/dial.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include "common/interrupt.h"

namespace gradsync::store {
namespace {

constexpr double handshake_timeout_s = 5.0;
constexpr std::chrono::microseconds first_pause{50};
constexpr std::chrono::microseconds longest_pause{100'000};

struct Attempt {
  enum Result : std::uint8_t { connected, refused, failed, hopeless };
  Result result;
  Status status;
};

Attempt failed(Attempt::Result result, Code code, std::string message) {
  return {result, Status::error(code, std::move(message))};
}

// An error of the connection while shaking hands may pass; the user's interrupt does not.
Attempt broken(const Status& status) {
  const bool is_final = status.code == Code::interrupted;
  return {is_final ? Attempt::hopeless : Attempt::failed, status};
}

Attempt shake_hands(const DialOptions& options, std::uint64_t received, const Deadline& deadline,
                    Dialed& dialed) {
  const int fd = dialed.socket.fd();
  const std::string where = "the store at " + options.address.text();
  ServerHello server;
  const ServerHello expected;
  Status status = receive_exactly(fd, &server, sizeof(server), deadline);
  if (!status.ok()) return broken(status);
  if (server.magic != expected.magic || server.version != expected.version) {
    return failed(
        Attempt::hopeless, Code::connection,
        "what listens at " + options.address.text() + " is not a gradsync store of this version");
  }
  ClientHello client;
  client.session = options.session;
  client.received = received;
  if (status = random_id(client.nonce); !status.ok()) return {Attempt::hopeless, status};
  client.proof = client_proof(options.token, server, client);
  ServerAnswer answer;
  status = send_exactly(fd, &client, sizeof(client), deadline);
  if (status.ok()) status = receive_exactly(fd, &answer, sizeof(answer), deadline);
  if (!status.ok()) return broken(status);
  const Digest proof = server_proof(options.token, server, client, answer);
  if (answer.accepted != 1 ||
      !equal_in_constant_time(proof.data(), answer.proof.data(), proof.size())) {
    return failed(Attempt::hopeless, Code::unauthenticated,
                  where + " has a different token than this process" +
                      (options.token.empty() ? ", which has none" : "") +
                      ". Set GRADSYNC_TOKEN to the same value for every process of the job");
  }
  dialed.instance = server.instance;
  dialed.resumed = answer.resumed == 1;
  return {Attempt::connected, Status::success()};
}

Attempt dial_once(const DialOptions& options, std::uint64_t received, const Deadline& deadline,
                  Dialed& dialed) {
  std::string reason;
  switch (connect_to(options.address, deadline, options.tick_ms, dialed.socket, reason)) {
    case ConnectError::none: break;
    case ConnectError::refused: return failed(Attempt::refused, Code::connection, reason);
    case ConnectError::failed: return failed(Attempt::failed, Code::connection, reason);
    case ConnectError::foreign: return failed(Attempt::hopeless, Code::connection, reason);
    case ConnectError::stopped: return {Attempt::hopeless, interrupted_status()};
  }
  // A silent listener must not use up all the time there is.
  const double left_s = static_cast<double>(deadline.remaining_ns()) / 1e9;
  const Deadline soon = Deadline::after(std::min(handshake_timeout_s, left_s));
  return shake_hands(options, received, soon, dialed);
}

bool pause_for(std::chrono::microseconds pause, const Deadline& deadline) {
  const auto left = std::chrono::nanoseconds(deadline.remaining_ns(1'000'000'000));
  std::this_thread::sleep_for(std::min<std::chrono::nanoseconds>(pause, left));
  return !interrupted();
}

}  // namespace

Status dial_patiently(const DialOptions& options, const Deadline& deadline, Dialed& dialed) {
  auto pause = first_pause;
  while (true) {
    const Attempt attempt = dial_once(options, 0, deadline, dialed);
    if (attempt.result == Attempt::connected || attempt.result == Attempt::hopeless) {
      return attempt.status;
    }
    if (deadline.expired()) {
      const bool is_refused = attempt.result == Attempt::refused;
      return Status::error(Code::connection,
                           "timed out connecting to the store at " + options.address.text() + ": " +
                               (is_refused ? "nobody listens there" : attempt.status.message) +
                               ". Check the address, and that the master has started");
    }
    if (!pause_for(pause, deadline)) return interrupted_status();
    pause = std::min(pause * 2, longest_pause);
  }
}

Status dial_at_once(const DialOptions& options, const Deadline& deadline, Dialed& dialed) {
  const Attempt attempt = dial_once(options, 0, deadline, dialed);
  const std::string where = "the store at " + options.address.text();
  switch (attempt.result) {
    case Attempt::connected: break;
    case Attempt::hopeless: return attempt.status;
    case Attempt::refused:
    case Attempt::failed:
      if (attempt.status.code == Code::timeout) {
        return Status::error(Code::timeout, where + " does not answer: " + attempt.status.message);
      }
      // Also one that went away while we shook hands.
      return Status::error(Code::connection,
                           "nobody serves " + where + " any more (" + attempt.status.message + ")");
  }
  if (options.instance == Id{} || options.instance == dialed.instance) return Status::success();
  dialed = {};
  return Status::error(Code::connection, where + " is another one by now, of another group");
}

Status dial_again(const DialOptions& options, std::uint64_t received, const Deadline& deadline,
                  Dialed& dialed) {
  auto pause = first_pause;
  while (true) {
    const Attempt attempt = dial_once(options, received, deadline, dialed);
    if (attempt.result == Attempt::connected || attempt.result == Attempt::hopeless) {
      return attempt.status;
    }
    const std::string where = "the connection to the store at " + options.address.text();
    if (attempt.result == Attempt::refused) {
      return Status::error(Code::connection, where + " is lost, its server has gone (" +
                                                 attempt.status.message + ")");
    }
    if (deadline.expired()) {
      return Status::error(
          Code::timeout, where + " is lost and cannot be opened again: " + attempt.status.message);
    }
    if (!pause_for(pause, deadline)) return interrupted_status();
    pause = std::min(pause * 2, longest_pause);
  }
}

}  // namespace gradsync::store
