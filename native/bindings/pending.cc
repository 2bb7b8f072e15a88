// Calls in flight, as Python sees them.
#include <nanobind/stl/string.h>

#include <functional>
#include <memory>

#include "bindings/session.h"

namespace nb = nanobind;

namespace gradsync {
namespace {

// A Python function that any thread may call or drop. Once the interpreter is going, it is neither
// called nor freed.
class Callback {
 public:
  explicit Callback(nb::callable function) : function_(std::move(function)) {}
  ~Callback() {
    if (is_finalizing()) {
      (void)function_.release();
      return;
    }
    const nb::gil_scoped_acquire locked;
    function_.reset();
  }
  Callback(const Callback&) = delete;
  Callback& operator=(const Callback&) = delete;

  void operator()() {
    if (is_finalizing()) return;
    const nb::gil_scoped_acquire locked;
    try {
      function_();
    } catch (nb::python_error& error) {
      error.discard_as_unraisable("a callback of a finished call");
    }
  }

 private:
  nb::callable function_;
};

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
      .def("done", [](const Pending& self) { return self.ticket->done(); })
      .def("wait", &wait, nb::arg("timeout_s"))
      .def(
          "on_done",
          [](Pending& self, nb::callable function) {
            const auto callback = std::make_shared<Callback>(std::move(function));
            const Unlocked unlocked;
            self.ticket->on_done([callback] { (*callback)(); });
          },
          nb::arg("callback"));
}

}  // namespace gradsync
