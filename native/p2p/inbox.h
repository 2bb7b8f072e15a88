// A rank's receives, and the messages that nobody has asked for yet.
//
// A message belongs to the first receive, in the order of posting, that names its source (or any)
// and its tag; a receive takes the first such message, in the order of arrival. While somebody
// waits for another message of the same sender, those that come before it are moved to memory of
// our own, so the order of tags never matters. Otherwise they stay in the ring, and the sender
// waits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <list>
#include <memory>
#include <string>
#include <vector>

#include "common/status.h"
#include "p2p/request.h"
#include "p2p/ring.h"

namespace gradsync {

class Inbox {
 public:
  struct Inlet {
    RingReader ring;
    std::size_t capacity = 0;
  };

  // One inlet per rank; `rank` is our own.
  Inbox(int rank, std::vector<Inlet> inlets, Ended& ended);

  // Takes a receive; it is over at once when its message is here.
  void post(const RequestPtr& request);
  // Takes a send to ourselves.
  void hand_over(const RequestPtr& send);
  // For a receive that needs no request: takes its message if that is the next of its sender, small
  // and here as a whole.
  enum class Found : std::uint8_t { nothing, taken, other };
  Found take_at_once(const Transfer& wanted);
  const RingReader& ring(int source) const { return lines_[static_cast<std::size_t>(source)].ring; }
  // Moves what can be moved; returns whether anything was. `eagerly`: also what nobody waits for.
  bool pull(bool eagerly);
  bool pull_from(int source, bool eagerly);
  // Ends one receive, or all that name the peer, for the reason given. Messages of a failed peer
  // that are complete stay.
  void cancel(const RequestPtr& request, const Status& status);
  void fail(int peer, const Status& status);

  std::size_t unfinished() const;
  template <typename Function>
  void for_each(Function function) const {
    for (const RequestPtr& request : posted_) function(request);
    for (const Line& line : lines_) {
      if (line.current && line.current->receive) function(line.current->receive);
    }
  }
  // "messages wait with the tags 3, 4" for somebody who waits for another one.
  std::string others_waiting(int source) const;

 private:
  struct Message {
    int source = 0;
    MessageHeader header;
    std::uint64_t end = 0;  // position in the ring after it
    std::size_t arrived = 0;
    std::unique_ptr<std::byte[]> kept;  // where nobody has asked for it yet
    RequestPtr receive;                 // who has

    std::byte* target() const { return receive ? receive->transfer().data : kept.get(); }
    bool complete() const { return arrived == header.bytes; }
  };
  using MessagePtr = std::shared_ptr<Message>;
  struct Refusal {
    std::uint64_t sequence;
    std::uint64_t tag, sent, expected;
  };
  struct Line : Inlet {
    MessagePtr current;            // being read
    std::deque<Refusal> refusals;  // to be told, one after the other
    bool closed = false;           // the sender is gone
  };

  bool is_awaited(int source) const;
  bool begin(Line& line, int source);
  void arrive(Line& line, std::size_t available);
  // Gives a message to a receive, or refuses it.
  void bind(const MessagePtr& message, const RequestPtr& request);
  void refuse(const Message& message, const RequestPtr& request);
  void deliver(const MessagePtr& message);
  // Forgets the message that is being read and goes on after it.
  void drop_current(Line& line);
  void tell_refusals(Line& line);
  RequestPtr take_posted(int source, std::int64_t tag);

  int rank_;
  std::vector<Line> lines_;
  std::list<RequestPtr> posted_;      // in the order of posting
  std::list<MessagePtr> unexpected_;  // in the order of arrival
  std::uint64_t own_messages_ = 0;
  Ended& ended_;
};

}  // namespace gradsync
