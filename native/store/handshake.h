// The handshake: three messages of fixed size by which both sides prove that they know the token.
//
//   server -> ServerHello   who it is, and a nonce
//   client -> ClientHello   its session, a nonce, HMAC(token, "client" + both hellos)
//   server -> ServerAnswer  accepted or not, HMAC(token, "server" + everything before)
//
// Nothing of variable size is read from a peer before its proof has been checked.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

#include "common/status.h"
#include "store/sha256.h"

namespace gradsync::store {

using Id = std::array<std::uint8_t, 16>;

// Fills with random bytes from the kernel.
Status random_id(Id& id);

struct ServerHello {
  std::array<char, 8> magic{'g', 'r', 'a', 'd', 's', 'y', 'n', 'c'};
  std::uint32_t version = 1;
  std::uint32_t unused = 0;
  Id instance{};  // differs for every server ever started
  Id nonce{};
};
static_assert(sizeof(ServerHello) == 48);

struct ClientHello {
  std::array<char, 8> magic{'g', 'r', 'a', 'd', 's', 'y', 'n', 'c'};
  Id session{};
  Id nonce{};
  std::uint64_t received = 0;  // counted replies that this session has got so far
  Digest proof{};
};
static_assert(sizeof(ClientHello) == 80);

struct ServerAnswer {
  std::uint8_t accepted = 0;
  std::uint8_t resumed = 0;  // the server still knew the session
  std::uint8_t unused[6] = {};
  Digest proof{};
};
static_assert(sizeof(ServerAnswer) == 40);

Digest client_proof(std::string_view token, const ServerHello& server, const ClientHello& client);
Digest server_proof(std::string_view token, const ServerHello& server, const ClientHello& client,
                    const ServerAnswer& answer);

}  // namespace gradsync::store
