// What the files that bind a session's calls share.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <string>
#include <utility>

#include "bindings/bindings.h"
#include "bindings/gil.h"
#include "bindings/site.h"
#include "session/session.h"

namespace gradsync {

// Runs a call without the GIL and raises what went wrong.
template <typename Call>
void run_released(Call call) {
  raise_if_failed(released(call));
}

// A call that was handed in, for Python.
struct Pending {
  Session* session;  // kept alive by the Python object of this one
  std::shared_ptr<Ticket> ticket;
};

// Carries a call out and returns None, or hands it in and returns its Pending. Its time begins when
// it is carried out, not while it waits for those before it. `call` owns what it refers to.
template <typename Call>
nanobind::object dispatch(Session& self, double timeout_s, bool asynchronous, Call call) {
  if (!asynchronous) {
    run_released([&] { return call(Deadline::after(timeout_s)); });
    return nanobind::none();
  }
  auto asked = [call = std::move(call), timeout_s, site = capture_site()] {
    const AskedAt here(site.get());
    return call(Deadline::after(timeout_s));
  };
  return nanobind::cast(Pending{&self, self.post(std::move(asked))});
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

void bind_pending(nanobind::module_& module);
void bind_board(nanobind::module_& module, nanobind::class_<Session>& session);
void bind_adoption(nanobind::module_& module, nanobind::class_<Session>& session);

// Calls that take one address per rank: bindings/pieces.cc.
void bind_piece_calls(nanobind::class_<Session>& session);

// Messages: bindings/mail.cc.
void bind_mail(nanobind::module_& module, nanobind::class_<Session>& session);

}  // namespace gradsync
