// Threads that are lent: each does one thing after another, and rests in between.
//
// A new thread takes 50 us to start and as long again until it does something, a good part of what
// forming a world takes; one that rests is woken in 5. A world needs one or two, and programs that
// form one after the other are not rare: tests, notebooks, jobs that go on with fewer ranks.
#pragma once

#include <functional>
#include <memory>

namespace gradsync {

class LentThread {
 public:
  // Begins at once, with all signals blocked; throws std::system_error where there is no thread.
  explicit LentThread(std::function<void()> work);
  // Once wait() has returned, in the thread itself, or in a forked child, which does not have it.
  ~LentThread() = default;
  LentThread(const LentThread&) = delete;
  LentThread& operator=(const LentThread&) = delete;

  // Until the work is over; everything that it held is gone then. Not in the thread itself.
  void wait();
  // Whether the caller is what the thread does.
  bool is_current() const;

 private:
  struct Job;
  struct Desk;
  class Pool;
  static void rest(const std::shared_ptr<Desk>& desk);

  std::shared_ptr<Job> job_;
};

}  // namespace gradsync
