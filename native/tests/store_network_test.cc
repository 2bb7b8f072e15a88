// Server and clients in one process, over Unix sockets and TCP, with threads and cut connections.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "store/client.h"
#include "store/server.h"
#include "tests/check.h"

using namespace gradsync::store;
using gradsync::Code;
using gradsync::Status;

namespace {

constexpr double patience_s = 60;

struct Pair {
  Address address;
  std::unique_ptr<Server> server;

  explicit Pair(bool is_unix, const std::string& token = "") {
    static std::atomic<int> counter{0};
    address.is_unix = is_unix;
    address.host = is_unix ? "test-" + std::to_string(getpid()) + "-" + std::to_string(++counter)
                           : "127.0.0.1";
    ServerOptions options;
    options.address = address;
    options.token = token;
    CHECK_OK(Server::start(options, server));
    address.port = server->port();
  }
  std::unique_ptr<Client> connect(const std::string& token = "") const {
    std::unique_ptr<Client> client;
    CHECK_OK(Client::connect(address, token, patience_s, client));
    return client;
  }
};

std::int64_t add(Client& client, const std::string& key, std::int64_t amount) {
  std::int64_t sum = 0;
  CHECK_OK(client.add(key, amount, patience_s, sum));
  return sum;
}

std::string get(Client& client, const std::string& key) {
  std::string value;
  CHECK_OK(client.get(key, patience_s, value));
  return value;
}

}  // namespace

TEST(operations_work_over_both_kinds_of_socket) {
  for (const bool is_unix : {false, true}) {
    const Pair pair(is_unix, "secret");
    const auto client = pair.connect("secret");
    CHECK_OK(client->set("k", "v", patience_s));
    CHECK(get(*client, "k") == "v");
    CHECK(add(*client, "n", 5) == 5);
    std::vector<std::string> values;
    CHECK_OK(client->multi_get({"k", "n"}, patience_s, values));
    CHECK((values == std::vector<std::string>{"v", "5"}));
    const std::string large(20 << 20, 'x');
    CHECK_OK(client->set("large", large, patience_s));
    CHECK(get(*client, "large") == large);
    const Status status = client->wait({"k", "missing"}, 0.05);
    CHECK(status.code == Code::timeout);
    CHECK(status.message.find("'missing'") != std::string::npos);
    CHECK(add(*client, "n", 0) == 5);
  }
}

TEST(reserved_address_lets_nobody_in_before_it_listens) {
  ServerOptions options;
  options.address = {true, "test-reserved-" + std::to_string(getpid()), 0};
  std::unique_ptr<Server> server, other;
  CHECK_OK(Server::reserve(options, server));
  const Status taken = Server::reserve(options, other);
  CHECK(taken.message.find("EADDRINUSE") != std::string::npos);
  std::unique_ptr<Client> client;
  const auto connect_to_it = [&](const Id& instance) {
    return Client::connect_at_once(options.address, "", instance, patience_s, client);
  };
  CHECK(connect_to_it({}).code == Code::connection);
  CHECK_OK(server->listen({{"k", "v"}}));
  std::thread early([&] { CHECK_OK(Client::connect(options.address, "", patience_s, client)); });
  CHECK_OK(server->run());
  early.join();
  CHECK(get(*client, "k") == "v");
  CHECK(connect_to_it(Id{1}).code == Code::connection);  // not the one that is meant
  CHECK_OK(connect_to_it(server->instance()));
  CHECK(get(*client, "k") == "v");
}

TEST(server_that_never_ran_can_go) {
  ServerOptions options;
  options.address = {true, "test-unused-" + std::to_string(getpid()), 0};
  for (int i = 0; i < 2; ++i) {
    std::unique_ptr<Server> server;
    CHECK_OK(Server::reserve(options, server));
    CHECK_OK(server->listen({}));
  }
}

TEST(wrong_token_is_refused_by_name) {
  const Pair pair(false, "right");
  for (const std::string token : {"wrong", ""}) {
    std::unique_ptr<Client> client;
    const Status status = Client::connect(pair.address, token, patience_s, client);
    CHECK(status.code == Code::unauthenticated);
    CHECK(status.message.find("GRADSYNC_TOKEN") != std::string::npos);
  }
}

