#include <string>
#include <vector>

#include "store/data.h"
#include "tests/check.h"

using namespace gradsync::store;
using gradsync::Code;

namespace {

// Data with tickets that count up, and requests from plain arguments.
struct Bench {
  Data data;
  Reply reply;
  Ticket last = 0;

  bool run(Op op, std::vector<std::string_view> keys, std::vector<std::string_view> values = {},
           std::int64_t number = 0) {
    Request request;
    request.header.op = op;
    request.header.number = number;
    request.keys = std::move(keys);
    request.values = std::move(values);
    return data.execute(++last, request, reply);
  }
  std::string text() const { return reply.strings.empty() ? "(none)" : reply.strings[0]; }
};

}  // namespace

TEST(get_of_a_key_that_is_there_answers_at_once) {
  Bench bench;
  CHECK(bench.run(Op::set, {"k"}, {"v"}));
  CHECK(bench.run(Op::get, {"k"}) && bench.text() == "v");
}

TEST(get_waits_for_set_and_for_everything_else_that_creates_a_key) {
  for (const Op op : {Op::set, Op::append, Op::add, Op::compare_set, Op::multi_set}) {
    Bench bench;
    CHECK(!bench.run(Op::get, {"k"}));
    std::vector<std::string_view> values{"1"};
    if (op == Op::compare_set) values = {"", "1"};
    if (op == Op::add) values = {};
    CHECK(bench.run(op, {"k"}, values, 1));
    const auto woken = bench.data.take_woken();
    CHECK(woken.size() == 1 && woken[0].ticket == 1 && woken[0].reply.strings[0] == "1");
    CHECK(!bench.data.has_woken());
  }
}

TEST(add_counts_and_refuses_text_and_overflow) {
  Bench bench;
  CHECK(bench.run(Op::add, {"n"}, {}, -2) && bench.reply.number == -2);
  CHECK(bench.run(Op::get, {"n"}) && bench.text() == "-2");
  CHECK(bench.run(Op::set, {"n"}, {"41"}));
  CHECK(bench.run(Op::add, {"n"}, {}, 1) && bench.reply.number == 42);
  CHECK(bench.run(Op::set, {"n"}, {"42x"}));
  CHECK(bench.run(Op::add, {"n"}, {}, 1) && bench.reply.code == Code::not_numeric);
  CHECK(bench.run(Op::set, {"n"}, {"9223372036854775807"}));
  CHECK(bench.run(Op::add, {"n"}, {}, 1) && bench.reply.code == Code::not_numeric);
  CHECK(bench.run(Op::get, {"n"}) && bench.text() == "9223372036854775807");
}

TEST(compare_set_follows_the_decision_table) {
  Bench bench;
  CHECK(bench.run(Op::compare_set, {"k"}, {"old", "new"}) && bench.text() == "old");
  CHECK(bench.run(Op::num_keys, {}) && bench.reply.number == 0);
  CHECK(bench.run(Op::compare_set, {"k"}, {"", "a"}) && bench.text() == "a");
  CHECK(bench.run(Op::compare_set, {"k"}, {"x", "b"}) && bench.text() == "a");
  CHECK(bench.run(Op::compare_set, {"k"}, {"a", "b"}) && bench.text() == "b");
}

TEST(wait_for_many_is_answered_when_the_last_one_comes) {
  Bench bench;
  CHECK(!bench.run(Op::wait, {"a", "b", "a"}));
  CHECK(bench.run(Op::set, {"a"}, {""}));
  CHECK(!bench.data.has_woken());
  CHECK(bench.run(Op::set, {"b"}, {""}));
  CHECK(bench.data.take_woken().size() == 1);
  CHECK(bench.run(Op::wait, {}));
}

TEST(wait_looks_again_when_a_key_was_deleted_meanwhile) {
  Bench bench;
  CHECK(!bench.run(Op::multi_get, {"a", "b"}));
  CHECK(bench.run(Op::set, {"a"}, {"1"}));
  CHECK(bench.run(Op::remove, {"a"}) && bench.reply.number == 1);
  CHECK(bench.run(Op::set, {"b"}, {"2"}));
  CHECK(!bench.data.has_woken());
  CHECK(bench.run(Op::set, {"a"}, {"3"}));
  const auto woken = bench.data.take_woken();
  CHECK(woken.size() == 1);
  CHECK((woken[0].reply.strings == std::vector<std::string>{"3", "2"}));
}

