// A rank's sends: for each destination a queue, whose first is being written to the ring.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <vector>

#include "common/status.h"
#include "p2p/request.h"
#include "p2p/ring.h"

namespace gradsync {

class Outbox {
 public:
  struct Outlet {
    RingWriter ring;
    Doorbell* receiver = nullptr;
    std::size_t capacity = 0;
    std::function<Status()> reserve;  // gets the ring's memory; empty once that is done
  };

  Outbox(std::vector<Outlet> outlets, Ended& ended);

  // Says what went wrong with an earlier send to `peer` that was over already, once.
  Status complaint(int peer);
  // Takes a request. Small ones are written, and over, at once when nothing is before them.
  Status post(const RequestPtr& request);
  // Writes a small message that needs no request: nothing is before it and there is room.
  bool send_at_once(const Transfer& transfer);
  // Whether complaint() may have something to say.
  bool has_complaint(int peer) const;
  // Moves what can be moved; returns whether anything was.
  bool push();
  // Ends one request, or all to a peer, for the reason given.
  void cancel(const RequestPtr& request, const Status& status);
  void fail(int peer, const Status& status);

  std::size_t unfinished() const { return unfinished_; }
  template <typename Function>
  void for_each(Function function) const {
    for (const Line& line : lines_) {
      for (const RequestPtr& request : line.queue) function(request);
    }
  }

 private:
  struct Line : Outlet {
    std::deque<RequestPtr> queue;
    std::uint64_t messages = 0;   // begun so far
    std::uint64_t resume_at = 0;  // after a message that was given up: nothing before it is read
    std::optional<Status> complaint;
  };

  bool push(Line& line);
  bool begin(Line& line, Request& request);
  bool stream(Line& line, Request& request);
  void show(Line& line, Request& request);
  void hear_refusal(Line& line);
  void give_up(Line& line, Request& request);
  void end_first(Line& line, Status status);

  std::vector<Line> lines_;
  std::size_t unfinished_ = 0;
  Ended& ended_;
};

}  // namespace gradsync
