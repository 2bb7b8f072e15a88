// The service behind the sockets: requests of sessions in, replies into their connections' output.
// Owns the data, the sessions and the timers of parked requests; does no input or output itself.
#pragma once

#include <cstdint>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

#include "store/connection.h"
#include "store/data.h"
#include "store/session.h"

namespace gradsync::store {

class Service {
 public:
  using Clock = Session::Clock;

  // Before anybody has come.
  void put(std::string key, std::string value) { data_.put(std::move(key), std::move(value)); }

  // False: the connection has to go; the client said goodbye or broke the rules.
  bool handle(Session& session, const Request& request);

  // Puts a client's session on its new connection; an older connection of it is doomed. False: the
  // client claims to have got replies that were never sent.
  bool attach(Connection& connection, const ClientHello& hello, bool& resumed);
  // Sends a resumed client the replies that it has not got.
  void repeat_replies(Session& session);
  // The connection has gone: what it waited for is withdrawn until the client asks again.
  void detach(Session& session);

  Clock::time_point next_timer() const;
  void run_timers(Clock::time_point now);

  // Connections that have got output, or are doomed, since this list was last emptied.
  std::vector<Connection*>& touched() { return touched_; }
  void touch(Connection& connection);

 private:
  struct Pending {
    Session* session;
    std::uint64_t seq;
    Op op;
    Clock::time_point due;
  };
  static constexpr std::size_t max_parked = 65536;  // per session
  static constexpr std::size_t max_kept_replies = 65536;
  static constexpr std::size_t max_kept_bytes = std::size_t{1} << 30;

  bool is_repeat(Session& session, const RequestHeader& header);
  void park(Ticket ticket, Session& session, const RequestHeader& header);
  void unpark(Ticket ticket);
  void cancel(Session& session, std::uint64_t seq);
  void answer(Session& session, std::uint64_t seq, Op op, const Reply& reply);
  void answer_woken();

  Data data_;
  Sessions sessions_;
  Ticket last_ticket_ = 0;
  std::unordered_map<Ticket, Pending> pending_;
  std::set<std::pair<Clock::time_point, Ticket>> timers_;
  std::vector<Connection*> touched_;
  Reply reply_;
};

}  // namespace gradsync::store