TEST(timeout_names_the_missing_keys_and_forgets_the_ticket) {
  Bench bench;
  CHECK(bench.run(Op::set, {"b"}, {""}));
  CHECK(!bench.run(Op::wait, {"a", "b", "c"}));
  const Reply reply = bench.data.expire(bench.last);
  CHECK(reply.code == Code::timeout && reply.number == 2);
  CHECK((reply.strings == std::vector<std::string>{"a", "c"}));
  CHECK(bench.run(Op::multi_set, {"a", "c"}, {"", ""}));
  CHECK(!bench.data.has_woken());
}

TEST(queue_gives_in_order_and_serves_the_oldest_popper_first) {
  Bench bench;
  CHECK(bench.run(Op::queue_pop, {"q"}) && bench.reply.code == Code::queue_empty);
  CHECK(!bench.run(Op::queue_pop, {"q"}, {}, 1));  // ticket 2
  CHECK(!bench.run(Op::queue_pop, {"q"}, {}, 1));  // ticket 3
  CHECK(bench.run(Op::queue_push, {"q"}, {"x"}));
  CHECK(bench.run(Op::queue_push, {"q"}, {"y"}));
  const auto woken = bench.data.take_woken();
  CHECK(woken.size() == 2 && woken[0].ticket == 2 && woken[1].reply.strings[0] == "y");
  CHECK(bench.run(Op::queue_push, {"q"}, {"1"}) && bench.run(Op::queue_push, {"q"}, {"2"}));
  CHECK(bench.run(Op::queue_len, {"q"}) && bench.reply.number == 2);
  CHECK(bench.run(Op::queue_pop, {"q"}, {}, 1) && bench.text() == "1");
}

TEST(queue_satisfies_wait_but_is_no_key) {
  Bench bench;
  CHECK(!bench.run(Op::wait, {"q"}));
  CHECK(!bench.run(Op::get, {"q"}));
  CHECK(bench.run(Op::queue_push, {"q"}, {"x"}));
  const auto woken = bench.data.take_woken();
  CHECK(woken.size() == 1 && woken[0].ticket == 1);
  CHECK(bench.run(Op::check, {"q"}) && bench.reply.number == 1);
  CHECK(bench.run(Op::num_keys, {}) && bench.reply.number == 0);
  CHECK(bench.run(Op::queue_pop, {"q"}, {}, 1));
  CHECK(bench.run(Op::check, {"q"}) && bench.reply.number == 0);
}

TEST(withdrawn_popper_takes_nothing) {
  Bench bench;
  CHECK(!bench.run(Op::queue_pop, {"q"}, {}, 1));
  bench.data.withdraw(bench.last);
  CHECK(bench.run(Op::queue_push, {"q"}, {"x"}));
  CHECK(!bench.data.has_woken());
  CHECK(bench.run(Op::queue_len, {"q"}) && bench.reply.number == 1);
}

TEST(barrier_opens_for_the_last_one_and_can_be_used_again) {
  Bench bench;
  for (int round = 0; round < 3; ++round) {
    CHECK(!bench.run(Op::barrier, {"b"}, {}, 3));
    CHECK(!bench.run(Op::barrier, {"b"}, {}, 3));
    CHECK(bench.run(Op::barrier, {"b"}, {}, 2) && bench.reply.code == Code::invalid);
    CHECK(bench.run(Op::barrier, {"b"}, {}, 3) && bench.reply.code == Code::ok);
    CHECK(bench.data.take_woken().size() == 2);
  }
  CHECK(bench.run(Op::barrier, {"b"}, {}, 1) && bench.reply.code == Code::ok);
}

TEST(barrier_that_timed_out_no_longer_counts_its_caller) {
  Bench bench;
  CHECK(!bench.run(Op::barrier, {"b"}, {}, 2));
  const Reply reply = bench.data.expire(bench.last);
  CHECK(reply.code == Code::timeout && reply.number == 1);
  CHECK(!bench.run(Op::barrier, {"b"}, {}, 2));
  CHECK(bench.run(Op::barrier, {"b"}, {}, 2));
}

TEST(value_does_not_grow_over_the_limit) {
  Bench bench;
  const std::string half(max_value_bytes / 2, 'x');
  CHECK(bench.run(Op::append, {"k"}, {half}) && bench.reply.code == Code::ok);
  CHECK(bench.run(Op::append, {"k"}, {half}) && bench.reply.code == Code::ok);
  CHECK(bench.run(Op::append, {"k"}, {"x"}) && bench.reply.code == Code::invalid);
}
