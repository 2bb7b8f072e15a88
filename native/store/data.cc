#include "store/data.h"

#include <charconv>

namespace gradsync::store {
namespace {

constexpr std::size_t max_named_keys = 16;  // in the reply to a wait that timed out

bool parse_integer(std::string_view text, std::int64_t& number) {
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, number);
  return error == std::errc{} && stop == end;
}

template <typename MapType>
auto& slot(MapType& map, std::string_view key) {
  const auto found = map.find(key);
  return found != map.end() ? found->second : map[std::string(key)];
}

}  // namespace

bool Data::execute(Ticket ticket, const Request& request, Reply& reply) {
  switch (request.header.op) {
    case Op::set:
    case Op::get:
    case Op::add:
    case Op::compare_set:
    case Op::append:
    case Op::remove: return execute_one_key(ticket, request, reply);
    case Op::check:
    case Op::wait:
    case Op::multi_get:
    case Op::multi_set:
    case Op::num_keys:
    case Op::list_keys: return execute_many_keys(ticket, request, reply);
    case Op::queue_push:
    case Op::queue_pop:
    case Op::queue_len: return execute_queue(ticket, request, reply);
    case Op::barrier: return arrive(ticket, request, reply);
    case Op::ping: reply = {}; return true;
    case Op::cancel:
    case Op::bye: break;
  }
  return true;
}

bool Data::execute_one_key(Ticket ticket, const Request& request, Reply& reply) {
  const std::string_view key = request.keys[0];
  switch (request.header.op) {
    case Op::set: store(key, request.values[0]); return true;
    case Op::get: {
      const auto found = values_.find(key);
      if (found == values_.end()) {
        park(ticket, request);
        return false;
      }
      reply = Reply::value(found->second);
      return true;
    }
    case Op::add: reply = add(key, request.header.number); return true;
    case Op::compare_set:
      reply = compare_set(key, request.values[0], request.values[1]);
      return true;
    case Op::append: reply = append(key, request.values[0]); return true;
    default: {
      const auto found = values_.find(key);
      reply = Reply::of(found != values_.end() ? 1 : 0);
      if (found != values_.end()) values_.erase(found);
      return true;
    }
  }
}

bool Data::execute_many_keys(Ticket ticket, const Request& request, Reply& reply) {
  const Op op = request.header.op;
  reply = {};
  switch (op) {
    case Op::multi_set:
      for (std::size_t i = 0; i < request.keys.size(); ++i) {
        store(request.keys[i], request.values[i]);
      }
      return true;
    case Op::num_keys: reply.number = static_cast<std::int64_t>(values_.size()); return true;
    case Op::list_keys:
      for (const auto& [key, value] : values_) reply.strings.push_back(key);
      return true;
    default: break;
  }
  for (const std::string_view key : request.keys) {
    if (is_there(op, key)) continue;
    if (op == Op::check) return true;
    park(ticket, request);
    return false;
  }
  reply.number = 1;
  if (op == Op::multi_get) {
    for (const std::string_view key : request.keys) {
      reply.strings.push_back(values_.find(key)->second);
    }
  }
  return true;
}

bool Data::execute_queue(Ticket ticket, const Request& request, Reply& reply) {
  const std::string_view key = request.keys[0];
  if (request.header.op == Op::queue_pop) return pop(ticket, request, reply);
  if (request.header.op == Op::queue_push) push(key, request.values[0]);
  const auto found = queues_.find(key);
  reply = Reply::of(found == queues_.end() ? 0 : static_cast<std::int64_t>(found->second.size()));
  return true;
}

Reply Data::add(std::string_view key, std::int64_t amount) {
  const auto found = values_.find(key);
  std::int64_t sum = 0;
  if (found != values_.end() && !parse_integer(found->second, sum)) {
    const std::string shown = found->second.substr(0, 40);
    return Reply::error(Code::not_numeric, "add needs a decimal integer of 64 bits under key '" +
                                               std::string(key) + "', found '" + shown + "'");
  }
  if (__builtin_add_overflow(sum, amount, &sum)) {
    return Reply::error(Code::not_numeric, "add to key '" + std::string(key) +
                                               "' would leave the range of 64-bit integers");
  }
  char digits[24];
  const auto end = std::to_chars(digits, digits + sizeof(digits), sum).ptr;
  const std::string_view text(digits, static_cast<std::size_t>(end - digits));
  if (found != values_.end()) {
    found->second.assign(text);
  } else {
    store(key, text);
  }
  return Reply::of(sum);
}

Reply Data::compare_set(std::string_view key, std::string_view expected, std::string_view desired) {
  const auto found = values_.find(key);
  if (found == values_.end()) {
    if (!expected.empty()) return Reply::value(std::string(expected));
    store(key, desired);
    return Reply::value(std::string(desired));
  }
  if (found->second == expected) found->second.assign(desired);
  return Reply::value(found->second);
}

Reply Data::append(std::string_view key, std::string_view more) {
  const auto found = values_.find(key);
  if (found == values_.end()) {
    store(key, more);
  } else if (found->second.size() + more.size() > max_value_bytes) {
    return Reply::error(Code::invalid, "append to key '" + std::string(key) +
                                           "' would make its value longer than " +
                                           std::to_string(max_value_bytes) + " bytes");
  } else {
    found->second.append(more);
  }
  return {};
}

