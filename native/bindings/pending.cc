// Calls in flight, as Python sees them.
#include <nanobind/stl/string.h>

#include <functional>
#include <memory>

#include "bindings/callback.h"
#include "bindings/session.h"

namespace nb = nanobind;

namespace gradsync {
namespace {

bool wait(Pending& self, double timeout_s) {
  Status status;
  if (!self.ticket->done()) {
    const Unlocked unlocked;
    status = self.session->wait(*self.ticket,
                                timeout_s < 0 ? Deadline::never() : Deadline::after(timeout_s));
  }
  if (status.code == Code::timeout) return false;
  raise_if_failed(status);
  raise_if_failed(self.ticket->status());
  return true;
}

}  // namespace

void bind_pending(nb::module_& module) {
  nb::class_<Pending>(module, "Pending")
      .def("done",
           [](const Pending& self) {
             const bool done = self.ticket->done();
             if (!done) self.session->hurry();
             return done;
           })
      .def("wait", &wait, nb::arg("timeout_s"))
      .def(
          "on_done",
          [](Pending& self, nb::callable function) {
            const Callback callback(std::move(function));
            const Unlocked unlocked;
            self.ticket->on_done(callback);
          },
          nb::arg("callback"));
}

}  // namespace gradsync
