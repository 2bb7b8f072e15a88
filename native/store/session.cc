#include "store/session.h"

namespace gradsync::store {

bool Session::forget_replies(std::uint64_t received) {
  if (received > forgotten + replies.size()) return false;
  while (forgotten < received) {
    reply_bytes -= replies.front().size();
    replies.pop_front();
    ++forgotten;
  }
  return true;
}

void Session::keep_reply(std::string frame) {
  reply_bytes += frame.size();
  replies.push_back(std::move(frame));
}

Session* Sessions::find(const Id& id) {
  const auto found = all_.find(id);
  return found == all_.end() ? nullptr : found->second.get();
}

Session& Sessions::make(const Id& id) {
  std::unique_ptr<Session>& session = all_[id];
  session = std::make_unique<Session>();
  session->id = id;
  return *session;
}

void Sessions::attach(Session& session, Connection& connection) {
  detached_.erase({session.detached_at, &session});
  session.connection = &connection;
}

void Sessions::detach(Session& session, Clock::time_point now) {
  session.connection = nullptr;
  if (session.ended) {
    all_.erase(all_.find(session.id));
    return;
  }
  session.detached_at = now;
  detached_.insert({now, &session});
  if (detached_.size() > max_detached) erase_oldest();
}

Sessions::Clock::time_point Sessions::next_expiry() const {
  return detached_.empty() ? Clock::time_point::max() : detached_.begin()->first + lifetime;
}

void Sessions::expire(Clock::time_point now) {
  while (next_expiry() <= now) erase_oldest();
}

void Sessions::erase_oldest() {
  const auto oldest = detached_.begin();
  all_.erase(all_.find(oldest->second->id));
  detached_.erase(oldest);
}

}  // namespace gradsync::store