bool Data::pop(Ticket ticket, const Request& request, Reply& reply) {
  const auto found = queues_.find(request.keys[0]);
  if (found == queues_.end()) {
    if (request.header.number == 0) {
      reply =
          Reply::error(Code::queue_empty, "queue '" + std::string(request.keys[0]) + "' is empty");
      return true;
    }
    park(ticket, request);
    return false;
  }
  reply = Reply::value(std::move(found->second.front()));
  found->second.pop_front();
  if (found->second.empty()) queues_.erase(found);
  return true;
}

bool Data::arrive(Ticket ticket, const Request& request, Reply& reply) {
  const std::string_view key = request.keys[0];
  const std::int64_t size = request.header.number;
  Barrier& barrier = slot(barriers_, key);
  if (barrier.arrived.empty()) barrier.size = size;
  if (size < 1 || barrier.size != size) {
    reply =
        Reply::error(Code::invalid, "barrier '" + std::string(key) + "' was called with " +
                                        std::to_string(size) + " participants, others wait for " +
                                        std::to_string(barrier.size));
    if (barrier.arrived.empty()) barriers_.erase(std::string(key));
    return true;
  }
  if (static_cast<std::int64_t>(barrier.arrived.size()) + 1 < size) {
    barrier.arrived.insert(ticket);
    parked_[ticket] = {Op::barrier, {std::string(key)}};
    return false;
  }
  for (const Ticket other : barrier.arrived) {
    parked_.erase(other);
    woken_.push_back({other, {}});
  }
  barriers_.erase(barriers_.find(key));  // the next call begins a new round
  reply = {};
  return true;
}

void Data::store(std::string_view key, std::string_view value) {
  const auto found = values_.find(key);
  if (found != values_.end()) {
    found->second.assign(value);  // nobody waits for a key that is there
    return;
  }
  values_.emplace(key, value);
  wake(key);
}

void Data::push(std::string_view key, std::string_view value) {
  const auto waiting = waiting_.find(key);
  if (waiting != waiting_.end()) {
    for (const Ticket ticket : waiting->second) {
      if (parked_.at(ticket).op != Op::queue_pop) continue;
      woken_.push_back({ticket, Reply::value(std::string(value))});
      withdraw(ticket);
      return;
    }
  }
  slot(queues_, key).emplace_back(value);
  wake(key);
}

// The key has appeared: answer those for whom it was the last one.
void Data::wake(std::string_view key) {
  const auto found = waiting_.find(key);
  if (found == waiting_.end()) return;
  const std::set<Ticket> tickets = found->second;
  const std::string name = found->first;
  for (const Ticket ticket : tickets) {
    Parked& parked = parked_.at(ticket);
    if (!is_there(parked.op, name)) continue;
    stop_waiting(ticket, name);
    if (--parked.missing > 0) continue;
    // Keys that were there may have been deleted since.
    parked.missing = start_waiting(ticket, parked);
    if (parked.missing > 0) continue;
    woken_.push_back({ticket, parked.op == Op::wait ? Reply{} : read_all(parked.keys)});
    parked_.erase(ticket);
  }
}

// A queue that holds something satisfies check and wait, but it has no value to get.
bool Data::is_there(Op op, std::string_view key) const {
  if (op == Op::queue_pop) return false;
  if (values_.find(key) != values_.end()) return true;
  return (op == Op::check || op == Op::wait) && queues_.find(key) != queues_.end();
}

Reply Data::read_all(const std::vector<std::string>& keys) const {
  Reply reply;
  for (const std::string& key : keys) reply.strings.push_back(values_.at(key));
  return reply;
}

void Data::park(Ticket ticket, const Request& request) {
  Parked& parked = parked_[ticket];
  parked.op = request.header.op;
  parked.keys.assign(request.keys.begin(), request.keys.end());
  parked.missing = start_waiting(ticket, parked);
}

// Stands in the list of every key that is not there; returns in how many.
std::size_t Data::start_waiting(Ticket ticket, const Parked& parked) {
  std::size_t missing = 0;
  for (const std::string& key : parked.keys) {
    if (is_there(parked.op, key)) continue;
    if (slot(waiting_, key).insert(ticket).second) ++missing;
  }
  return missing;
}

void Data::stop_waiting(Ticket ticket, const std::string& key) {
  const auto found = waiting_.find(key);
  if (found == waiting_.end()) return;
  found->second.erase(ticket);
  if (found->second.empty()) waiting_.erase(found);
}

Reply Data::expire(Ticket ticket) {
  const auto found = parked_.find(ticket);
  if (found == parked_.end()) return {};
  const Parked& parked = found->second;
  Reply reply;
  reply.code = Code::timeout;
  if (parked.op == Op::barrier) {
    const Barrier& barrier = barriers_.at(parked.keys[0]);
    reply.number = static_cast<std::int64_t>(barrier.arrived.size());
    reply.strings.push_back(parked.keys[0]);
  } else {
    for (const std::string& key : parked.keys) {
      if (is_there(parked.op, key)) continue;
      ++reply.number;
      if (reply.strings.size() < max_named_keys) reply.strings.push_back(key);
    }
  }
  withdraw(ticket);
  return reply;
}

void Data::withdraw(Ticket ticket) {
  const auto found = parked_.find(ticket);
  if (found == parked_.end()) return;
  const Parked parked = std::move(found->second);
  parked_.erase(found);
  if (parked.op == Op::barrier) {
    const auto barrier = barriers_.find(parked.keys[0]);
    if (barrier == barriers_.end()) return;
    barrier->second.arrived.erase(ticket);
    if (barrier->second.arrived.empty()) barriers_.erase(barrier);
    return;
  }
  for (const std::string& key : parked.keys) stop_waiting(ticket, key);
}

}  // namespace gradsync::store
