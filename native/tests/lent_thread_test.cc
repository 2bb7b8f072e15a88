#include "common/lent_thread.h"

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <set>
#include <thread>
#include <vector>

#include "tests/check.h"

using namespace gradsync;

namespace {

std::thread::id run_one() {
  std::thread::id where;
  LentThread lent([&where] { where = std::this_thread::get_id(); });
  lent.wait();
  return where;
}

// A thread says that its work is over shortly before it rests.
void let_rest() { std::this_thread::sleep_for(std::chrono::milliseconds(20)); }

}  // namespace

TEST(one_thread_does_one_thing_after_another) {
  std::set<std::thread::id> threads;
  for (int i = 0; i < 5; ++i) {
    threads.insert(run_one());
    let_rest();
  }
  CHECK(threads.size() == 1);
  CHECK(threads.count(std::this_thread::get_id()) == 0);
}

TEST(what_the_work_holds_is_gone_when_it_is_over) {
  const auto held = std::make_shared<int>(0);
  LentThread lent([held] {});
  lent.wait();
  CHECK(held.use_count() == 1);
}

TEST(work_knows_that_it_is_its_own_thread) {
  std::atomic<LentThread*> self{nullptr};
  std::atomic<bool> inside{false};
  LentThread lent([&] {
    while (self.load() == nullptr) std::this_thread::yield();
    inside = self.load()->is_current();
  });
  CHECK(!lent.is_current());
  self = &lent;
  lent.wait();
  CHECK(inside.load());
  CHECK(!lent.is_current());
}

TEST(as_many_as_are_asked_for_run_at_a_time) {
  constexpr int count = 6;
  std::atomic<int> begun{0};
  std::vector<std::unique_ptr<LentThread>> lent;
  for (int i = 0; i < count; ++i) {
    lent.push_back(std::make_unique<LentThread>([&begun] {
      ++begun;
      while (begun.load() < count) std::this_thread::yield();
    }));
  }
  for (const auto& one : lent) one->wait();
  CHECK(begun.load() == count);
}

TEST(a_handle_may_go_while_the_work_goes_on) {
  std::atomic<bool> go{false}, done{false};
  {
    const LentThread lent([&] {
      while (!go.load()) std::this_thread::yield();
      done = true;
    });
  }
  go = true;
  while (!done.load()) std::this_thread::yield();
  CHECK(done.load());
}

#if !defined(__SANITIZE_THREAD__)  // which does not know threads in a child of a threaded process
TEST(a_forked_child_has_threads_of_its_own) {
  (void)run_one();
  let_rest();  // the parent has one now, which the child does not
  const pid_t child = ::fork();
  if (child == 0) {
    (void)run_one();
    ::_exit(0);
  }
  int status = -1;
  for (int i = 0; i < 500 && ::waitpid(child, &status, WNOHANG) == 0; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}
#endif
