// What the binding files share: one function each to fill the module, and Status -> Python.
#pragma once

#include <nanobind/nanobind.h>

#include "common/status.h"

namespace gradsync {

// Sets the hooks of common/interrupt.h as well.
void bind_gil(nanobind::module_& module);
void bind_environment(nanobind::module_& module);
void bind_status(nanobind::module_& module);
void bind_session(nanobind::module_& module);
void bind_founding(nanobind::module_& module);
void bind_answering(nanobind::module_& module);
void bind_lane(nanobind::module_& module);
void bind_store(nanobind::module_& module);

// Raises gradsync._native.StatusError(code name, message, ranks) when the status is not ok.
void raise_if_failed(const Status& status);

}  // namespace gradsync
