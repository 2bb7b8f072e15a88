#include "p2p/outbox.h"

#include <algorithm>
#include <string>
#include <utility>

namespace gradsync {
namespace {

// One turn of a send before others get theirs, and before the lock is free for a moment.
constexpr std::size_t turn_bytes = 256 * 1024;

Status refusal(const RingWords& words, int peer) {
  const auto tag = static_cast<std::int64_t>(words.refused_tag.load(std::memory_order_relaxed));
  const Extent sent = Extent::unpack(words.sent.load(std::memory_order_relaxed));
  const Extent expected = Extent::unpack(words.expected.load(std::memory_order_relaxed));
  return Status::error(Code::mismatch,
                       "this rank sent " + sent.text() + " with tag " + std::to_string(tag) +
                           " to rank " + std::to_string(peer) + ", which expected " +
                           expected.text(),
                       {peer});
}

}  // namespace

Outbox::Outbox(std::vector<Outlet> outlets, Ended& ended) : ended_(ended) {
  for (Outlet& outlet : outlets) lines_.push_back({{std::move(outlet)}, {}, 0, 0, {}});
}

Status Outbox::complaint(int peer) {
  Line& line = lines_[static_cast<std::size_t>(peer)];
  if (line.reserve) return Status::success();  // never used
  hear_refusal(line);
  Status status = std::move(line.complaint).value_or(Status::success());
  line.complaint.reset();
  return status;
}

Status Outbox::post(const RequestPtr& request) {
  Line& line = lines_[static_cast<std::size_t>(request->transfer().peer)];
  if (line.reserve) {
    const Status status = line.reserve();
    if (!status.ok()) return status;
    line.reserve = nullptr;
  }
  line.queue.push_back(request);
  ++unfinished_;
  if (line.queue.size() == 1) (void)push(line);
  return Status::success();
}

bool Outbox::send_at_once(const Transfer& transfer) {
  Line& line = lines_[static_cast<std::size_t>(transfer.peer)];
  const std::size_t bytes = transfer.extent.bytes();
  if (line.reserve || !line.queue.empty() || line.resume_at != 0 || bytes > line.capacity / 4 ||
      has_complaint(transfer.peer) || !line.ring.has_room(sizeof(MessageHeader) + padded(bytes))) {
    return false;
  }
  const MessageHeader header{transfer.tag, transfer.extent.pack(), bytes, ++line.messages};
  line.ring.write(&header, sizeof(header));
  const std::uint64_t end = line.ring.position() + padded(bytes);
  line.ring.write(transfer.data, bytes);
  line.ring.skip_to(end);
  line.ring.publish();
  ring_doorbell(*line.receiver);
  return true;
}

bool Outbox::has_complaint(int peer) const {
  const Line& line = lines_[static_cast<std::size_t>(peer)];
  const RingWords& words = line.ring.words();
  return line.complaint || words.refused.load(std::memory_order_acquire) !=
                               words.acknowledged.load(std::memory_order_relaxed);
}

bool Outbox::push() {
  bool moved = false;
  if (unfinished_ == 0) return moved;
  for (Line& line : lines_) moved = push(line) || moved;
  return moved;
}

bool Outbox::push(Line& line) {
  if (line.queue.empty()) return false;
  hear_refusal(line);
  bool moved = false;
  while (!line.queue.empty()) {
    Request& first = *line.queue.front();
    if (first.sequence == 0 && !begin(line, first)) break;
    const bool streamed = stream(line, first);
    moved = moved || streamed;
    if (first.written < first.transfer().extent.bytes()) break;
    end_first(line, Status::success());
    moved = true;
  }
  return moved;
}

bool Outbox::begin(Line& line, Request& request) {
  RingWriter& ring = line.ring;
  // What was given up stands in one word: the next message waits until the receiver has seen it.
  if (line.resume_at != 0) {
    if (!ring.read_up_to(line.resume_at) && !ring.has_room_or_ask(line.capacity)) return false;
    line.resume_at = 0;
  }
  if (!ring.has_room_or_ask(sizeof(MessageHeader))) return false;
  const Transfer& transfer = request.transfer();
  request.sequence = ++line.messages;
  request.end = ring.position() + sizeof(MessageHeader) + padded(transfer.extent.bytes());
  const MessageHeader header{transfer.tag, transfer.extent.pack(), transfer.extent.bytes(),
                             request.sequence};
  ring.write(&header, sizeof(header));
  return true;
}

bool Outbox::stream(Line& line, Request& request) {
  const std::size_t total = request.transfer().extent.bytes();
  // A quarter of the ring at a time: the receiver reads the first while we write the next.
  const std::size_t piece = line.capacity / 4;
  const std::size_t stop = std::min(total, request.written + turn_bytes);
  bool moved = false;
  while (request.written < stop) {
    const std::size_t rest = total - request.written;
    const std::size_t least = std::min<std::size_t>(padded(rest), piece);
    if (!line.ring.has_room_or_ask(least)) break;
    line.ring.write(request.transfer().data + request.written, std::min(rest, piece));
    request.written += std::min(rest, piece);
    // The padding is published with the last byte.
    if (request.written == total) line.ring.skip_to(request.end);
    show(line, request);
    moved = true;
  }
  // The header alone, where nothing can follow yet: the receiver may look for its match already.
  if (!request.shown) show(line, request);
  return moved;
}

void Outbox::show(Line& line, Request& request) {
  request.shown = true;
  line.ring.publish();
  ring_doorbell(*line.receiver);
}

void Outbox::hear_refusal(Line& line) {
  RingWords& words = line.ring.words();
  const std::uint64_t refused = words.refused.load(std::memory_order_acquire);
  if (refused == words.acknowledged.load(std::memory_order_relaxed)) return;
  Status status = refusal(words, static_cast<int>(&line - lines_.data()));
  words.acknowledged.store(refused, std::memory_order_release);
  if (!line.queue.empty() && line.queue.front()->sequence == refused) {
    // Both sides go on after the message: the receiver has done so already.
    line.ring.skip_to(line.queue.front()->end);
    line.ring.publish();
    end_first(line, std::move(status));
  } else if (!line.complaint) {
    line.complaint = std::move(status);
  }
}

void Outbox::give_up(Line& line, Request& request) {
  line.ring.words().given_up.store(request.sequence, std::memory_order_relaxed);
  line.resume_at = request.end;
  line.ring.skip_to(request.end);
  line.ring.publish();  // releases the word above
  ring_doorbell(*line.receiver);
}

void Outbox::cancel(const RequestPtr& request, const Status& status) {
  Line& line = lines_[static_cast<std::size_t>(request->transfer().peer)];
  const auto found = std::find(line.queue.begin(), line.queue.end(), request);
  if (found == line.queue.end()) return;
  if (request->sequence != 0) give_up(line, *request);
  line.queue.erase(found);
  --unfinished_;
  ended_.add(request, status);
}

void Outbox::fail(int peer, const Status& status) {
  Line& line = lines_[static_cast<std::size_t>(peer)];
  while (!line.queue.empty()) cancel(line.queue.front(), status);
}

void Outbox::end_first(Line& line, Status status) {
  const RequestPtr first = std::move(line.queue.front());
  line.queue.pop_front();
  --unfinished_;
  ended_.add(first, std::move(status));
}

}  // namespace gradsync
