#include "store/client.h"

#include <cmath>
#include <cstdio>
#include <limits>
#include <utility>

namespace gradsync::store {
namespace {

// How much later than the server's own timeout reply the client stops waiting for it.
constexpr double grace_s = 2.0;
constexpr std::size_t keep_bytes = std::size_t{1} << 20;

Deadline deadline_after(double timeout_s, double extra_s) {
  return timeout_s > 0 ? Deadline::after(timeout_s + extra_s) : Deadline::never();
}

std::int64_t to_milliseconds(double timeout_s) {
  if (timeout_s <= 0 || timeout_s > 1e9) return 0;
  return static_cast<std::int64_t>(std::ceil(timeout_s * 1000));
}

Status too_long(const char* what, std::size_t size, std::size_t limit) {
  return Status::error(Code::invalid, std::string("a ") + what + " of " + std::to_string(size) +
                                          " bytes is over the store's limit of " +
                                          std::to_string(limit));
}

Status check_sizes(const std::string_view* keys, std::size_t key_count,
                   const std::string_view* values, std::size_t value_count) {
  if (key_count > max_keys) {
    return Status::error(Code::invalid, std::to_string(key_count) +
                                            " keys in one call are over the store's limit of " +
                                            std::to_string(max_keys));
  }
  std::size_t total = 0;
  for (std::size_t i = 0; i < key_count; ++i) {
    if (keys[i].size() > max_key_bytes) return too_long("key", keys[i].size(), max_key_bytes);
    total += keys[i].size() + sizeof(std::uint32_t);
  }
  for (std::size_t i = 0; i < value_count; ++i) {
    if (values[i].size() > max_value_bytes) {
      return too_long("value", values[i].size(), max_value_bytes);
    }
    total += values[i].size() + sizeof(std::uint32_t);
  }
  return total > max_request_bytes ? too_long("request", total, max_request_bytes)
                                   : Status::success();
}

std::string seconds_text(double seconds) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.4g s", seconds);
  return text;
}

std::string quoted(const std::vector<std::string>& keys, std::int64_t count) {
  std::string text;
  for (const std::string& key : keys) text += (text.empty() ? "'" : ", '") + key + "'";
  const auto more = count - static_cast<std::int64_t>(keys.size());
  return more > 0 ? text + " and " + std::to_string(more) + " more" : text;
}

// A thread's call object is used again and again for the sake of its memory. A signal handler may
// ask something while the thread waits; it gets one of its own.
class BorrowedCall {
 public:
  BorrowedCall() : mine_(!in_use) {
    if (mine_) {
      in_use = true;
    } else {
      fresh_ = std::make_unique<Call>();
    }
  }
  ~BorrowedCall() {
    if (!mine_) return;
    in_use = false;
    if (call().frame.capacity() > keep_bytes) call().frame = {};
  }
  Call& call() { return mine_ ? kept : *fresh_; }

 private:
  static thread_local bool in_use;
  static thread_local Call kept;
  bool mine_;
  std::unique_ptr<Call> fresh_;
};

thread_local bool BorrowedCall::in_use = false;
thread_local Call BorrowedCall::kept;

}  // namespace

struct Client::Question {
  Op op;
  double timeout_s;
  std::int64_t number = 0;
  const std::string_view* keys = nullptr;
  std::size_t key_count = 0;
  const std::string_view* values = nullptr;
  std::size_t value_count = 0;
};

Status Client::connect(const Address& address, std::string token, double timeout_s,
                       std::unique_ptr<Client>& client) {
  return open({address, std::move(token)}, timeout_s, true, client);
}

Status Client::connect_at_once(const Address& address, std::string token, const Id& instance,
                               double timeout_s, std::unique_ptr<Client>& client) {
  DialOptions options{address, std::move(token)};
  options.instance = instance;
  return open(std::move(options), timeout_s, false, client);
}

Status Client::open(DialOptions options, double timeout_s, bool patient,
                    std::unique_ptr<Client>& client) {
  std::unique_ptr<Client> made(new Client);
  Status status = made->channel_.open(std::move(options), deadline_after(timeout_s, 0), patient);
  if (status.ok()) client = std::move(made);
  return status;
}

Status Client::ask(const Question& question, Reply& reply) {
  Status status =
      check_sizes(question.keys, question.key_count, question.values, question.value_count);
  if (!status.ok()) return status;
  BorrowedCall borrowed;
  Call& call = borrowed.call();
  RequestHeader header;
  header.op = question.op;
  header.timeout_ms = to_milliseconds(question.timeout_s);
  header.number = question.number;
  header.keys = static_cast<std::uint32_t>(question.key_count);
  header.values = static_cast<std::uint32_t>(question.value_count);
  call.frame.clear();
  begin_request(call.frame, header);
  for (std::size_t i = 0; i < question.key_count; ++i) put_string(call.frame, question.keys[i]);
  for (std::size_t i = 0; i < question.value_count; ++i) put_string(call.frame, question.values[i]);
  end_request(call.frame, 0);
  call.limit = deadline_after(question.timeout_s, 0);
  call.guard = deadline_after(question.timeout_s, grace_s);
  if (status = channel_.call(call); !status.ok()) {
    status.message = std::string(name_of(question.op)) + ": " + status.message;
    return status;
  }
  std::swap(reply, call.reply);
  return reply.code == Code::ok ? Status::success() : explain(question, reply);
}

