#include "session/queue.h"

#include <new>
#include <utility>

#include "common/background.h"
#include "common/interrupt.h"
#include "sync/futex.h"
#include "sync/pause.h"

namespace gradsync {
namespace {

// How long a call that nobody waits for may wait for a core.
constexpr auto longest_wait_for_core = std::chrono::milliseconds(100);
// How long a call that was told to end may take for that.
constexpr double to_notice_s = 10;
// A waiter that cannot help polls this often before it sleeps; about 6 us.
constexpr int spins = 200;

Status destroyed() {
  return Status::error(Code::aborted, "the group was destroyed before this call was carried out");
}

// The queue whose worker the present thread is. A callback may drop the last reference to it, or
// close it, in this very thread: then it is nobody's.
thread_local const Queue* working_for = nullptr;

}  // namespace

void Ticket::on_done(std::function<void()> callback) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!done()) {
      callbacks_.push_back(std::move(callback));
      return;
    }
  }
  callback();
}

void Ticket::settle(Status status) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    status_ = std::move(status);
    // seq_cst: either we see the sleeper, or the sleeper sees that we are done. It releases the
    // status as well.
    done_.store(1, std::memory_order_seq_cst);
  }
  if (sleepers_.load(std::memory_order_seq_cst) != 0) futex_wake_all(done_);
}

void Ticket::call_back() {
  std::vector<std::function<void()>> callbacks;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    callbacks.swap(callbacks_);
  }
  for (const auto& callback : callbacks) callback();
}

void Ticket::doze(Deadline deadline) {
  for (int i = 0; i < spins && !done(); ++i) pause_briefly();
  if (done()) return;
  sleepers_.fetch_add(1, std::memory_order_seq_cst);
  if (done_.load(std::memory_order_seq_cst) == 0) {
    futex_wait(done_, 0, deadline.remaining_ns(look_around_ns));
  }
  sleepers_.fetch_sub(1, std::memory_order_seq_cst);
}

std::shared_ptr<Ticket> Queue::post(Call call) {
  auto ticket = std::make_shared<Ticket>();
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!closing_) {
      // First: where no thread can be had, that is all that happens.
      if (!worker_) worker_ = start_background([this] { work(); });
      entries_.push_back({std::move(call), ticket});
      waiting_.store(entries_.size(), std::memory_order_release);
      if (worker_sleeps_) news_.notify_one();
      return ticket;
    }
  }
  ticket->complete(destroyed());
  return ticket;
}

void Queue::hurry() {
  if (waiting_.load(std::memory_order_relaxed) == 0) return;
  if (hurried_.exchange(true, std::memory_order_relaxed)) return;
  // With the lock: a worker that has just looked is asleep by now.
  const std::lock_guard<std::mutex> lock(mutex_);
  news_.notify_one();
}

Status Queue::wait(Ticket& ticket, Deadline deadline) {
  // Carrying out a call takes as long as it takes: nothing for a thread that is in a hurry, unless
  // it is the one that everybody relies on.
  const bool is_worker = working_for == this && !deadline.expired();
  const bool may_help = (deadline.is_never() || is_worker) && carrying_out != this;
  while (!ticket.done()) {
    if (may_help && waiting_.load(std::memory_order_acquire) != 0 && turn_.try_take()) {
      if (waiting_.load(std::memory_order_acquire) != 0) {
        carry_out_first();
      } else {
        turn_.give_back();
      }
      continue;
    }
    hurry();
    ticket.doze(deadline);
    if (ticket.done()) break;
    if (deadline.expired()) return Status::error(Code::timeout, "the call is not over yet");
    if (interrupted()) return interrupted_status();
  }
  return Status::success();
}

void Queue::carry_out_first() {
  Entry entry;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!entries_.empty()) {
      entry = std::move(entries_.front());
      entries_.pop_front();
    }
    waiting_.store(entries_.size(), std::memory_order_release);
    if (entries_.empty()) hurried_.store(false, std::memory_order_relaxed);
  }
  if (!entry.ticket) {  // closed since the caller looked
    turn_.give_back();
    return;
  }
  const Queue* const outer = std::exchange(carrying_out, this);
  Status status = entry.call();
  carrying_out = outer;
  // Whoever makes the next call finds this one done; what follows it (a callback) may make that
  // one.
  entry.ticket->settle(std::move(status));
  turn_.give_back();
  entry.ticket->call_back();
}

void Queue::work() {
  working_for = this;
  while (true) {
    {
      std::unique_lock<std::mutex> lock(mutex_);
      worker_sleeps_ = true;
      news_.wait(lock, [this] { return closing_ || !entries_.empty(); });
      worker_sleeps_ = false;
      stand_back(lock);
      if (closing_) return;
      if (entries_.empty()) continue;
    }
    // Not for ever: who has the turn may close the queue, in a signal handler.
    if (!turn_.take(Deadline::after(1e-9 * look_around_ns)).ok()) continue;
    if (waiting_.load(std::memory_order_acquire) != 0) {
      carry_out_first();
      if (working_for != this) return;  // and there may be no `this` any more
    } else {
      turn_.give_back();
    }
  }
}

void Queue::stand_back(std::unique_lock<std::mutex>& lock) {
  const auto is_needed = [this] {
    return closing_ || entries_.empty() || hurried_.load(std::memory_order_relaxed);
  };
  const auto until = Deadline::Clock::now() + longest_wait_for_core;
  has_free_core = false;
  if (core_use_.is_stale()) {
    (void)core_use_.is_high();
    news_.wait_for(lock, std::chrono::microseconds(200), is_needed);
  }
  while (!is_needed() && Deadline::Clock::now() < until) {
    has_free_core = !core_use_.is_high();
    if (has_free_core) return;
    news_.wait_for(lock, std::chrono::milliseconds(1), is_needed);
  }
  // Whoever is interested has nothing else to do, or will not have for long.
  if (hurried_.load(std::memory_order_relaxed)) has_free_core = true;
}

void Queue::drain(Deadline deadline) {
  if (carrying_out == this || has_turn_of == this) return;
  bool has_worker = false;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    has_worker = worker_ != nullptr;
  }
  if (has_worker) {
    const std::shared_ptr<Ticket> last = post([] { return Status::success(); });
    (void)wait(*last, deadline);
  } else if (turn_.take(deadline).ok()) {  // what runs in another thread is over
    turn_.give_back();
  }
}

void Queue::close() {
  std::deque<Entry> left;
  std::unique_ptr<std::thread> worker;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    closing_ = true;
    left.swap(entries_);
    waiting_.store(0, std::memory_order_release);
    worker.swap(worker_);
  }
  news_.notify_all();
  if (worker && working_for == this) {
    working_for = nullptr;
    worker->detach();
  } else if (worker) {
    worker->join();
  }
  // Nor may a call go on that a waiter carries out: its memory is free from here on.
  const bool is_ours = carrying_out == this || has_turn_of == this;
  if (!is_ours && turn_.take(Deadline::after(to_notice_s)).ok()) turn_.give_back();
  for (const Entry& entry : left) {
    entry.ticket->complete(destroyed());
  }
}

void Queue::forget_worker() {
  // The thread object of a thread that is not there can neither be joined nor destroyed. It may
  // hold the lock for ever, and whoever destroys a condition waits for those who wait for it.
  (void)worker_.release();
  new (&mutex_) std::mutex;
  new (&news_) std::condition_variable;
}

}  // namespace gradsync
