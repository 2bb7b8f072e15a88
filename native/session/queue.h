// The order of a group's calls. A synchronous call runs in its caller's thread, after those that
// were handed in before it. Asynchronous ones are carried out by a worker thread, which exists from
// the first of them on, or by whoever waits for one: that thread has nothing better to do.
//
// While the rank's other threads use all its cores the worker stands back: what it did would be
// done at their expense, and every step of it would wait until it gets a core on both sides. The
// call is carried out by whoever waits for it, at last, or when a core is free, or after 100 ms.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "common/core_use.h"
#include "common/deadline.h"
#include "common/interrupt.h"
#include "common/status.h"
#include "session/turn.h"

namespace gradsync {

// A call that was handed in: whether it is over, and how it went.
class Ticket {
 public:
  bool done() const { return done_.load(std::memory_order_acquire) != 0; }
  // Only of one that is done.
  const Status& status() const { return status_; }
  // Runs `callback` once it is done, in the thread that carried it out, or now.
  void on_done(std::function<void()> callback);

  // For whoever carries it out: it is over, and then what waits for that.
  void settle(Status status);
  void call_back();
  void complete(Status status) {
    settle(std::move(status));
    call_back();
  }
  // Sleeps until it is done, but not for long.
  void doze(Deadline deadline);

 private:
  std::atomic<std::uint32_t> done_{0};
  std::atomic<std::uint32_t> sleepers_{0};
  Status status_;
  std::mutex mutex_;  // guards the callbacks
  std::vector<std::function<void()>> callbacks_;
};

class Queue {
 public:
  using Call = std::function<Status()>;

  Queue() = default;
  ~Queue() { close(); }
  Queue(const Queue&) = delete;
  Queue& operator=(const Queue&) = delete;

  // How many cores this rank may count on. Before the first call.
  void set_share_of_cores(double cores) { core_use_.set_share(cores); }

  // Hands in a call and returns at once.
  std::shared_ptr<Ticket> post(Call call);
  // Waits until the ticket's call is over: ok, timeout or interrupted say what became of the wait,
  // not of the call.
  Status wait(Ticket& ticket, Deadline deadline);
  // Somebody is interested in what was handed in, but cannot carry it out: the worker shall.
  void hurry();
  // Runs a call in this thread after everything that was handed in before.
  template <typename Function>
  Status run(Deadline deadline, Function call);

  // Waits until nothing is left to do, or the time is over.
  void drain(Deadline deadline);
  // Ends the worker; what was not begun is never carried out. The call that is being carried out
  // must have been told to end, and is waited for. Callbacks may do it, or destroy the queue.
  void close();
  // In a forked child, where the worker does not exist.
  void forget_worker();

 private:
  struct Entry {
    Call call;
    std::shared_ptr<Ticket> ticket;
  };

  // With the turn taken: carries out the first call, if there still is one, and gives the turn back
  // before it says so.
  void carry_out_first();
  void work();
  // With the lock held, which is given up meanwhile: waits while others need the cores.
  void stand_back(std::unique_lock<std::mutex>& lock);

  Turn turn_;
  std::atomic<std::size_t> waiting_{0};  // entries in the queue
  std::atomic<bool> hurried_{false};     // until it is empty
  std::mutex mutex_;                     // guards what follows
  std::condition_variable news_;
  std::deque<Entry> entries_;
  bool closing_ = false;
  bool worker_sleeps_ = false;  // until there is something to do
  CoreUse core_use_;
  std::unique_ptr<std::thread> worker_;
};

// The queue whose call the present thread carries out: calls made from within belong to it.
inline thread_local const Queue* carrying_out = nullptr;
// The queue whose turn the present thread has for a call of its own. A signal handler that runs
// meanwhile can close it, but would wait for ever for the turn.
inline thread_local const Queue* has_turn_of = nullptr;

template <typename Function>
Status Queue::run(Deadline deadline, Function call) {
  if (carrying_out == this) return call();
  if (has_turn_of == this) {
    return Status::error(Code::invalid,
                         "this thread is inside a call of the group already, as in a signal "
                         "handler, and can make no other before that one is over");
  }
  while (true) {
    if (!turn_.try_take()) {
      const Status status = turn_.take(deadline);
      if (!status.ok()) return status;
    }
    if (waiting_.load(std::memory_order_acquire) == 0) break;
    let_go_of_lock();
    carry_out_first();
  }
  const Queue* const outer = std::exchange(has_turn_of, this);
  Status status = call();
  has_turn_of = outer;
  turn_.give_back();
  return status;
}

}  // namespace gradsync
