// What the files that bind a session's calls share.
#pragma once

#include <nanobind/nanobind.h>

#include <string>

#include "bindings/bindings.h"
#include "bindings/gil.h"
#include "session/session.h"

namespace gradsync {

// Runs a call without the GIL and raises what went wrong.
template <typename Call>
void run_released(Call call) {
  Status status;
  {
    const Unlocked unlocked;
    status = call();
  }
  raise_if_failed(status);
}

inline std::byte* at(std::uintptr_t address) { return reinterpret_cast<std::byte*>(address); }

template <typename Enum>
Enum checked(int number, const char* what) {
  if (number < 0 || number > static_cast<int>(Enum::last)) {
    raise_if_failed(
        Status::error(Code::invalid, std::string("no ") + what + " " + std::to_string(number)));
  }
  return static_cast<Enum>(number);
}

// Calls that take one address per rank: bindings/pieces.cc.
void bind_piece_calls(nanobind::class_<Session>& session);

}  // namespace gradsync
