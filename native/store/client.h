// The store's client: one method per operation, safe to share between threads.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "common/status.h"
#include "store/channel.h"

namespace gradsync::store {

using Strings = std::vector<std::string_view>;

// Every `timeout_s` is the longest wait in seconds; 0 waits for ever. What is over the limits of
// wire.h is refused with Code::invalid before anything is sent.
class Client {
 public:
  // Waits for a server that has yet to start.
  static Status connect(const Address& address, std::string token, double timeout_s,
                        std::unique_ptr<Client>& client);
  // Connects to this very server, or fails at once; zeros for any.
  static Status connect_at_once(const Address& address, std::string token, const Id& instance,
                                double timeout_s, std::unique_ptr<Client>& client);

  Status set(std::string_view key, std::string_view value, double timeout_s);
  Status get(std::string_view key, double timeout_s, std::string& value);
  Status add(std::string_view key, std::int64_t amount, double timeout_s, std::int64_t& sum);
  Status compare_set(std::string_view key, std::string_view expected, std::string_view desired,
                     double timeout_s, std::string& value);
  Status append(std::string_view key, std::string_view value, double timeout_s);
  Status remove(std::string_view key, double timeout_s, bool& existed);
  Status check(const Strings& keys, double timeout_s, bool& all_there);
  Status wait(const Strings& keys, double timeout_s);
  Status multi_get(const Strings& keys, double timeout_s, std::vector<std::string>& values);
  Status multi_set(const Strings& keys, const Strings& values, double timeout_s);
  Status num_keys(double timeout_s, std::int64_t& count);
  Status list_keys(double timeout_s, std::vector<std::string>& keys);
  Status queue_push(std::string_view key, std::string_view value, double timeout_s);
  Status queue_pop(std::string_view key, bool block, double timeout_s, std::string& value);
  Status queue_len(std::string_view key, double timeout_s, std::int64_t& length);
  Status barrier(std::string_view key, std::int64_t participants, double timeout_s);
  Status ping(double timeout_s);

  // Fault injection: cuts the connection, as a broken network would.
  void cut() { channel_.cut(); }

 private:
  struct Question;

  Client() = default;
  static Status open(DialOptions options, double timeout_s, bool patient,
                     std::unique_ptr<Client>& client);
  Status ask(const Question& question, Reply& reply);
  Status explain(const Question& question, const Reply& reply) const;

  Channel channel_;
};

}  // namespace gradsync::store
