// Asynchronous calls: order, help by waiters, callbacks, many threads, and destruction in flight.
#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "session/session.h"
#include "tests/check.h"
#include "tests/ranks.h"

using namespace gradsync;
using namespace gradsync::testing;

namespace {

std::byte* bytes(std::vector<float>& values) { return reinterpret_cast<std::byte*>(values.data()); }

Queue::Call all_reduce(Session& session, std::vector<float>& values) {
  return [&] {
    return session.all_reduce(bytes(values), values.size(), Dtype::f32, Reduce::sum,
                              Deadline::after(30));
  };
}

}  // namespace

TEST(many_in_flight_keep_their_order) {
  run_threads(3, [](Session& session) {
    constexpr std::size_t calls = 50;
    std::vector<std::vector<float>> values(calls);
    std::vector<std::shared_ptr<Ticket>> tickets;
    for (std::size_t i = 0; i < calls; ++i) {
      // Sizes differ, so that calls in another order would be a mismatch.
      values[i].assign(1 + i * 300, static_cast<float>(session.rank() + 1));
      tickets.push_back(session.post(all_reduce(session, values[i])));
    }
    CHECK_OK(session.barrier(Deadline::after(30)));  // comes after all of them
    for (std::size_t i = 0; i < calls; ++i) {
      CHECK(tickets[i]->done());
      CHECK_OK(tickets[i]->status());
      for (const float value : values[i]) CHECK(value == 6.0F);
    }
  });
}

TEST(waiting_and_callbacks) {
  run_threads(2, [](Session& session) {
    std::atomic<int> called{0};
    for (int round = 0; round < 200; ++round) {
      std::vector<float> values(100, 1.0F);
      const auto ticket = session.post(all_reduce(session, values));
      ticket->on_done([&] { called.fetch_add(1); });
      if (round % 3 == 0) {
        const Status status = session.wait(*ticket, Deadline::after(20));  // cannot help
        CHECK_OK(status);
      } else {
        CHECK_OK(session.wait(*ticket, Deadline::never()));
      }
      CHECK_OK(ticket->status());
      CHECK(values[99] == 2.0F);
    }
    session.close(Deadline::after(5));
    CHECK(called.load() == 200);
  });
}

TEST(calls_that_nobody_waits_for_are_carried_out) {
  Queue queue;
  queue.set_share_of_cores(1);
  std::atomic<int> done{0};
  const auto call = [&] {
    done.fetch_add(1);
    return Status::success();
  };
  const Deadline deadline = Deadline::after(30);
  // While this thread computes, and so the worker stands back for a while.
  queue.post(call);
  while (done.load() < 1 && !deadline.expired()) {
  }
  CHECK(done.load() == 1);
  // At once when somebody asks, whatever the cores do.
  for (int n = 2; n < 100; ++n) {
    queue.post(call);
    while (done.load() < n && !deadline.expired()) queue.hurry();
    CHECK(done.load() == n);
  }
  // And when the cores are free.
  queue.post(call);
  while (done.load() < 100 && !deadline.expired()) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  CHECK(done.load() == 100);
}

