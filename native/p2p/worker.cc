// The mailbox's worker: moves requests that nobody waits for.
#include "common/background.h"
#include "p2p/mailbox.h"
#include "sync/futex.h"

namespace gradsync {
namespace {

// While threads of the caller wait, they move everything themselves, and a worker that slept on the
// doorbell would cost each ringer a system call. So it only looks now and then whether they go on.
constexpr std::int64_t nap_ns = 1'000'000;
constexpr int naps_before_rest = 10;
constexpr std::int64_t rest_ns = 1'000'000'000;

// Set when a callback destroyed the mailbox of the worker that ran it.
thread_local bool orphaned = false;

}  // namespace

void Mailbox::attend() {
  if (worker_ == nullptr) {
    worker_ = start_background([this] { work(); });
  } else if (resting_.load(std::memory_order_seq_cst)) {
    nudges_.fetch_add(1, std::memory_order_seq_cst);
    futex_wake_all(nudges_);
  }
}

void Mailbox::work() {
  std::uint64_t waits_seen = 0;
  int idle = 0;
  while (!stopping_.load(std::memory_order_seq_cst)) {
    if (!work_a_little(waits_seen, idle) && orphaned) return;
  }
}

bool Mailbox::work_a_little(std::uint64_t& waits_seen, int& idle) {
  const std::uint32_t nudged = nudges_.load(std::memory_order_seq_cst);
  if (unfinished_.load(std::memory_order_seq_cst) == 0) {
    // Dekker with attend(): either we see the request, or it sees us resting.
    const bool rest = ++idle > naps_before_rest;
    resting_.store(rest, std::memory_order_seq_cst);
    if (unfinished_.load(std::memory_order_seq_cst) == 0) {
      futex_wait(nudges_, nudged, rest ? rest_ns : nap_ns);
    }
    resting_.store(false, std::memory_order_seq_cst);
    return true;
  }
  idle = 0;
  const std::uint64_t waits = waits_.load(std::memory_order_relaxed);
  if (waiters_.load(std::memory_order_acquire) > 0 || waits != waits_seen) {
    waits_seen = waits;
    futex_wait(nudges_, nudged, nap_ns);
    return true;
  }
  const std::uint32_t seen = bell_->rings.load(std::memory_order_acquire);
  const bool moved = advance(0);
  if (orphaned) return false;
  std::vector<RequestPtr> ended;
  {
    const std::scoped_lock lock(mutex_);
    if (next_look_.expired()) look_around();
    ended = take_ended();
  }
  tell(ended, 0);
  if (orphaned) return false;
  const bool alone = waiters_.load(std::memory_order_acquire) == 0;
  if (!moved && alone && unfinished_.load(std::memory_order_seq_cst) > 0 &&
      !stopping_.load(std::memory_order_seq_cst)) {
    sleep(seen, look_around_ns);
  }
  return true;
}

void Mailbox::stop_worker() {
  // Taken by the first: several threads may close a group, and its worker be one of them.
  std::unique_ptr<std::thread> worker;
  {
    const std::scoped_lock lock(mutex_);
    worker.swap(worker_);
  }
  if (worker == nullptr) return;
  stopping_.store(true, std::memory_order_seq_cst);
  nudges_.fetch_add(1, std::memory_order_seq_cst);
  futex_wake_all(nudges_);
  ring_doorbell(*bell_);
  if (worker->get_id() == std::this_thread::get_id()) {
    orphaned = true;
    worker->detach();
  } else {
    worker->join();
  }
}

}  // namespace gradsync
