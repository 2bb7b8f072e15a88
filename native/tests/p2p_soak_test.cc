// Messages at random, and what becomes of them when a rank dies or forks.
#include <algorithm>
#include <map>
#include <random>
#include <utility>
#include <vector>

#include "tests/check.h"
#include "tests/mail.h"

using namespace gradsync;
using namespace gradsync::testing;

// Every rank knows from the seed what everybody sends; it posts its receives in an order of its
// own.
int soak(Session& session, unsigned seed, int rounds) {
  const int size = session.size(), rank = session.rank();
  std::mt19937 common(seed);
  for (int round = 0; round < rounds; ++round) {
    struct Plan {
      int from, to, tag;
      std::size_t count;
      float value;
      bool any;
    };
    std::vector<Plan> plans;
    const int messages = 5 + static_cast<int>(common() % 40);
    for (int i = 0; i < messages; ++i) {
      Plan plan{static_cast<int>(common() % static_cast<unsigned>(size)), 0, 0, 0, 0, false};
      plan.to = static_cast<int>(common() % static_cast<unsigned>(size));
      plan.any = common() % 4 == 0;
      // Receives from any rank have a tag of their own each, so that the model knows what comes.
      plan.tag = plan.any ? 1000 * (round + 1) + i : static_cast<int>(common() % 5);
      plan.count = common() % 5 == 0 ? common() % 60'000 : common() % 200;
      plan.value = static_cast<float>(common() % 1000);
      plans.push_back(plan);
    }
    std::vector<Floats> sent(plans.size()), got(plans.size());
    std::vector<std::pair<std::size_t, RequestPtr>> requests;
    std::vector<std::size_t> receives;
    std::mt19937 own(seed + static_cast<unsigned>(rank * 7919 + round));
    for (std::size_t i = 0; i < plans.size(); ++i) {
      if (plans[i].to == rank) receives.push_back(i);
    }
    // Another order between tags, the same within one pair and tag: a stable sort by a random key.
    std::map<std::pair<int, int>, unsigned> keys;
    for (const std::size_t i : receives)
      keys.emplace(std::pair(plans[i].from, plans[i].tag), own());
    std::stable_sort(receives.begin(), receives.end(), [&](std::size_t a, std::size_t b) {
      return keys[{plans[a].from, plans[a].tag}] < keys[{plans[b].from, plans[b].tag}];
    });
    const bool sends_first = own() % 2 == 0;
    const auto post_sends = [&] {
      for (std::size_t i = 0; i < plans.size(); ++i) {
        if (plans[i].from != rank) continue;
        sent[i] = pattern(plans[i].count, plans[i].value);
        requests.emplace_back(i, post(session, true, plans[i].to, plans[i].tag, sent[i]));
      }
    };
    if (sends_first) post_sends();
    for (const std::size_t i : receives) {
      got[i].assign(plans[i].count, -1);
      const int from = plans[i].any ? any_source : plans[i].from;
      requests.emplace_back(i, post(session, false, from, plans[i].tag, got[i]));
    }
    if (!sends_first) post_sends();
    std::shuffle(requests.begin(), requests.end(), own);
    for (const auto& [i, request] : requests) {
      if (own() % 3 == 0) ::usleep(static_cast<unsigned>(own() % 300));
      const Status status = finish(session, request);
      if (!status.ok()) {
        std::fprintf(stderr, "%s\n", status.message.c_str());
        return 1;
      }
      if (request->transfer().is_send) continue;
      if (request->source() != plans[i].from) return 2;
      if (got[i] != pattern(plans[i].count, plans[i].value)) return 3;
    }
  }
  return 0;
}

TEST(soak_on_threads) {
  for (const int ranks : {2, 4}) {
    run_threads(ranks, [](Session& session) { CHECK(soak(session, 11, 40) == 0); });
  }
}

TEST(soak_on_processes) {
  const auto pids = fork_ranks(3, [](Session& session) { return soak(session, 5, 60); });
  for (const pid_t pid : pids) CHECK(exit_status(pid, 60) == 0);
}

TEST(death_ends_what_waits_for_it) {
  const auto pids = fork_ranks(3, [](Session& session) {
    Floats values(10), large(500'000);
    if (session.rank() == 2) {
      if (!send(session, 0, 1, pattern(10, 9)).ok()) return 10;
      ::usleep(30'000);
      ::kill(::getpid(), SIGKILL);
    }
    if (session.rank() == 1) {
      Status status;
      const double took = seconds_of([&] { status = send(session, 2, 0, large); });
      return status.code == Code::peer_lost && status.ranks[0] == 2 && took < 1 ? 0 : 1;
    }
    RequestPtr direct = post(session, false, 2, 0, values);
    Floats other(10);
    const RequestPtr any = post(session, false, any_source, 7, other);
    if (finish(session, direct).code != Code::peer_lost) return 2;
    if (finish(session, any).code != Code::peer_lost) return 3;
    // What it sent before counts, the next thing does not come.
    if (!receive(session, 2, 1, values).ok() || values != pattern(10, 9)) return 4;
    if (receive(session, 2, 1, values).code != Code::peer_lost) return 5;
    if (receive(session, any_source, 1, values).code != Code::peer_lost) return 6;
    return send(session, 2, 0, values).code == Code::peer_lost ? 0 : 7;
  });
  CHECK(exit_status(pids[0], 30) == 0);
  CHECK(exit_status(pids[1], 30) == 0);
  CHECK(WTERMSIG(exit_status(pids[2], 30)) == SIGKILL);
}

TEST(a_forked_child_is_refused_and_harms_nobody) {
  const auto pids = fork_ranks(2, [](Session& session) {
    Floats values(10);
    const int peer = 1 - session.rank();
    const RequestPtr request = post(session, false, peer, 0, values);  // starts the worker
    const pid_t child = ::fork();
    if (child == 0) {
      const bool refused = send(session, peer, 0, values).code == Code::invalid;
      session.close(Deadline::after(0));
      ::_exit(refused ? 0 : 1);
    }
    if (exit_status(child, 10) != 0) return 1;
    if (!send(session, peer, 0, pattern(10, 2)).ok() || !finish(session, request).ok()) return 2;
    return values == pattern(10, 2) ? 0 : 3;
  });
  for (const pid_t pid : pids) CHECK(exit_status(pid, 30) == 0);
}
