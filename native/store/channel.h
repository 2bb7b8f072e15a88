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
  Status open(DialOptions options, const Deadline& deadline, bool patient);
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
  // Holds the sending end, and remembers that this thread does.
  class Sending {
   public:
    explicit Sending(Channel& channel) : lock_(channel.send_mutex_), before_(current) {
      current = &channel;
    }
    ~Sending() { current = before_; }
    Sending(const Sending&) = delete;
    Sending& operator=(const Sending&) = delete;

    static thread_local const Channel* current;

   private:
    std::scoped_lock<std::mutex> lock_;
    const Channel* before_;
  };

  Status check_use() const;
  Status silent_status() const;
  Status begin(Call& call);
  Status send_frame(const char* bytes, std::size_t size, const Deadline& guard);
  Status send_unacknowledged(std::size_t start, const Deadline& guard);

  void lead(std::unique_lock<std::mutex>& lock, Call& call);
  void follow(std::unique_lock<std::mutex>& lock, Call& call);
  bool gives_up(std::unique_lock<std::mutex>& lock, Call& call, bool check_signals);
  bool receive(std::unique_lock<std::mutex>& lock, const Deadline& guard);
  bool deliver();
  void hand_over();
  void cancel(std::uint64_t seq);

  void recover(const Deadline& guard);
  Status reconnect(const Deadline& deadline);
  std::string unanswered();
  Status repeat(const std::string& frames, const Deadline& deadline);
  void fail_all(const Status& status, bool for_good);

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
  Status broken_;               // not ok: nothing will ever work again
  std::atomic<bool> is_broken_{false};
  std::atomic<std::uint64_t> acknowledged_{0};  // the highest number that was replied to

  Buffer input_;  // the reader's
  Reply unwanted_;
};

}  // namespace gradsync::store
