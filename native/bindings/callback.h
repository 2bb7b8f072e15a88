// Python objects that threads of the core may use or drop.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <utility>

#include "bindings/gil.h"

namespace gradsync {

// Keeps an object until the last copy of the pointer is gone, in whichever thread. Once the
// interpreter is going, it is not freed.
inline std::shared_ptr<void> keep_alive(nanobind::object object) {
  return {object.release().ptr(), [](void* pointer) {
            const Visit python;
            if (!python) return;
            const nanobind::error_scope pending;
            Py_DECREF(static_cast<PyObject*>(pointer));
          }};
}

// A Python function that any thread may call or drop. Once the interpreter is going, it is neither
// called nor freed.
class Callback {
 public:
  explicit Callback(nanobind::callable function)
      : function_(keep_alive(nanobind::object(std::move(function)))) {}

  void operator()() const {
    const Visit python;
    if (!python) return;
    // The call may have ended because a signal handler raised, which is told when it returns.
    const nanobind::error_scope pending;
    try {
      nanobind::borrow<nanobind::callable>(static_cast<PyObject*>(function_.get()))();
    } catch (nanobind::python_error& error) {
      error.discard_as_unraisable("a callback of a finished call");
    }
  }

 private:
  std::shared_ptr<void> function_;
};

}  // namespace gradsync
