#include "common/lent_thread.h"

#include <pthread.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "common/background.h"
#include "common/fork.h"

namespace gradsync {

struct LentThread::Job {
  std::function<void()> work;
  std::mutex mutex;
  std::condition_variable over;
  bool is_over = false;
  std::thread::id thread;  // under the mutex

  void run() {
    {
      const std::scoped_lock lock(mutex);
      thread = std::this_thread::get_id();
    }
    work();
    work = nullptr;  // and what it holds, before anybody is told
    const std::scoped_lock lock(mutex);
    thread = {};
    is_over = true;
    over.notify_all();
  }
};

// Where a thread that rests is given its next job.
struct LentThread::Desk {
  std::mutex mutex;
  std::condition_variable given;
  std::shared_ptr<Job> job;
};

// The threads that rest. Never destroyed: they rest until the process ends.
class LentThread::Pool {
 public:
  // A forked child has a pool of its own: of its parent's it has neither the threads nor,
  // perhaps, the lock.
  static Pool& here() {
    static std::atomic<Pool*> current{nullptr};
    Pool* pool = current.load(std::memory_order_acquire);
    while (pool == nullptr || pool->generation_ != fork_generation()) {
      auto fresh = std::make_unique<Pool>();
      if (current.compare_exchange_strong(pool, fresh.get(), std::memory_order_acq_rel)) {
        pool = fresh.release();
      }
    }
    return *pool;
  }

  std::shared_ptr<Desk> take() {
    const std::scoped_lock lock(mutex_);
    if (resting_.empty()) return nullptr;
    auto desk = std::move(resting_.back());
    resting_.pop_back();
    return desk;
  }
  // False: there are enough, and the thread may end.
  bool put(const std::shared_ptr<Desk>& desk) {
    const std::scoped_lock lock(mutex_);
    if (resting_.size() >= most) return false;
    resting_.push_back(desk);
    return true;
  }

 private:
  static constexpr std::size_t most = 2;  // what rank 0 of one world needs
  std::uint64_t generation_ = fork_generation();
  std::mutex mutex_;
  std::vector<std::shared_ptr<Desk>> resting_;
};

void LentThread::rest(const std::shared_ptr<Desk>& desk) {
  (void)pthread_setname_np(pthread_self(), "gradsync");  // for top and debuggers
  while (true) {
    std::shared_ptr<Job> job;
    {
      std::unique_lock lock(desk->mutex);
      desk->given.wait(lock, [&] { return desk->job != nullptr; });
      job = std::move(desk->job);
    }
    job->run();
    job.reset();
    if (!Pool::here().put(desk)) return;
  }
}

LentThread::LentThread(std::function<void()> work) : job_(std::make_shared<Job>()) {
  job_->work = std::move(work);
  auto desk = Pool::here().take();
  if (desk == nullptr) {
    desk = std::make_shared<Desk>();
    desk->job = job_;
    start_background([desk] { rest(desk); })->detach();
    return;
  }
  const std::scoped_lock lock(desk->mutex);
  desk->job = job_;
  desk->given.notify_one();
}

void LentThread::wait() {
  std::unique_lock lock(job_->mutex);
  job_->over.wait(lock, [this] { return job_->is_over; });
}

bool LentThread::is_current() const {
  const std::scoped_lock lock(job_->mutex);
  return job_->thread == std::this_thread::get_id();
}

}  // namespace gradsync
