// The process's environment. What os.environ does for a look at one name takes four functions of
// Python or, where there is none, three and two exceptions (1.7 and 3.1 us, here 0.5 and 0.8); for
// a look at all of them it makes text of each.
//
// Python's lock is held, and with it every change that goes through os.environ.
#include <nanobind/stl/string.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>

#include "bindings/bindings.h"

namespace nb = nanobind;

namespace gradsync {
namespace {

nb::object text_of(const char* bytes, std::size_t size) {
  const auto length = static_cast<Py_ssize_t>(size);
  return nb::steal(PyUnicode_DecodeFSDefaultAndSize(bytes, length));
}

nb::object variable(nb::handle name, nb::object otherwise) {
  PyObject* encoded = nullptr;
  if (PyUnicode_FSConverter(name.ptr(), &encoded) == 0) throw nb::python_error();
  const nb::bytes key = nb::steal<nb::bytes>(encoded);
  const bool is_name = std::strchr(key.c_str(), '=') == nullptr;
  const char* const value = is_name ? std::getenv(key.c_str()) : nullptr;
  return value == nullptr ? otherwise : text_of(value, std::strlen(value));
}

nb::list variables_of(const std::string& prefix) {
  nb::list names;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    if (std::strncmp(*entry, prefix.c_str(), prefix.size()) != 0) continue;
    names.append(text_of(*entry, std::strcspn(*entry, "=")));
  }
  return names;
}

}  // namespace

void bind_environment(nb::module_& module) {
  module.def("variable", &variable, nb::arg("name"), nb::arg("default") = nb::none());
  module.def("variables_of", &variables_of, nb::arg("prefix"));
}

}  // namespace gradsync
