// Messages: order, tags, any source, large and empty ones, and what does not fit.
#include <atomic>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "tests/check.h"
#include "tests/mail.h"

using namespace gradsync;
using namespace gradsync::testing;

TEST(sizes_from_nothing_to_many_rings) {
  run_threads(2, [](Session& session) {
    for (const std::size_t count : {0, 1, 7, 8, 1000, 16376, 16384, 16385, 300'000}) {
      if (session.rank() == 0) {
        CHECK_OK(send(session, 1, 5, pattern(count, 3)));
      } else {
        Floats values(count, -1);
        int source = -1;
        CHECK_OK(receive(session, 0, 5, values, &source));
        CHECK(source == 0);
        CHECK(values == pattern(count, 3));
      }
    }
  });
}

TEST(tags_in_any_order_and_fifo_within_one) {
  run_threads(2, [](Session& session) {
    constexpr int tags = 40;
    constexpr std::size_t count = 5000;  // all together many times the ring
    if (session.rank() == 0) {
      for (int tag = 0; tag < tags; ++tag) {
        CHECK_OK(send(session, 1, tag, pattern(count, static_cast<float>(tag))));
        CHECK_OK(send(session, 1, tag, pattern(3, static_cast<float>(tag))));
      }
      return;
    }
    for (int tag = tags - 1; tag >= 0; --tag) {
      Floats large(count), small(3);
      CHECK_OK(receive(session, 0, tag, large));
      CHECK_OK(receive(session, 0, tag, small));
      CHECK(large == pattern(count, static_cast<float>(tag)));
      CHECK(small == pattern(3, static_cast<float>(tag)));
    }
  });
}

TEST(both_send_before_they_receive) {
  run_threads(2, [](Session& session) {
    for (int round = 0; round < 5; ++round) {
      Floats values(200'000);
      CHECK_OK(send(session, 1 - session.rank(), 0, pattern(values.size(), 1)));
      CHECK_OK(receive(session, 1 - session.rank(), 0, values));
      CHECK(values == pattern(values.size(), 1));
    }
  });
}

TEST(any_source_gets_one_of_each) {
  run_threads(4, [](Session& session) {
    for (int round = 0; round < 50; ++round) {
      if (session.rank() != 0) {
        CHECK_OK(send(session, 0, 1, pattern(100, static_cast<float>(session.rank()))));
        CHECK_OK(session.barrier(Deadline::after(30)));
        continue;
      }
      std::map<int, int> seen;
      for (int i = 0; i < 3; ++i) {
        Floats values(100);
        int source = -1;
        CHECK_OK(receive(session, any_source, 1, values, &source));
        CHECK(values == pattern(100, static_cast<float>(source)));
        ++seen[source];
      }
      CHECK(seen.size() == 3);
      CHECK_OK(session.barrier(Deadline::after(30)));
    }
  });
}

TEST(a_rank_sends_to_itself) {
  run_threads(1, [](Session& session) {
    Floats sent = pattern(50'000, 2), got(50'000), late(50'000);
    const RequestPtr first = post(session, false, 0, 1, got);
    CHECK_OK(finish(session, post(session, true, 0, 1, sent)));
    CHECK_OK(finish(session, first));
    CHECK_OK(finish(session, post(session, true, 0, 2, sent)));
    CHECK_OK(receive(session, any_source, 2, late));
    CHECK(got == sent && late == sent);
  });
}

TEST(requests_move_while_nobody_waits) {
  run_threads(2, [](Session& session) {
    Floats sent = pattern(400'000, 1), got(400'000);
    const int peer = 1 - session.rank();
    std::atomic<int> called{0};
    const RequestPtr in = post(session, false, peer, 0, got);
    const RequestPtr out = post(session, true, peer, 0, sent);
    in->on_done([&] { called.fetch_add(1); });
    out->on_done([&] { called.fetch_add(1); });
    while (called.load() < 2) ::usleep(1000);  // the workers do it all
    CHECK(in->done() && out->done());
    CHECK_OK(in->status());
    CHECK(got == sent);
    in->on_done([&] { called.fetch_add(1); });
    CHECK(called.load() == 3);
  });
}

TEST(many_threads_of_each_rank) {
  run_threads(2, [](Session& session) {
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&, t] {
        for (int i = 0; i < 50; ++i) {
          const std::size_t count = static_cast<std::size_t>((i * 37) % 3000);
          Floats got(count);
          if (session.rank() == 0) {
            CHECK_OK(send(session, 1, t, pattern(count, static_cast<float>(i))));
            CHECK_OK(receive(session, 1, 100 + t, got));
          } else {
            CHECK_OK(receive(session, 0, t, got));
            CHECK_OK(send(session, 0, 100 + t, got));
          }
          CHECK(got == pattern(count, static_cast<float>(i)));
        }
      });
    }
    // Collectives go on beside them.
    for (int i = 0; i < 50; ++i) CHECK_OK(session.barrier(Deadline::after(30)));
    for (std::thread& thread : threads) thread.join();
  });
}

