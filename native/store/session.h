// Sessions: what the server remembers of a client across its connections, so that a client whose
// connection broke can send its unanswered requests again and have each of them done once.
#pragma once

#include <chrono>
#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <set>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "store/data.h"
#include "store/handshake.h"

namespace gradsync::store {

class Connection;

struct Session {
  using Clock = std::chrono::steady_clock;

  Id id{};
  Connection* connection = nullptr;
  std::uint64_t mark = 0;  // the highest sequence number seen; a connection carries them in order

  // Counted replies that the client may not have got; the first is number `forgotten` + 1.
  std::deque<std::string> replies;
  std::uint64_t forgotten = 0;
  std::size_t reply_bytes = 0;

  std::unordered_map<std::uint64_t, Ticket> parked;  // by sequence number
  std::unordered_set<std::uint64_t> suspended;       // were parked when the connection broke
  bool ended = false;                                // said bye, or broke the rules
  Clock::time_point detached_at{};

  // Drops the replies up to `received`. False: the client claims replies that were never sent.
  bool forget_replies(std::uint64_t received);
  void keep_reply(std::string frame);
};

class Sessions {
 public:
  using Clock = Session::Clock;
  static constexpr std::chrono::seconds lifetime{60};  // without a connection
  static constexpr std::size_t max_detached = 4096;

  Session* find(const Id& id);
  Session& make(const Id& id);
  void attach(Session& session, Connection& connection);
  void detach(Session& session, Clock::time_point now);

  // When the next session expires; time_point::max() for none.
  Clock::time_point next_expiry() const;
  void expire(Clock::time_point now);

 private:
  struct IdHash {
    std::size_t operator()(const Id& id) const {
      std::size_t word = 0;  // ids are random: any part of one is a hash
      std::memcpy(&word, id.data(), sizeof(word));
      return word;
    }
  };

  void erase_oldest();

  std::unordered_map<Id, std::unique_ptr<Session>, IdHash> all_;
  std::set<std::pair<Clock::time_point, Session*>> detached_;
};

}  // namespace gradsync::store
