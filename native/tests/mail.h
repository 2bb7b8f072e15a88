// Messages for tests: tensors of floats from one session to another.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "p2p/mailbox.h"
#include "tests/ranks.h"

namespace gradsync::testing {

using Floats = std::vector<float>;

inline Transfer transfer(bool is_send, int peer, std::int64_t tag, Floats& values,
                         double timeout_s = 30) {
  return {is_send,
          peer,
          tag,
          reinterpret_cast<std::byte*>(values.data()),
          {values.size(), Dtype::f32},
          Deadline::after(timeout_s),
          nullptr,
          nullptr};
}

inline Status send(Session& session, int peer, std::int64_t tag, Floats values,
                   double timeout_s = 30) {
  int source = 0;
  return session.mail().run(transfer(true, peer, tag, values, timeout_s), source);
}

inline Status receive(Session& session, int peer, std::int64_t tag, Floats& values,
                      int* source = nullptr, double timeout_s = 30) {
  int from = 0;
  const Status status = session.mail().run(transfer(false, peer, tag, values, timeout_s), from);
  if (source != nullptr) *source = from;
  return status;
}

inline RequestPtr post(Session& session, bool is_send, int peer, std::int64_t tag, Floats& values,
                       double timeout_s = 30) {
  RequestPtr request;
  CHECK_OK(session.mail().post(transfer(is_send, peer, tag, values, timeout_s), request));
  return request;
}

inline Status finish(Session& session, const RequestPtr& request) {
  const Status status = session.mail().wait(*request, Deadline::never());
  return status.ok() ? request->status() : status;
}

inline Floats pattern(std::size_t count, float seed) {
  Floats values(count);
  for (std::size_t i = 0; i < count; ++i) values[i] = seed + static_cast<float>(i % 1000);
  return values;
}

inline double seconds_of(const std::function<void()>& body) {
  const auto start = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace gradsync::testing
