// One connection to the server, shared by all threads of a client, that survives being cut.
//
// Requests are numbered and sent under a lock; replies come in any order. Of the threads that wait
// for a reply, one reads the socket for all; when its own reply has come it hands the reading on.
// A thread alone therefore does one send and one receive. When the connection breaks, the reader
// connects again and repeats everything unanswered; the server does nothing twice.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "common/deadline.h"
#include "common/status.h"
#include "store/buffer.h"
#include "store/dial.h"
#include "store/wire.h"

namespace gradsync::store {

// One request under way; it belongs to the thread that waits for it.
struct Call {
  std::string frame;  // header and strings; the channel completes the header
  Reply reply;
  Deadline guard;  // when to give up on a server that does not answer
  Deadline limit;  // the user's own, which the server keeps

  // The channel's, under its lock.
  std::uint64_t seq = 0;
  bool done = false;
  Status failure;
  std::condition_variable wake;
};

class Channel {
 public:
  Status open(DialOptions options, const Deadline& deadline);
  ~Channel();

  // Sends the request and waits for its reply. Ok: `call.reply` is there, whatever it says.
  Status call(Call& call);

  // Sends a set, which the server does not answer. It is kept until a later reply shows that it
  // has arrived.
  Status post(std::string_view key, std::string_view value, const Deadline& guard);

  // Fault injection: cuts the connection, as a broken network would.
  void cut();

  const Address& address() const { return options_.address; }

 private:
  Status check_fork() const;
  Status begin(Call& call);
  Status send_frame(const char* bytes, std::size_t size, const Deadline& guard);
  Status send_unacknowledged(std::size_t start, const Deadline& guard);

  void lead(std::unique_lock<std::mutex>& lock, Call& call);
  void follow(std::unique_lock<std::mutex>& lock, Call& call);
  bool gives_up(std::unique_lock<std::mutex>& lock, Call& call, bool check_signals);
  bool receive(std::unique_lock<std::mutex>& lock);
  bool deliver();
  void hand_over();
  void cancel(std::uint64_t seq);

  void recover();
  Status reconnect();
  std::string unanswered();
  Status repeat(const std::string& frames);
  void fail_all(const Status& status);

  DialOptions options_;
  Id instance_{};
  std::uint64_t generation_ = 0;

  // Held to send and to reconnect; taken before mutex_.
  std::mutex send_mutex_;
  Socket socket_;
  std::uint64_t last_seq_ = 0;
  std::string unacknowledged_;  // sets, as sent
  std::uint64_t last_set_seq_ = 0;

  std::mutex mutex_;
  std::vector<Call*> pending_;  // by sequence number
  bool reading_ = false;        // a thread has the socket's reading end
  std::uint64_t received_ = 0;  // counted replies
  Status broken_;               // not ok: the server has gone for good
  std::atomic<bool> is_broken_{false};
  std::atomic<std::uint64_t> acknowledged_{0};  // the highest number that was replied to

  Buffer input_;  // the reader's
  Reply unwanted_;
};

}  // namespace gradsync::store
