// What a wait knows beyond arrival: slow is not late, long waits are told, failures name lines.
#include <chrono>

#include "common/site.h"
#include "tests/mail.h"

using namespace gradsync;
using namespace gradsync::testing;

namespace {

struct NamedSite : Site {
  std::string text() const override { return "line of rank " + std::to_string(rank); }
  int rank = 0;
};

std::atomic<int> told{0};
std::atomic<int> told_by{-1};

}  // namespace

TEST(deadline_counts_anew_from_a_later_start) {
  const Deadline once = Deadline::after(10);
  const Deadline later = once.counted_from(once.start() + std::chrono::seconds(5));
  CHECK(later.remaining_ns() > 14'000'000'000);
  CHECK(once.counted_from(once.start() - std::chrono::seconds(5)).remaining_ns() <= 10'000'000'000);
  CHECK(!Deadline::never().counted_from(once.start() + std::chrono::seconds(5)).expired());
}

TEST(peer_that_goes_on_slowly_is_not_late) {
  Teams teams(2);
  Team& waiting = teams[0];
  Team& slow = teams[1];
  std::thread other([&] {
    CHECK_OK(slow.enter(Deadline::after(30)));
    for (int step = 2; step <= 7; ++step) {
      ::usleep(150'000);
      slow.publish(static_cast<std::uint64_t>(step));
    }
    ::usleep(1'200'000);
    slow.publish(8);
  });
  CHECK_OK(waiting.enter(Deadline::after(30)));
  // 0.9 s in steps of 0.15 s, under a limit of 0.6 s.
  CHECK_OK(waiting.wait_for(1, 7, Deadline::after(0.6)));
  // One that stands still is late after the limit, counted from its last step.
  const Status status = waiting.wait_for(1, 8, Deadline::after(0.6));
  CHECK(status.code == Code::timeout);
  CHECK(status.ranks == std::vector<int>{1});
  other.join();
}

TEST(mismatch_knows_every_line) {
  run_threads(3, [](Session& session) {
    NamedSite site;
    site.rank = session.rank();
    const AskedAt here(&site);
    float value = 1;
    const Status status = session.rank() == 1
                              ? session.barrier(Deadline::after(30))
                              : session.all_reduce(reinterpret_cast<std::byte*>(&value), 1,
                                                   Dtype::f32, Reduce::sum, Deadline::after(30));
    CHECK(status.code == Code::mismatch);
    const std::vector<RankReport> found = session.findings();
    for (int rank = 0; rank < 3; ++rank) {
      CHECK(found[static_cast<std::size_t>(rank)].site == "line of rank " + std::to_string(rank));
    }
  });
}

TEST(missing_rank_tells_where_it_stands) {
  std::atomic<bool> over{false};
  run_threads(2, [&](Session& session) {
    if (session.rank() == 0) {
      ::usleep(50'000);  // its listener is there
      CHECK(session.barrier(Deadline::after(0.05)).code == Code::timeout);
      CHECK(session.findings()[1].standing == "in a loop");
      over = true;
      return;
    }
    std::thread listener([&] {
      while (const std::uint32_t question = session.next_question()) {
        session.answer(question, "in a loop");
      }
    });
    while (!over.load()) ::usleep(1000);
    session.stop_answering();
    listener.join();
  });
}

TEST(long_wait_is_told_once_by_the_first_who_waits) {
  late_after_ns = 50'000'000;
  late_hook = [](const LongWait& wait) {
    told.fetch_add(1);
    told_by = wait.rank;
    CHECK(wait.missing == std::vector<int>{1});
  };
  run_threads(3, [](Session& session) {
    if (session.rank() == 1) ::usleep(400'000);
    CHECK_OK(session.barrier(Deadline::after(30)));
  });
  late_hook = nullptr;
  CHECK(told.load() == 1);
  CHECK(told_by.load() == 0);
}

TEST(long_wait_for_a_message_is_told_once_with_its_line) {
  static std::string said;
  told = 0;
  late_after_ns = 50'000'000;
  late_hook = [](const LongWait& wait) {
    told.fetch_add(1);
    said = wait.message + " at " + wait.site;
  };
  run_threads(2, [](Session& session) {
    Floats values(10);
    if (session.rank() == 1) {
      ::usleep(400'000);
      CHECK_OK(send(session, 0, 3, values));
      return;
    }
    Transfer wanted = transfer(false, 1, 3, values);
    wanted.site = std::make_shared<NamedSite>();  // whoever waits, this line asked for it
    RequestPtr request;
    CHECK_OK(session.mail().post(wanted, request));
    CHECK_OK(finish(session, request));
  });
  late_hook = nullptr;
  CHECK(told.load() == 1);
  CHECK(said == "recv(float32[10], 40 bytes; tag 3) from rank 1 at line of rank 0");
}

TEST(stopped_process_is_said_to_be_stopped) {
  const auto pids = fork_ranks(2, [](Session& session) {
    if (session.rank() == 1) {
      ::raise(SIGSTOP);
      return 0;
    }
    const Status status = session.barrier(Deadline::after(0.3));
    const std::string standing = session.findings()[1].standing;
    return status.code == Code::timeout && standing.find("stopped by a signal") != standing.npos
               ? 0
               : 1;
  });
  CHECK(exit_status(pids[0], 20) == 0);
  ::kill(pids[1], SIGCONT);
  CHECK(exit_status(pids[1], 20) == 0);
}

TEST(text_cell_never_shows_a_mixture) {
  TextCell<64> cell;
  std::atomic<bool> over{false};
  std::thread writer([&] {
    for (std::uint64_t i = 1; i <= 20'000; ++i) cell.store(i, std::string(40, 'a' + char(i % 26)));
    over = true;
  });
  while (!over.load()) {
    const std::uint64_t about = cell.about();
    const std::string text = cell.load(about);
    if (!text.empty()) CHECK(text == std::string(40, 'a' + char(about % 26)));
  }
  writer.join();
  cell.store(50'000, std::string(200, 'x') + "é");
  CHECK(cell.load(50'000).size() == 63);
  CHECK(cell.load(50'001).empty());
}
