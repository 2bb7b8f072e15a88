// Messages, as Python sees them.
#include <nanobind/stl/string.h>

#include "bindings/callback.h"
#include "bindings/session.h"
#include "p2p/mailbox.h"

namespace nb = nanobind;

namespace gradsync {
namespace {

// A request that was posted, for Python.
struct Posted {
  Session* session;  // kept alive by the Python object of this one
  RequestPtr request;
};

Transfer transfer(bool is_send, std::uintptr_t address, std::size_t count, int dtype, int peer,
                  std::int64_t tag, double timeout_s) {
  return {is_send,
          peer,
          tag,
          at(address),
          {count, checked<Dtype>(dtype, "dtype")},
          Deadline::after(timeout_s),
          nullptr,
          nullptr};
}

template <bool is_send>
int run(Session& self, std::uintptr_t address, std::size_t count, int dtype, int peer,
        std::int64_t tag, double timeout_s) {
  Transfer what = transfer(is_send, address, count, dtype, peer, tag, timeout_s);
  int source = any_source;
  run_released([&] { return self.mail().run(std::move(what), source); });
  return source;
}

template <bool is_send>
Posted post(Session& self, std::uintptr_t address, std::size_t count, int dtype, int peer,
            std::int64_t tag, double timeout_s, nb::object owner) {
  Transfer what = transfer(is_send, address, count, dtype, peer, tag, timeout_s);
  what.owner = keep_alive(std::move(owner));
  what.site = capture_site();
  Posted posted{&self, nullptr};
  run_released([&] { return self.mail().post(std::move(what), posted.request); });
  return posted;
}

bool done(const Posted& self) {
  if (self.request->done()) return true;
  const Unlocked unlocked;
  (void)self.session->mail().advance();
  return self.request->done();
}

bool wait(const Posted& self, double timeout_s) {
  Status status;
  if (!self.request->done()) {
    const Unlocked unlocked;
    status = self.session->mail().wait(
        *self.request, timeout_s < 0 ? Deadline::never() : Deadline::after(timeout_s));
  }
  if (status.code == Code::timeout) return false;
  raise_if_failed(status);
  raise_if_failed(self.request->status());
  return true;
}

}  // namespace

void bind_mail(nb::module_& module, nb::class_<Session>& session) {
  nb::class_<Posted>(module, "Request")
      .def("done", &done)
      .def("wait", &wait, nb::arg("timeout_s"))
      .def("source", [](const Posted& self) { return self.request->source(); })
      .def("site", [](const Posted& self) { return self.request->transfer().site->text(); })
      .def(
          "on_done",
          [](const Posted& self, nb::callable function) {
            const Callback callback(std::move(function));
            const Unlocked unlocked;
            self.request->on_done(callback);
          },
          nb::arg("callback"));
  session.def("send", [](Session& self, std::uintptr_t address, std::size_t count, int dtype,
                         int peer, std::int64_t tag, double timeout_s) {
    run<true>(self, address, count, dtype, peer, tag, timeout_s);
  });
  session.def("recv", &run<false>);
  session.def("post_send", &post<true>, nb::keep_alive<0, 1>());
  session.def("post_recv", &post<false>, nb::keep_alive<0, 1>());
}

}  // namespace gradsync