TEST(waiting_thread_does_not_block_others_on_the_same_client) {
  const Pair pair(true);
  const auto client = pair.connect();
  constexpr int waiters = 8;
  std::vector<std::thread> threads;
  std::atomic<int> woken{0};
  for (int i = 0; i < waiters; ++i) {
    threads.emplace_back([&, i] {
      CHECK(get(*client, "key" + std::to_string(i)) == "value");
      ++woken;
    });
  }
  for (int i = 0; i < 200; ++i) add(*client, "n", 1);
  CHECK(woken == 0);
  for (int i = 0; i < waiters; ++i) {
    CHECK_OK(client->set("key" + std::to_string(i), "value", patience_s));
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(many_threads_with_cut_connections_count_exactly_once) {
  const Pair pair(false);
  constexpr int threads_per_client = 3;
  constexpr int rounds = 300;
  std::vector<std::unique_ptr<Client>> clients;
  for (int i = 0; i < 2; ++i) clients.push_back(pair.connect());
  std::atomic<bool> stop{false};
  std::thread saboteur([&] {
    while (!stop) {
      for (const auto& client : clients) client->cut();
      std::this_thread::sleep_for(std::chrono::milliseconds(3));
    }
  });
  std::vector<std::thread> threads;
  for (std::size_t c = 0; c < clients.size(); ++c) {
    for (int t = 0; t < threads_per_client; ++t) {
      threads.emplace_back([&, c, t] {
        Client& client = *clients[c];
        const std::string own = std::to_string(c) + "/" + std::to_string(t);
        for (int i = 0; i < rounds; ++i) {
          const std::string text = std::to_string(i);
          add(client, "n", 1);
          CHECK_OK(client.set(own, text, patience_s));
          CHECK(get(client, own) == text);
          CHECK_OK(client.queue_push("q" + own, text, patience_s));
          std::string value;
          CHECK_OK(client.queue_pop("q" + own, true, patience_s, value));
          CHECK(value == text);
          CHECK_OK(client.append("log", "x", patience_s));
        }
      });
    }
  }
  for (std::thread& thread : threads) thread.join();
  stop = true;
  saboteur.join();
  const auto total = static_cast<std::int64_t>(clients.size()) * threads_per_client * rounds;
  CHECK(add(*clients[0], "n", 0) == total);
  CHECK(static_cast<std::int64_t>(get(*clients[1], "log").size()) == total);
}

TEST(blocked_pop_survives_a_cut_and_loses_nothing) {
  const Pair pair(true);
  const auto popper = pair.connect();
  const auto pusher = pair.connect();
  for (int i = 0; i < 20; ++i) {
    std::string value;
    std::thread thread([&] { CHECK_OK(popper->queue_pop("q", true, patience_s, value)); });
    popper->cut();
    CHECK_OK(pusher->queue_push("q", std::to_string(i), patience_s));
    thread.join();
    CHECK(value == std::to_string(i));
  }
}

TEST(barrier_over_clients_and_rounds) {
  const Pair pair(true);
  constexpr int members = 4;
  std::atomic<int> arrived{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < members; ++i) {
    threads.emplace_back([&] {
      const auto client = pair.connect();
      for (int round = 1; round <= 10; ++round) {
        ++arrived;
        CHECK_OK(client->barrier("b", members, patience_s));
        CHECK(arrived >= round * members);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(server_that_stops_fails_every_waiter_at_once) {
  Pair pair(false);
  const auto client = pair.connect();
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([&] {
      std::string value;
      const Status status = client->get("never", 0, value);
      CHECK(status.code == Code::connection);
    });
  }
  add(*client, "n", 1);
  pair.server.reset();
  for (std::thread& thread : threads) thread.join();
  std::int64_t sum = 0;
  CHECK(client->add("n", 1, patience_s, sum).code == Code::connection);
  CHECK(client->set("n", "1", patience_s).code == Code::connection);
}

TEST(restarted_server_is_not_taken_for_the_old_one) {
  Pair pair(true);
  const auto client = pair.connect();
  add(*client, "n", 1);
  pair.server.reset();
  ServerOptions options;
  options.address = pair.address;
  CHECK_OK(Server::start(options, pair.server));
  std::int64_t sum = 0;
  const Status status = client->add("n", 1, patience_s, sum);
  CHECK(status.code == Code::connection);
  CHECK(status.message.find("restarted") != std::string::npos);
}

TEST(oversized_requests_are_refused_and_the_connection_lives_on) {
  const Pair pair(true);
  const auto client = pair.connect();
  const std::string key(max_key_bytes + 1, 'k');
  CHECK(client->set(key, "v", patience_s).code == Code::invalid);
  std::string value;
  CHECK(client->get(key, patience_s, value).code == Code::invalid);
  CHECK(client->wait(Strings(max_keys + 1, "k"), patience_s).code == Code::invalid);
  CHECK_OK(client->set(std::string(max_key_bytes, 'k'), "v", patience_s));
  CHECK(add(*client, "n", 1) == 1);
}

TEST(many_sets_in_a_row_all_arrive) {
  const Pair pair(true);
  const auto client = pair.connect();
  for (int i = 0; i < 20000; ++i) {
    if (i % 5000 == 4999) client->cut();
    CHECK_OK(client->set("k", std::to_string(i), patience_s));
  }
  CHECK(get(*client, "k") == "19999");
}

TEST(address_in_use_and_missing_token_are_errors) {
  const Pair pair(false);
  ServerOptions options;
  options.address = pair.address;
  std::unique_ptr<Server> second;
  Status status = Server::start(options, second);
  CHECK(status.code == Code::connection);
  CHECK(status.message.find("EADDRINUSE") != std::string::npos);
  options.address = {false, "0.0.0.0", 0};
  status = Server::start(options, second);
  CHECK(status.code == Code::invalid);
  CHECK(status.message.find("GRADSYNC_TOKEN") != std::string::npos);
}

#if !defined(__SANITIZE_THREAD__)  // a fork of a threaded process is beyond the thread sanitizer
TEST(forked_child_is_told_and_the_parent_goes_on) {
  const Pair pair(false);
  const auto client = pair.connect();
  add(*client, "n", 1);
  const pid_t child = fork();
  if (child == 0) {
    std::int64_t sum = 0;
    const Status status = client->add("n", 1, 1, sum);
    _exit(status.code == Code::connection && status.message.find("fork") != std::string::npos ? 0
                                                                                              : 1);
  }
  int result = -1;
  CHECK(waitpid(child, &result, 0) == child);
  CHECK(WIFEXITED(result) && WEXITSTATUS(result) == 0);
  CHECK(add(*client, "n", 1) == 2);
}
#endif
