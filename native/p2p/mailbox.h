// Messages of one rank: its sends and receives, who moves them, and what ends them early.
//
// Nothing here has a thread of its own until it must: whoever posts moves what can be moved at
// once, and whoever waits moves everything while it waits. Only when requests are left that nobody
// waits for, a worker sleeps on the doorbell and moves them; it ends with the mailbox.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "common/deadline.h"
#include "common/fork.h"
#include "common/status.h"
#include "memory/segment.h"
#include "p2p/inbox.h"
#include "p2p/outbox.h"
#include "p2p/request.h"
#include "p2p/spinning.h"
#include "sync/team.h"

namespace gradsync {

class Mailbox {
 public:
  // The messages' part of the segment begins at `offset`.
  Mailbox(Team& team, std::shared_ptr<Segment> segment, std::size_t offset);
  ~Mailbox();
  Mailbox(const Mailbox&) = delete;
  Mailbox& operator=(const Mailbox&) = delete;

  // Posts a request and returns; its own failure is found in it later, a caller's mistake at once.
  Status post(Transfer transfer, RequestPtr& out);
  // Sends or receives a small message if that can be done without waiting and nothing is in the
  // way; false: nothing was done, and run() shall do it. Needs no deadline.
  bool run_now(const Transfer& transfer, int& source);
  // Posts a request and waits for its end. A send is over when all of it is in the ring.
  Status run(Transfer transfer, int& source);
  // Waits until a request is over: ok, timeout or interrupted say what became of the wait.
  Status wait(Request& request, Deadline until);
  // Moves what can be moved without waiting.
  bool advance() { return advance(0); }

  // Gives sends in flight until the deadline, then ends everything and the worker.
  void close(Deadline deadline);

 private:
  bool is_ours() const { return fork_generation() == opened_in_; }
  Status check(const Transfer& transfer) const;
  bool is_drained();

  // These with the lock held.
  Status admit(const RequestPtr& request);
  void look_around();
  void note_departure(int peer);
  void end_hopeless_receives();
  void cancel(const RequestPtr& request, const Status& status);
  void end_all(const Status& status);
  std::vector<RequestPtr> all() const;
  std::vector<RequestPtr> take_ended();
  Status late(const Request& request) const;

  // Small messages without a request: p2p/at_once.cc.
  bool run_at_once(const Transfer& transfer, int& source);
  Inbox::Found try_at_once(const Transfer& transfer);

  // `waiting`: how many of the waiters the caller is.
  bool advance(int waiting);
  // Without the lock: runs callbacks, and wakes threads whose requests were ended by this one.
  void tell(const std::vector<RequestPtr>& ended, int waiting);
  Status wait_here(Request& request, Deadline until);
  // A wait that sleeps: since when nothing moves, and whether that was said.
  struct LongLook {
    std::optional<Deadline::Clock::time_point> since;
    bool told = false;
  };
  // Says once who waits for whom: p2p/late.cc.
  void wait_goes_on(const Request& request, LongLook& look) const;
  void sleep(std::uint32_t seen, std::int64_t most_ns);

  // The worker: p2p/worker.cc.
  void attend();
  void work();
  bool work_a_little(std::uint64_t& waits_seen, int& idle);
  void stop_worker();

  Team& team_;
  std::shared_ptr<Segment> segment_;
  Doorbell* bell_;  // ours
  std::uint64_t opened_in_ = fork_generation();

  std::mutex mutex_;  // guards what follows
  Ended ended_;
  Inbox inbox_;
  Outbox outbox_;
  std::vector<Status> lost_;  // per rank; ok while it is there
  Deadline next_look_ = Deadline::after(0);
  bool closed_ = false;
  std::unique_ptr<std::thread> worker_;

  std::atomic<std::size_t> unfinished_{0};
  std::atomic<int> waiters_{0};
  Perseverance perseverance_;
  std::atomic<std::uint64_t> waits_{0};  // begun so far
  std::atomic<bool> stopping_{false};
  std::atomic<bool> resting_{false};  // the worker sleeps on the word below
  std::atomic<std::uint32_t> nudges_{0};
};

}  // namespace gradsync
