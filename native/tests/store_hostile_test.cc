// Members that know the token and do everything wrong that the format allows: repeated and skipped
// numbers, false counts, stolen sessions, requests cut in the middle. Honest clients notice
// nothing.
#include <sys/socket.h>
#include <unistd.h>

#include <memory>
#include <random>
#include <string>
#include <vector>

#include "store/client.h"
#include "store/dial.h"
#include "store/server.h"
#include "tests/check.h"

using namespace gradsync::store;
using gradsync::Deadline;

namespace {

using Random = std::mt19937;

std::string random_request(Random& random) {
  static const Op ops[] = {
      Op::set,       Op::get,        Op::add,       Op::compare_set, Op::append,   Op::remove,
      Op::check,     Op::wait,       Op::multi_get, Op::multi_set,   Op::num_keys, Op::list_keys,
      Op::queue_pop, Op::queue_push, Op::queue_len, Op::barrier,     Op::ping,     Op::cancel};
  static const std::uint32_t keys[] = {1, 1, 1, 1, 1, 1, 3, 3, 3, 2, 0, 0, 1, 1, 1, 1, 0, 0};
  static const std::uint32_t values[] = {1, 0, 0, 2, 1, 0, 0, 0, 0, 2, 0, 0, 0, 1, 0, 0, 0, 0};
  const std::size_t which = random() % std::size(ops);
  RequestHeader header;
  header.op = ops[which];
  header.keys = keys[which];
  header.values = values[which];
  header.seq = random() % 40;  // repeats and jumps back all the time
  header.received = random() % 20 == 0 ? random() % 40 : 0;
  header.timeout_ms = random() % 3;
  header.number = random() % 5 == 0 ? static_cast<std::int64_t>(random() % 40) : 2;
  std::string frame;
  begin_request(frame, header);
  for (std::uint32_t i = 0; i < header.keys + header.values; ++i) {
    put_string(frame, "hostile" + std::to_string(random() % 6));
  }
  end_request(frame, 0);
  return frame;
}

}  // namespace

TEST(hostile_members_disturb_no_honest_client) {
  ServerOptions options;
  options.address = {true, "hostile-" + std::to_string(getpid()), 0};
  options.token = "token";
  std::unique_ptr<Server> server;
  CHECK_OK(Server::start(options, server));
  std::unique_ptr<Client> honest;
  CHECK_OK(Client::connect(options.address, "token", 30, honest));

  Random random(1);
  std::vector<Id> sessions(4);
  for (Id& id : sessions) CHECK_OK(random_id(id));
  std::vector<Dialed> connections(4);
  for (std::int64_t round = 1; round <= 3000; ++round) {
    Dialed& dialed = connections[random() % connections.size()];
    if (!dialed.socket.open() || random() % 8 == 0) {
      DialOptions dial;
      dial.address = options.address;
      dial.token = "token";
      dial.session = sessions[random() % sessions.size()];
      // May be refused, when the number of replies is a lie; the next round tries again.
      const bool is_liar = random() % 10 == 0;
      const auto status = dial_again(dial, is_liar ? 1000 : 0, Deadline::after(0.01), dialed);
      if (!status.ok()) dialed.socket.reset();
      continue;
    }
    std::string frames;
    for (unsigned i = 0; i < 1 + random() % 20; ++i) frames += random_request(random);
    if (random() % 10 == 0) frames.resize(random() % frames.size());
    if (random() % 20 == 0) frames[random() % frames.size()] ^= static_cast<char>(random());
    if (::send(dialed.socket.fd(), frames.data(), frames.size(), MSG_NOSIGNAL | MSG_DONTWAIT) < 0) {
      dialed.socket.reset();
    }
    if (random() % 2 == 0 && dialed.socket.open()) {
      char replies[4096];
      static_cast<void>(::recv(dialed.socket.fd(), replies, sizeof(replies), MSG_DONTWAIT));
    }
    std::int64_t sum = 0;
    CHECK_OK(honest->add("honest", 1, 30, sum));
  }
  std::int64_t sum = 0;
  CHECK_OK(honest->add("honest", 0, 30, sum));
  CHECK(sum > 1000);
}
