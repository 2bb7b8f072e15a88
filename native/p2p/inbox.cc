#include "p2p/inbox.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <set>
#include <utility>

namespace gradsync {
namespace {

// One turn of a message before others get theirs, and before the lock is free for a moment.
constexpr std::size_t turn_bytes = 256 * 1024;

bool fits(const Transfer& receive, int source, std::int64_t tag) {
  return receive.tag == tag && (receive.peer == any_source || receive.peer == source);
}

Status mismatch(int source, const MessageHeader& header, const Extent& expected) {
  return Status::error(Code::mismatch,
                       "rank " + std::to_string(source) + " sent " +
                           Extent::unpack(header.extent).text() + " with tag " +
                           std::to_string(header.tag) + ", this rank expected " + expected.text(),
                       {source});
}

}  // namespace

Inbox::Inbox(int rank, std::vector<Inlet> inlets, Ended& ended) : rank_(rank), ended_(ended) {
  for (Inlet& inlet : inlets) lines_.push_back({{inlet}, {}, {}, false});
}

void Inbox::post(const RequestPtr& request) {
  const Transfer& wanted = request->transfer();
  const auto found = std::find_if(unexpected_.begin(), unexpected_.end(), [&](const MessagePtr& m) {
    return fits(wanted, m->source, m->header.tag);
  });
  if (found == unexpected_.end()) {
    posted_.push_back(request);
    return;
  }
  const MessagePtr message = *found;
  unexpected_.erase(found);
  bind(message, request);
}

Inbox::Found Inbox::take_at_once(const Transfer& wanted) {
  Line& line = lines_[static_cast<std::size_t>(wanted.peer)];
  if (line.current || line.closed || !line.refusals.empty() || !posted_.empty() ||
      !unexpected_.empty()) {
    return Found::other;
  }
  const std::size_t available = line.ring.available();
  if (available == 0) return Found::nothing;
  const std::uint64_t start = line.ring.position();
  MessageHeader header;
  line.ring.read(&header, sizeof(header));
  const std::uint64_t end = line.ring.position() + padded(header.bytes);
  if (header.tag != wanted.tag || header.extent != wanted.extent.pack() ||
      available < end - start || end - start > line.capacity ||
      line.ring.words().given_up.load(std::memory_order_relaxed) == header.sequence) {
    line.ring.skip_to(start);
    return Found::other;
  }
  line.ring.read(wanted.data, header.bytes);
  line.ring.skip_to(end);
  line.ring.release();
  return Found::taken;
}

void Inbox::hand_over(const RequestPtr& send) {
  const Transfer& given = send->transfer();
  const auto message = std::make_shared<Message>();
  message->source = rank_;
  message->header = {given.tag, given.extent.pack(), given.extent.bytes(), ++own_messages_};
  message->arrived = given.extent.bytes();
  if (message->arrived > 0) {
    message->kept = std::make_unique_for_overwrite<std::byte[]>(message->arrived);
    std::memcpy(message->kept.get(), given.data, message->arrived);
  }
  Status status;
  if (const RequestPtr receive = take_posted(rank_, given.tag)) {
    if (receive->transfer().extent != given.extent) {
      status = mismatch(rank_, message->header, receive->transfer().extent);
    }
    bind(message, receive);
  } else {
    unexpected_.push_back(message);
  }
  ended_.add(send, std::move(status));
}

RequestPtr Inbox::take_posted(int source, std::int64_t tag) {
  const auto found = std::find_if(posted_.begin(), posted_.end(), [&](const RequestPtr& request) {
    return fits(request->transfer(), source, tag);
  });
  if (found == posted_.end()) return nullptr;
  RequestPtr request = std::move(*found);
  posted_.erase(found);
  return request;
}

bool Inbox::is_awaited(int source) const {
  return std::any_of(posted_.begin(), posted_.end(), [&](const RequestPtr& request) {
    const int peer = request->transfer().peer;
    return peer == any_source || peer == source;
  });
}

bool Inbox::pull(bool eagerly) {
  bool moved = false;
  for (int source = 0; source < static_cast<int>(lines_.size()); ++source) {
    if (source != rank_) moved = pull_from(source, eagerly) || moved;
  }
  return moved;
}

bool Inbox::pull_from(int source, bool eagerly) {
  Line& line = lines_[static_cast<std::size_t>(source)];
  if (line.closed) return false;
  if (!line.refusals.empty()) tell_refusals(line);
  bool moved = false;
  const std::uint64_t stop = line.ring.position() + turn_bytes;
  while (line.ring.position() < stop) {
    const std::size_t available = line.ring.available();
    // Asked after the head: a head that was moved past bytes that never came is not believed.
    if (line.current && line.ring.words().given_up.load(std::memory_order_relaxed) ==
                            line.current->header.sequence) {
      const MessagePtr message = line.current;
      drop_current(line);
      if (message->receive) {
        ended_.add(message->receive,
                   Status::error(Code::aborted,
                                 "the sender gave up after " + std::to_string(message->arrived) +
                                     " of " + std::to_string(message->header.bytes) + " bytes",
                                 {source}));
      }
      moved = true;
      continue;
    }
    if (available == 0) break;
    const bool bound = line.current && line.current->receive;
    if (!bound && !eagerly && !is_awaited(source)) break;
    if (!line.current) {
      if (!begin(line, source)) break;
    } else {
      arrive(line, available);
    }
    moved = true;
  }
  return moved;
}

bool Inbox::begin(Line& line, int source) {
  const std::uint64_t start = line.ring.position();
  auto message = std::make_shared<Message>();
  message->source = source;
  line.ring.read(&message->header, sizeof(MessageHeader));
  message->end = line.ring.position() + padded(message->header.bytes);
  const RequestPtr receive = take_posted(source, message->header.tag);
  if (!receive) {
    if (message->header.bytes > 0) {
      message->kept.reset(new (std::nothrow) std::byte[message->header.bytes]);
      if (message->kept == nullptr) {
        line.ring.skip_to(start);  // it stays in the ring until there is memory or a receive for it
        return false;
      }
    }
    unexpected_.push_back(message);
  }
  line.current = message;
  if (receive) bind(message, receive);
  if (line.current && message->complete()) {
    line.current = nullptr;  // it has no bytes
    if (message->receive) deliver(message);
  }
  line.ring.release();
  return true;
}

void Inbox::arrive(Line& line, std::size_t available) {
  Message& message = *line.current;
  const std::size_t bytes =
      std::min({available, static_cast<std::size_t>(message.header.bytes) - message.arrived,
                line.capacity / 4});
  line.ring.read(message.target() + message.arrived, bytes);
  message.arrived += bytes;
  if (message.complete()) line.ring.skip_to(message.end);
  line.ring.release();
  if (!message.complete()) return;
  const MessagePtr complete = std::move(line.current);
  line.current = nullptr;
  if (complete->receive) deliver(complete);
}

void Inbox::bind(const MessagePtr& message, const RequestPtr& request) {
  if (request->transfer().extent.pack() != message->header.extent) {
    refuse(*message, request);
    return;
  }
  if (message->arrived > 0) {
    std::memcpy(request->transfer().data, message->kept.get(), message->arrived);
  }
  message->kept = nullptr;
  message->receive = request;
  const Line& line = lines_[static_cast<std::size_t>(message->source)];
  if (message->complete() && line.current != message) deliver(message);
}

void Inbox::deliver(const MessagePtr& message) {
  ended_.add(std::move(message->receive), Status::success(), message->source);
}

void Inbox::refuse(const Message& message, const RequestPtr& request) {
  const Extent& expected = request->transfer().extent;
  ended_.add(request, mismatch(message.source, message.header, expected));
  if (message.source == rank_) return;
  Line& line = lines_[static_cast<std::size_t>(message.source)];
  line.refusals.push_back({message.header.sequence, static_cast<std::uint64_t>(message.header.tag),
                           message.header.extent, expected.pack()});
  tell_refusals(line);
  if (line.current.get() == &message) drop_current(line);
}

void Inbox::drop_current(Line& line) {
  const MessagePtr message = std::move(line.current);
  line.current = nullptr;
  unexpected_.remove(message);
  line.ring.skip_to(message->end);
  line.ring.release();
}

void Inbox::tell_refusals(Line& line) {
  RingWords& words = line.ring.words();
  const std::uint64_t last = words.refused.load(std::memory_order_relaxed);
  if (line.refusals.empty() || words.acknowledged.load(std::memory_order_acquire) != last) return;
  const Refusal refusal = line.refusals.front();
  line.refusals.pop_front();
  words.refused_tag.store(refusal.tag, std::memory_order_relaxed);
  words.sent.store(refusal.sent, std::memory_order_relaxed);
  words.expected.store(refusal.expected, std::memory_order_relaxed);
  words.refused.store(refusal.sequence, std::memory_order_release);
  line.ring.wake_sender();
}

void Inbox::cancel(const RequestPtr& request, const Status& status) {
  const auto found = std::find(posted_.begin(), posted_.end(), request);
  if (found != posted_.end()) {
    posted_.erase(found);
    ended_.add(request, status);
    return;
  }
  for (Line& line : lines_) {
    if (!line.current || line.current->receive != request) continue;
    drop_current(line);
    ended_.add(request, status);
    return;
  }
}

void Inbox::fail(int peer, const Status& status) {
  Line& line = lines_[static_cast<std::size_t>(peer)];
  if (line.current) {
    const MessagePtr message = line.current;
    drop_current(line);
    if (message->receive) ended_.add(message->receive, status);
  }
  line.closed = true;
  for (auto it = posted_.begin(); it != posted_.end();) {
    const RequestPtr request = *it;
    if (request->transfer().peer != peer) {
      ++it;
      continue;
    }
    it = posted_.erase(it);
    ended_.add(request, status);
  }
}

std::size_t Inbox::unfinished() const {
  std::size_t count = posted_.size();
  for (const Line& line : lines_) count += line.current && line.current->receive ? 1U : 0U;
  return count;
}

std::string Inbox::others_waiting(int source) const {
  std::set<std::int64_t> tags;
  for (const MessagePtr& message : unexpected_) {
    if (source == any_source || message->source == source) tags.insert(message->header.tag);
  }
  if (tags.empty()) return "";
  std::string text = "; messages wait that have the tags";
  int shown = 0;
  for (const std::int64_t tag : tags) {
    text += (shown == 0 ? " " : ", ") + (shown < 8 ? std::to_string(tag) : std::string("..."));
    if (++shown > 8) break;
  }
  return text;
}

}  // namespace gradsync
