#include "store/service.h"

#include <algorithm>

namespace gradsync::store {

bool Service::handle(Session& session, const Request& request) {
  const RequestHeader& header = request.header;
  if (!session.forget_replies(header.received)) return false;
  if (is_repeat(session, header)) return true;
  if (header.op == Op::cancel) {
    cancel(session, static_cast<std::uint64_t>(header.number));
    return true;
  }
  const bool is_greedy = session.replies.size() >= max_kept_replies ||
                         session.reply_bytes > max_kept_bytes ||
                         session.parked.size() >= max_parked;
  if (header.op == Op::bye || is_greedy) {
    session.ended = true;
    return false;
  }
  const Ticket ticket = ++last_ticket_;
  if (!data_.execute(ticket, request, reply_)) {
    park(ticket, session, header);
  } else if (has_reply(header.op)) {
    answer(session, header.seq, header.op, reply_);
  }
  if (data_.has_woken()) answer_woken();
  return true;
}

// A request that was sent again after a reconnect and must not be done again.
bool Service::is_repeat(Session& session, const RequestHeader& header) {
  if (header.seq > session.mark) {
    session.mark = header.seq;
    session.suspended.clear();  // repeats come before anything new
    return false;
  }
  if (session.suspended.erase(header.seq) > 0) return false;
  if (session.parked.contains(header.seq)) return true;
  return is_counted(header.op) || !has_reply(header.op);
}

bool Service::attach(Connection& connection, const ClientHello& hello, bool& resumed) {
  Session* session = sessions_.find(hello.session);
  if (session != nullptr && session->connection != nullptr) {
    // The client saw its old connection break before we did.
    Connection& old = *session->connection;
    old.session = nullptr;
    old.is_doomed = true;
    touch(old);
    detach(*session);
    session = sessions_.find(hello.session);
  }
  resumed = session != nullptr;
  if (!resumed) {
    session = &sessions_.make(hello.session);
    session->forgotten = hello.received;  // those of a session that expired
  }
  sessions_.attach(*session, connection);
  connection.session = session;
  return session->forget_replies(hello.received);
}

void Service::repeat_replies(Session& session) {
  for (const std::string& frame : session.replies) session.connection->output.append(frame);
}

void Service::detach(Session& session) {
  for (const auto& [seq, ticket] : session.parked) {
    data_.withdraw(ticket);
    const auto found = pending_.find(ticket);
    timers_.erase({found->second.due, ticket});
    pending_.erase(found);
    session.suspended.insert(seq);
  }
  session.parked.clear();
  sessions_.detach(session, Clock::now());
}

void Service::park(Ticket ticket, Session& session, const RequestHeader& header) {
  auto due = Clock::time_point::max();
  if (header.timeout_ms > 0) {
    // Beyond 30 years the clock would overflow; nobody will be there to see the difference.
    const std::int64_t ms = std::min<std::int64_t>(header.timeout_ms, 1'000'000'000'000);
    due = Clock::now() + std::chrono::milliseconds(ms);
    timers_.insert({due, ticket});
  }
  pending_[ticket] = {&session, header.seq, header.op, due};
  session.parked[header.seq] = ticket;
}

void Service::unpark(Ticket ticket) {
  const auto found = pending_.find(ticket);
  const Pending& pending = found->second;
  timers_.erase({pending.due, ticket});
  pending.session->parked.erase(pending.seq);
  pending_.erase(found);
}

void Service::cancel(Session& session, std::uint64_t seq) {
  const auto found = session.parked.find(seq);
  if (found == session.parked.end()) return;
  const Ticket ticket = found->second;
  data_.withdraw(ticket);
  unpark(ticket);
}

void Service::answer(Session& session, std::uint64_t seq, Op op, const Reply& reply) {
  Connection& connection = *session.connection;
  if (is_counted(op)) {
    std::string frame;
    append_reply(frame, seq, true, reply);
    connection.output.append(frame);
    session.keep_reply(std::move(frame));
  } else {
    append_reply(connection.output, seq, false, reply);
  }
  touch(connection);
}

void Service::touch(Connection& connection) {
  if (connection.is_touched) return;
  connection.is_touched = true;
  touched_.push_back(&connection);
}

void Service::answer_woken() {
  for (const Data::Answer& woken : data_.take_woken()) {
    const Pending pending = pending_.at(woken.ticket);
    unpark(woken.ticket);
    answer(*pending.session, pending.seq, pending.op, woken.reply);
  }
}

Service::Clock::time_point Service::next_timer() const {
  const auto expiry = sessions_.next_expiry();
  return timers_.empty() ? expiry : std::min(expiry, timers_.begin()->first);
}

void Service::run_timers(Clock::time_point now) {
  while (!timers_.empty() && timers_.begin()->first <= now) {
    const Ticket ticket = timers_.begin()->second;
    const Pending pending = pending_.at(ticket);
    const Reply reply = data_.expire(ticket);
    unpark(ticket);
    answer(*pending.session, pending.seq, pending.op, reply);
  }
  sessions_.expire(now);
}

}  // namespace gradsync::store