TEST(small_messages_go_at_once_and_overtake_nobody) {
  run_threads(2, [](Session& session) {
    const auto meet = [&] { CHECK_OK(session.barrier(Deadline::after(30))); };
    const auto now = [&](bool is_send, int tag, Floats& values) {
      int source = -1;
      return session.mail().run_now(transfer(is_send, 1 - session.rank(), tag, values), source) &&
             source == 1 - session.rank();
    };
    Floats one = pattern(4, 1), two = pattern(4, 2), large = pattern(4096, 3), values(4), other(4);
    if (session.rank() == 0) {
      CHECK_OK(send(session, 1, 0, one));  // the first one gets the ring's memory
      // Unless it is time to look whether the receiver is still there.
      if (!now(true, 0, two)) CHECK_OK(send(session, 1, 0, two));
      CHECK(!now(true, 0, large));
      meet();
      meet();
      for (Floats* next : {&one, &two}) CHECK_OK(send(session, 1, 0, *next));
      meet();
      CHECK_OK(send(session, 1, 8, one));
      CHECK_OK(send(session, 1, 9, two));
      meet();
      return;
    }
    meet();
    CHECK(!now(false, 1, values));  // another tag
    for (const Floats& expected : {one, two}) {
      CHECK(now(false, 0, values));
      CHECK(values == expected);
    }
    CHECK(!now(false, 0, values));  // there is no more
    const RequestPtr before = post(session, false, 0, 0, other);
    meet();
    meet();
    CHECK_OK(receive(session, 0, 0, values));  // after the other's turn
    CHECK_OK(finish(session, before));
    CHECK(other == one && values == two);
    meet();
    CHECK_OK(receive(session, 0, 9, values));  // puts the one with tag 8 aside
    CHECK(!now(false, 8, values));
    CHECK_OK(receive(session, 0, 8, values));
    CHECK(values == one);
  });
}

