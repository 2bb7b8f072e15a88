// The store's contents and who waits for them: a state machine without sockets, clocks or threads.
//
// Every request comes with a ticket, a number that grows. It is answered at once or parked; parked
// tickets are answered by a later request (`take_woken`), by `expire`, or not at all (`withdraw`).
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "store/wire.h"

namespace gradsync::store {

using Ticket = std::uint64_t;

class Data {
 public:
  struct Answer {
    Ticket ticket;
    Reply reply;
  };

  void put(std::string key, std::string value) {
    values_.insert_or_assign(std::move(key), std::move(value));
  }

  // True: answered in `reply` (left alone by an operation that has no reply). False: parked.
  bool execute(Ticket ticket, const Request& request, Reply& reply);

  // The parked tickets that were answered since the last call, oldest first.
  bool has_woken() const { return !woken_.empty(); }
  std::vector<Answer> take_woken() { return std::exchange(woken_, {}); }

  // The time of a parked ticket is over: its reply says what it still waits for.
  Reply expire(Ticket ticket);

  // Forget a parked ticket, as if it had never come.
  void withdraw(Ticket ticket);

 private:
  struct Hash {
    using is_transparent = void;
    std::size_t operator()(std::string_view key) const {
      return std::hash<std::string_view>{}(key);
    }
  };
  template <typename T>
  using Map = std::unordered_map<std::string, T, Hash, std::equal_to<>>;

  struct Parked {
    Op op;
    std::vector<std::string> keys;
    std::size_t missing = 0;  // keys in whose waiting list the ticket stands
  };
  struct Barrier {
    std::int64_t size = 0;
    std::set<Ticket> arrived;
  };

  bool execute_one_key(Ticket ticket, const Request& request, Reply& reply);
  bool execute_many_keys(Ticket ticket, const Request& request, Reply& reply);
  bool execute_queue(Ticket ticket, const Request& request, Reply& reply);

  Reply add(std::string_view key, std::int64_t amount);
  Reply compare_set(std::string_view key, std::string_view expected, std::string_view desired);
  Reply append(std::string_view key, std::string_view more);
  bool pop(Ticket ticket, const Request& request, Reply& reply);
  bool arrive(Ticket ticket, const Request& request, Reply& reply);

  void store(std::string_view key, std::string_view value);
  void push(std::string_view key, std::string_view value);
  void wake(std::string_view key);
  bool is_there(Op op, std::string_view key) const;
  Reply read_all(const std::vector<std::string>& keys) const;
  void park(Ticket ticket, const Request& request);
  void stop_waiting(Ticket ticket, const std::string& key);
  std::size_t start_waiting(Ticket ticket, const Parked& parked);

  Map<std::string> values_;
  Map<std::deque<std::string>> queues_;
  Map<std::set<Ticket>> waiting_;  // by key; a set, so that the oldest comes first
  Map<Barrier> barriers_;
  std::unordered_map<Ticket, Parked> parked_;
  std::vector<Answer> woken_;
};

}  // namespace gradsync::store