TEST(threads_share_a_session) {
  run_threads(2, [](Session& session) {
    std::vector<std::thread> threads;
    std::atomic<int> total{0};
    for (int t = 0; t < 3; ++t) {
      threads.emplace_back([&] {
        for (int i = 0; i < 30; ++i) {
          std::vector<float> values(64, 1.0F);
          const auto ticket = session.post(all_reduce(session, values));
          std::vector<float> more(64, 2.0F);
          CHECK_OK(all_reduce(session, more)());
          CHECK_OK(session.wait(*ticket, Deadline::never()));
          CHECK_OK(ticket->status());
          total.fetch_add(static_cast<int>(values[0] + more[0]));
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    // Which call meets which of the other rank is open, but every number is added exactly once.
    CHECK(total.load() == 3 * 30 * 2 * (1 + 2));
  });
}

TEST(impatience_leaves_the_call_alone) {
  run_threads(2, [](Session& session) {
    std::vector<float> values(10, 1.0F);
    if (session.rank() == 1) ::usleep(100'000);
    const auto ticket = session.post(all_reduce(session, values));
    if (session.rank() == 0) {
      CHECK(session.wait(*ticket, Deadline::after(0.01)).code == Code::timeout);
    }
    CHECK_OK(session.wait(*ticket, Deadline::never()));
    CHECK_OK(ticket->status());
    CHECK(values[0] == 2.0F);
  });
}

TEST(closing_ends_calls_in_flight) {
  run_threads(2, [](Session& session) {
    if (session.rank() == 1) {
      CHECK_OK(session.barrier(Deadline::after(10)));
      ::usleep(150'000);  // stays, but never comes to the calls
      return;
    }
    CHECK_OK(session.barrier(Deadline::after(10)));
    std::vector<float> first(10), second(10);
    const auto running = session.post(all_reduce(session, first));
    const auto waiting = session.post(all_reduce(session, second));
    session.close(Deadline::after(0.02));
    CHECK(running->done() && running->status().code == Code::aborted);
    CHECK(waiting->done() && waiting->status().code == Code::aborted);
  });
}

TEST(closing_gives_a_call_in_another_thread_its_time) {
  run_threads(2, [](Session& session) {
    std::atomic<bool> inside{false};
    std::thread caller([&] {
      inside.store(true);
      if (session.rank() == 1) ::usleep(150'000);  // late, but not too late
      CHECK_OK(session.barrier(Deadline::after(30)));
    });
    if (session.rank() == 1) caller.join();
    while (!inside.load()) std::this_thread::yield();
    ::usleep(50'000);
    session.close(Deadline::after(10));
    if (session.rank() == 0) caller.join();
    const auto refused = session.post([] { return Status::success(); });
    CHECK(refused->done() && refused->status().code == Code::aborted);
  });
}

TEST(nothing_is_carried_out_any_more_once_a_queue_is_closed) {
  Queue queue;
  std::atomic<bool> inside{false}, is_over{false};
  std::thread caller([&] {
    CHECK_OK(queue.run(Deadline::never(), [&] {
      inside.store(true);
      ::usleep(50'000);
      is_over.store(true);
      return Status::success();
    }));
  });
  while (!inside.load()) std::this_thread::yield();
  queue.close();
  CHECK(is_over.load());
  caller.join();
}

TEST(who_is_inside_a_call_may_close_but_not_make_another) {
  Queue queue;
  const auto nothing = [] { return Status::success(); };
  CHECK_OK(queue.run(Deadline::never(), [&] {  // what follows stands for a signal handler
    const auto next = queue.post(nothing);
    ::usleep(20'000);  // until the worker waits for the turn
    CHECK(queue.run(Deadline::never(), nothing).code == Code::invalid);
    queue.drain(Deadline::never());
    queue.close();
    CHECK(next->done() && next->status().code == Code::aborted);
    return Status::success();
  }));
}

TEST(call_that_is_destroyed_in_flight_is_told_to_those_who_are_in_it) {
  std::atomic<bool> told{false};
  run_threads(3, [&](Session& session) {
    std::vector<float> values(10, 1.0F);
    if (session.rank() == 2) {  // never comes
      const Deadline deadline = Deadline::after(20);
      while (!told.load() && !deadline.expired()) ::usleep(1000);
    } else if (session.rank() == 1) {
      const Status status = all_reduce(session, values)();
      CHECK(status.code == Code::aborted && status.ranks == std::vector<int>{0});
      CHECK(status.message.find("destroyed the group while its call #1") != std::string::npos);
      told.store(true);
    } else {
      std::thread caller([&] { CHECK(all_reduce(session, values)().code == Code::aborted); });
      while (session.report()[0].last.sequence == 0) ::usleep(1000);
      session.close(Deadline::after(0));
      caller.join();
    }
  });
}

TEST(forked_child_may_drop_a_session_whose_worker_sleeps) {
  run_threads(1, [](Session& session) {
    const auto ticket = session.post([] { return Status::success(); });
    CHECK_OK(session.wait(*ticket, Deadline::after(10)));
    ::usleep(20'000);  // until the worker has gone to sleep
    const pid_t child = ::fork();
    if (child == 0) {
      session.~Session();
      ::_exit(0);
    }
    CHECK(exit_status(child, 10) == 0);
  });
}

TEST(queue_that_is_closed_at_any_moment_carries_out_what_was_begun) {
  for (int round = 0; round < 2000; ++round) {
    Queue queue;
    std::atomic<int> begun{0};
    std::vector<std::shared_ptr<Ticket>> tickets;
    for (int i = 0; i < 3; ++i) {
      tickets.push_back(queue.post([&] {
        ++begun;
        return Status::success();
      }));
    }
    std::thread waiter([&] { (void)queue.wait(*tickets.back(), Deadline::after(30)); });
    for (int i = 0; i < round % 50; ++i) std::this_thread::yield();
    queue.close();
    waiter.join();
    int ok = 0;
    for (const auto& ticket : tickets) {
      CHECK(ticket->done());
      ok += ticket->status().ok() ? 1 : 0;
    }
    CHECK(ok == begun);
  }
}

TEST(callbacks_may_wait_and_close_or_destroy_their_queue) {
  for (const bool destroys : {false, true}) {
    auto queue = std::make_unique<Queue>();
    std::atomic<bool> may_go{false}, is_over{false};
    const auto ticket = queue->post([&] {
      while (!may_go.load()) std::this_thread::yield();
      return Status::success();
    });
    // In the worker, because nobody waits for the call.
    ticket->on_done([&] {
      const auto next = queue->post([] { return Status::success(); });
      CHECK_OK(queue->wait(*next, Deadline::after(30)));
      CHECK(next->done());
      if (destroys) {
        queue.reset();
      } else {
        queue->drain(Deadline::after(30));
        queue->close();
      }
      is_over.store(true);
    });
    may_go.store(true);
    while (!is_over.load()) std::this_thread::yield();
  }
}
