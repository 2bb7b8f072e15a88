// A send or a receive, from when it is posted until it is over.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "common/deadline.h"
#include "common/site.h"
#include "common/status.h"
#include "p2p/extent.h"

namespace gradsync {

inline constexpr int any_source = -1;

// What the caller asks for. The memory must stay as it is until the request is over; `owner` keeps
// it alive until then.
struct Transfer {
  bool is_send = true;
  int peer = any_source;
  std::int64_t tag = 0;
  std::byte* data = nullptr;  // only read from by sends
  Extent extent;
  Deadline deadline;
  std::shared_ptr<void> owner;
  std::shared_ptr<const Site> site;  // the line that asked for it; none: that of whoever waits

  // "send(float32[10], 40 bytes; tag 3) to rank 1"
  std::string text() const {
    return std::string(is_send ? "send(" : "recv(") + extent.text() + "; tag " +
           std::to_string(tag) + ")" + (is_send ? " to " : " from ") +
           (peer == any_source ? "any rank" : "rank " + std::to_string(peer));
  }
};

class Request {
 public:
  explicit Request(Transfer transfer) : transfer_(std::move(transfer)) {}
  Request(const Request&) = delete;
  Request& operator=(const Request&) = delete;

  const Transfer& transfer() const { return transfer_; }

  // From here on: any thread, at any time.
  bool done() const { return done_.load(std::memory_order_acquire); }
  // Both once it is done.
  const Status& status() const { return status_; }
  int source() const { return source_; }
  // Runs `callback` when it is over, in the thread that finds out, or now.
  void on_done(std::function<void()> callback) {
    {
      const std::scoped_lock lock(mutex_);
      if (!told_) {
        callbacks_.push_back(std::move(callback));
        return;
      }
    }
    callback();
  }

  // For the mailbox. `finish` under its lock, and `tell` later without it.
  void finish(Status status, int source) {
    status_ = std::move(status);
    source_ = source;
    done_.store(true, std::memory_order_release);
  }
  void tell() {
    std::vector<std::function<void()>> callbacks;
    {
      const std::scoped_lock lock(mutex_);
      told_ = true;
      callbacks.swap(callbacks_);
    }
    for (const auto& callback : callbacks) callback();
  }

  // How far a send has come; guarded by the mailbox's lock.
  std::uint64_t sequence = 0;  // of its message, 0 before it has begun
  bool shown = false;          // whether the receiver can see the message's header
  std::size_t written = 0;
  std::uint64_t end = 0;  // position in the ring after its message

 private:
  const Transfer transfer_;
  std::atomic<bool> done_{false};
  Status status_;
  int source_ = any_source;
  std::mutex mutex_;  // guards what follows
  std::vector<std::function<void()>> callbacks_;
  bool told_ = false;
};

using RequestPtr = std::shared_ptr<Request>;

// Requests that came to their end; told so once the lock is free.
class Ended {
 public:
  void add(RequestPtr request, Status status, int source = any_source) {
    request->finish(std::move(status), source);
    requests_.push_back(std::move(request));
  }
  bool empty() const { return requests_.empty(); }
  std::vector<RequestPtr> take() { return std::exchange(requests_, {}); }

 private:
  std::vector<RequestPtr> requests_;
};

}  // namespace gradsync
