// Status as a Python exception: StatusError(code, message, ranks), translated by name in Python.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings/bindings.h"

namespace nb = nanobind;

namespace gradsync {
namespace {

PyObject* status_error = nullptr;

const char* name_of(Code code) {
  switch (code) {
    case Code::ok: return "ok";
    case Code::timeout: return "timeout";
    case Code::peer_lost: return "peer_lost";
    case Code::mismatch: return "mismatch";
    case Code::aborted: return "aborted";
    case Code::no_space: return "no_space";
    case Code::connection: return "connection";
    case Code::unauthenticated: return "unauthenticated";
    case Code::invalid: return "invalid";
    case Code::not_numeric: return "not_numeric";
    case Code::queue_empty: return "queue_empty";
    case Code::system: return "system";
    case Code::interrupted: return "interrupted";
  }
  return "unknown";
}

}  // namespace

void raise_if_failed(const Status& status) {
  if (status.ok()) return;
  // A signal handler raised (KeyboardInterrupt, say): that exception is the one to show.
  if (status.code == Code::interrupted && PyErr_Occurred() != nullptr) throw nb::python_error();
  const nb::object args =
      nb::make_tuple(name_of(status.code), status.message, nb::cast(status.ranks));
  PyErr_SetObject(status_error, args.ptr());
  throw nb::python_error();
}

void bind_status(nb::module_& module) {
  status_error = PyErr_NewExceptionWithDoc(
      "gradsync._native.StatusError",
      "A failure inside the native core; args are (code, message, ranks).", PyExc_RuntimeError,
      nullptr);
  module.attr("StatusError") = nb::borrow(status_error);
}

}  // namespace gradsync
