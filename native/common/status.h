// Status: the only error type inside the native core. Bindings turn it into a Python exception;
// nothing throws across a folder boundary.
#pragma once

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

namespace gradsync {

// Mirrored by name in src/gradsync/_native.pyi; append only.
enum class Code : std::uint8_t {
  ok = 0,
  timeout,          // a deadline passed
  peer_lost,        // a process died or left
  mismatch,         // ranks asked for different things
  aborted,          // a rank aborted the group
  no_space,         // memory or disk could not be reserved
  connection,       // a socket failed or the other side is gone
  unauthenticated,  // a connection did not prove that it knows the token
  invalid,          // the caller's mistake
  not_numeric,      // integer arithmetic on a value that is no integer
  queue_empty,      // non-blocking pop found nothing
  system,           // any other failed system call
  interrupted,      // the caller's own check said to stop waiting
};

struct [[nodiscard]] Status {
  Code code = Code::ok;
  std::string message;
  std::vector<int> ranks;  // whom the failure is about, when it is about ranks

  bool ok() const { return code == Code::ok; }

  static Status success() { return {}; }
  static Status error(Code code, std::string message, std::vector<int> ranks = {}) {
    return {code, std::move(message), std::move(ranks)};
  }
  // A failed system call: "what: strerror". ENOSPC and ENOMEM become no_space.
  static Status from_errno(const std::string& what, int number = errno) {
    const bool shortage = number == ENOSPC || number == ENOMEM;
    return {shortage ? Code::no_space : Code::system, what + ": " + std::strerror(number), {}};
  }
};

}  // namespace gradsync