// Turns an error reply into a status with a text for people.
Status Client::explain(const Question& question, const Reply& reply) const {
  const std::string what = name_of(question.op);
  if (reply.code != Code::timeout) {
    return Status::error(reply.code, reply.strings.empty() ? what + " failed" : reply.strings[0]);
  }
  std::string text = what + " timed out after " + seconds_text(question.timeout_s) +
                     " on the store at " + channel_.address().text() + ": ";
  if (question.op == Op::barrier) {
    text += std::to_string(reply.number) + " of " + std::to_string(question.number) +
            " participants arrived at " + quoted(reply.strings, 0);
  } else if (question.op == Op::queue_pop) {
    text += "nothing was pushed to queue " + quoted(reply.strings, 0);
  } else {
    text += "nobody has set " + quoted(reply.strings, reply.number);
  }
  return Status::error(Code::timeout, text);
}

Status Client::set(std::string_view key, std::string_view value, double timeout_s) {
  Status status = check_sizes(&key, 1, &value, 1);
  if (!status.ok()) return status;
  status = channel_.post(key, value, deadline_after(timeout_s, grace_s));
  if (!status.ok()) status.message = "set: " + status.message;
  return status;
}

Status Client::get(std::string_view key, double timeout_s, std::string& value) {
  Reply reply;
  Status status = ask({Op::get, timeout_s, 0, &key, 1}, reply);
  if (status.ok() && !reply.strings.empty()) value = std::move(reply.strings[0]);
  return status;
}

Status Client::add(std::string_view key, std::int64_t amount, double timeout_s, std::int64_t& sum) {
  Reply reply;
  Status status = ask({Op::add, timeout_s, amount, &key, 1}, reply);
  sum = reply.number;
  return status;
}

Status Client::compare_set(std::string_view key, std::string_view expected,
                           std::string_view desired, double timeout_s, std::string& value) {
  Reply reply;
  const std::string_view values[] = {expected, desired};
  Status status = ask({Op::compare_set, timeout_s, 0, &key, 1, values, 2}, reply);
  if (status.ok() && !reply.strings.empty()) value = std::move(reply.strings[0]);
  return status;
}

Status Client::append(std::string_view key, std::string_view value, double timeout_s) {
  Reply reply;
  return ask({Op::append, timeout_s, 0, &key, 1, &value, 1}, reply);
}

Status Client::remove(std::string_view key, double timeout_s, bool& existed) {
  Reply reply;
  Status status = ask({Op::remove, timeout_s, 0, &key, 1}, reply);
  existed = reply.number != 0;
  return status;
}

Status Client::check(const Strings& keys, double timeout_s, bool& all_there) {
  Reply reply;
  Status status = ask({Op::check, timeout_s, 0, keys.data(), keys.size()}, reply);
  all_there = reply.number != 0;
  return status;
}

Status Client::wait(const Strings& keys, double timeout_s) {
  Reply reply;
  return ask({Op::wait, timeout_s, 0, keys.data(), keys.size()}, reply);
}

Status Client::multi_get(const Strings& keys, double timeout_s, std::vector<std::string>& values) {
  Reply reply;
  Status status = ask({Op::multi_get, timeout_s, 0, keys.data(), keys.size()}, reply);
  values = std::move(reply.strings);
  return status;
}

Status Client::multi_set(const Strings& keys, const Strings& values, double timeout_s) {
  Reply reply;
  return ask({Op::multi_set, timeout_s, 0, keys.data(), keys.size(), values.data(), values.size()},
             reply);
}

Status Client::num_keys(double timeout_s, std::int64_t& count) {
  Reply reply;
  Status status = ask({Op::num_keys, timeout_s}, reply);
  count = reply.number;
  return status;
}

Status Client::list_keys(double timeout_s, std::vector<std::string>& keys) {
  Reply reply;
  Status status = ask({Op::list_keys, timeout_s}, reply);
  keys = std::move(reply.strings);
  return status;
}

Status Client::queue_push(std::string_view key, std::string_view value, double timeout_s) {
  Reply reply;
  return ask({Op::queue_push, timeout_s, 0, &key, 1, &value, 1}, reply);
}

Status Client::queue_pop(std::string_view key, bool block, double timeout_s, std::string& value) {
  Reply reply;
  Status status = ask({Op::queue_pop, timeout_s, block ? 1 : 0, &key, 1}, reply);
  if (status.ok() && !reply.strings.empty()) value = std::move(reply.strings[0]);
  return status;
}

Status Client::queue_len(std::string_view key, double timeout_s, std::int64_t& length) {
  Reply reply;
  Status status = ask({Op::queue_len, timeout_s, 0, &key, 1}, reply);
  length = reply.number;
  return status;
}

Status Client::barrier(std::string_view key, std::int64_t participants, double timeout_s) {
  Reply reply;
  return ask({Op::barrier, timeout_s, participants, &key, 1}, reply);
}

Status Client::ping(double timeout_s) {
  Reply reply;
  return ask({Op::ping, timeout_s}, reply);
}

}  // namespace gradsync::store
