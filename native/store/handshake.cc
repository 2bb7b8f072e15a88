#include "store/handshake.h"

#include <sys/random.h>

#include <cerrno>
#include <string>
#include <type_traits>

namespace gradsync::store {
namespace {

template <typename T>
void add_bytes(std::string& out, const T& message, std::size_t size = sizeof(T)) {
  static_assert(std::is_trivially_copyable_v<T>);
  out.append(reinterpret_cast<const char*>(&message), size);
}

}  // namespace

Status random_id(Id& id) {
  std::size_t filled = 0;
  while (filled < id.size()) {
    const ssize_t got = getrandom(id.data() + filled, id.size() - filled, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return Status::from_errno("getrandom");
    filled += static_cast<std::size_t>(got);
  }
  return Status::success();
}

Digest client_proof(std::string_view token, const ServerHello& server, const ClientHello& client) {
  std::string text = "client";
  add_bytes(text, server);
  add_bytes(text, client, sizeof(client) - sizeof(client.proof));
  return hmac_sha256(token, text);
}

Digest server_proof(std::string_view token, const ServerHello& server, const ClientHello& client,
                    const ServerAnswer& answer) {
  std::string text = "server";
  add_bytes(text, server);
  add_bytes(text, client);
  add_bytes(text, answer, sizeof(answer) - sizeof(answer.proof));
  return hmac_sha256(token, text);
}

}  // namespace gradsync::store