TEST(what_does_not_fit_is_refused_on_both_sides) {
  for (const std::size_t count : {std::size_t{10}, std::size_t{500'000}}) {
    run_threads(2, [count](Session& session) {
      if (session.rank() == 0) {
        const Status status = send(session, 1, 3, pattern(count, 1));
        // A small one is over before anybody sees it, and its error comes with the next call.
        const Status next = status.ok() ? [&] {
          CHECK_OK(session.barrier(Deadline::after(30)));
          return send(session, 1, 3, pattern(count, 1));
        }()
                                        : [&] {
                                            CHECK_OK(session.barrier(Deadline::after(30)));
                                            return status;
                                          }();
        CHECK(next.code == Code::mismatch);
        CHECK(next.message.find("float32[" + std::to_string(count) + "]") != std::string::npos);
        CHECK(next.message.find("float32[11]") != std::string::npos);
        CHECK_OK(send(session, 1, 3, pattern(count, 7)));
        return;
      }
      Floats values(11, -1);
      const Status status = receive(session, 0, 3, values);
      CHECK(status.code == Code::mismatch && status.ranks == std::vector<int>{0});
      CHECK(status.message.find("float32[11]") != std::string::npos);
      for (const float value : values) CHECK(value == -1);
      CHECK_OK(session.barrier(Deadline::after(30)));
      Floats good(count);
      CHECK_OK(receive(session, 0, 3, good));  // and the pair goes on
      CHECK(good == pattern(count, 7));
    });
  }
}

TEST(refusals_are_told_one_by_one) {
  run_threads(2, [](Session& session) {
    constexpr int rounds = 5;
    if (session.rank() == 0) {
      Floats values(100);
      for (int i = 0; i < rounds; ++i) CHECK_OK(send(session, 1, i, values));
      CHECK_OK(session.barrier(Deadline::after(30)));  // all are sent
      CHECK_OK(session.barrier(Deadline::after(30)));  // all are refused
      int refused = 0;
      while (refused < rounds) {
        const Status status = send(session, 1, 99, Floats(1));
        if (status.code == Code::mismatch) ++refused;
        ::usleep(200);
      }
      CHECK_OK(send(session, 1, 100, Floats(1)));
      return;
    }
    Floats wrong(3), last(1);
    CHECK_OK(session.barrier(Deadline::after(30)));
    for (int i = 0; i < rounds; ++i) {
      CHECK(receive(session, 0, i, wrong).code == Code::mismatch);
    }
    CHECK_OK(session.barrier(Deadline::after(30)));
    CHECK_OK(receive(session, 0, 100, last));
  });
}

TEST(nobody_comes_before_the_deadline) {
  run_threads(2, [](Session& session) {
    if (session.rank() == 1) {
      CHECK_OK(send(session, 0, 8, Floats(2)));
      CHECK_OK(session.barrier(Deadline::after(30)));
      Floats values(300'000), other(5);
      const Status status = receive(session, 0, 1, values);
      CHECK(status.code == Code::aborted && status.ranks == std::vector<int>{0});
      CHECK_OK(receive(session, 0, 2, other));
      CHECK(other == pattern(5, 5));
      return;
    }
    Floats values(10);
    Status status;
    const double took = seconds_of([&] { status = receive(session, 1, 3, values, nullptr, 0.1); });
    CHECK(status.code == Code::timeout && status.ranks == std::vector<int>{1});
    CHECK(status.message.find("tags 8") != std::string::npos);
    CHECK(took > 0.09 && took < 5);
    // More than the ring holds, and nobody takes it: the rest never comes.
    status = send(session, 1, 1, pattern(300'000, 1), 0.1);
    CHECK(status.code == Code::timeout && status.ranks == std::vector<int>{1});
    CHECK_OK(session.barrier(Deadline::after(30)));
    CHECK_OK(send(session, 1, 2, pattern(5, 5)));
    CHECK_OK(receive(session, 1, 8, values = Floats(2)));
  });
}

TEST(impatience_leaves_a_request_alone) {
  run_threads(2, [](Session& session) {
    Floats values(10);
    if (session.rank() == 0) {
      const RequestPtr request = post(session, false, 1, 0, values);
      CHECK(session.mail().wait(*request, Deadline::after(0.02)).code == Code::timeout);
      CHECK(!request->done());
      CHECK_OK(session.barrier(Deadline::after(30)));
      CHECK_OK(finish(session, request));
      CHECK(values == pattern(10, 1));
    } else {
      CHECK_OK(session.barrier(Deadline::after(30)));
      CHECK_OK(send(session, 0, 0, pattern(10, 1)));
    }
  });
}

TEST(mistakes_are_named) {
  run_threads(2, [](Session& session) {
    Floats values(1);
    CHECK(send(session, 2, 0, values).code == Code::invalid);
    CHECK(send(session, -1, 0, values).code == Code::invalid);
    CHECK(send(session, 1 - session.rank(), -1, values).code == Code::invalid);
    CHECK(receive(session, -2, 0, values).code == Code::invalid);
  });
}

TEST(closing_ends_requests_and_flushes_sends) {
  run_threads(2, [](Session& session) {
    if (session.rank() == 0) {
      Floats values(5), large = pattern(200'000, 4);
      const RequestPtr in = post(session, false, 1, 0, values);
      const RequestPtr out = post(session, true, 1, 1, large);
      session.close(Deadline::after(10));
      CHECK(in->done() && in->status().code == Code::aborted);
      CHECK(out->done());
      CHECK_OK(out->status());
      CHECK(send(session, 1, 0, values).code == Code::aborted);
      return;
    }
    ::usleep(30'000);
    Floats large(200'000), more(1);
    CHECK_OK(receive(session, 0, 1, large));
    CHECK(large == pattern(200'000, 4));
    // It left in peace: what it sent is good, more does not come.
    CHECK(receive(session, 0, 0, more).code == Code::peer_lost);
    CHECK(receive(session, any_source, 0, more).code == Code::peer_lost);
    CHECK(send(session, 0, 0, more).code == Code::peer_lost);
  });
}

TEST(several_threads_may_close_together) {
  for (int round = 0; round < 20; ++round) {
    run_threads(2, [](Session& session) {
      Floats values(5);
      const RequestPtr in = post(session, false, 1 - session.rank(), 0, values);  // for the worker
      in->on_done([&] { session.close(Deadline::after(0)); });
      std::vector<std::thread> threads;
      for (int i = 0; i < 3; ++i) {
        threads.emplace_back([&] { session.close(Deadline::after(0)); });
      }
      for (std::thread& thread : threads) thread.join();
      CHECK(in->done());
    });
  }
}
