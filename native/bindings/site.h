// The line of Python that asked for a call.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>

#include "common/site.h"

namespace gradsync {

// Remembers the present thread's line for a call that another thread will carry out. Needs the GIL.
// Cheap: the text is made only when it is needed.
std::shared_ptr<const Site> capture_site();

void bind_site(nanobind::module_& module);

}  // namespace gradsync
