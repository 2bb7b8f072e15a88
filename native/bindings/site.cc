#include "bindings/site.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <atomic>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/session.h"

namespace nb = nanobind;

namespace gradsync {
namespace {

// Files in these folders are not the user's: gradsync and torch. Never freed: threads may still
// fail while the interpreter goes.
std::vector<nb::str>& own_folders() {
  static auto* const folders = new std::vector<nb::str>;
  return *folders;
}

struct Line {
  nb::object code;
  int number = 0;
};

bool is_own(PyCodeObject* code) {
  for (const nb::str& folder : own_folders()) {
    if (PyUnicode_Tailmatch(code->co_filename, folder.ptr(), 0, PY_SSIZE_T_MAX, -1) == 1) {
      return true;
    }
  }
  return false;
}

// The innermost line of the present thread that is the user's.
Line present_line() {
  PyFrameObject* frame = PyThreadState_GetFrame(PyThreadState_Get());
  Line line;
  while (frame != nullptr) {
    const nb::object here = nb::steal(reinterpret_cast<PyObject*>(frame));
    PyCodeObject* const code = PyFrame_GetCode(frame);
    line.code = nb::steal(reinterpret_cast<PyObject*>(code));
    if (!is_own(code)) {
      line.number = PyFrame_GetLineNumber(frame);
      return line;
    }
    frame = PyFrame_GetBack(frame);
  }
  return {};
}

std::string describe(const Line& line) {
  if (!line.code.is_valid()) return "";
  const auto* const code = reinterpret_cast<PyCodeObject*>(line.code.ptr());
  return std::string(nb::borrow<nb::str>(code->co_filename).c_str()) + ":" +
         std::to_string(line.number) + " in " + nb::borrow<nb::str>(code->co_name).c_str();
}

// What is no longer needed, until a thread that has the GIL comes by: a worker must not wait for
// the GIL between two calls only to let go of a line.
// (Without a lock, which a fork might leave locked.)
class Leftovers {
 public:
  void add(nb::object object) {
    auto* const node = new Node{object.release().ptr(), first_.load(std::memory_order_relaxed)};
    while (!first_.compare_exchange_weak(node->next, node, std::memory_order_release)) {
    }
  }
  void free() {
    Node* node = first_.exchange(nullptr, std::memory_order_acquire);
    while (node != nullptr) {
      const std::unique_ptr<Node> done(node);
      node = done->next;
      Py_DECREF(done->object);
    }
  }

 private:
  struct Node {
    PyObject* object;
    Node* next;
  };
  std::atomic<Node*> first_{nullptr};
};

Leftovers& leftovers() {
  static auto* const one = new Leftovers;
  return *one;
}

class CapturedSite : public Site {
 public:
  explicit CapturedSite(Line line) : line_(std::move(line)) {}
  ~CapturedSite() override {
    if (line_.code.is_valid()) leftovers().add(std::move(line_.code));
  }
  CapturedSite(const CapturedSite&) = delete;
  CapturedSite& operator=(const CapturedSite&) = delete;

  std::string text() const override {
    const Visit python;
    return python ? describe(line_) : "";
  }

 private:
  Line line_;
};

std::string site_of_this_thread() {
  const Visit python;
  return python ? describe(present_line()) : "";
}

nb::object& late_callback() {
  static auto* const callback = new nb::object;
  return *callback;
}

void tell_late(const LongWait& wait) {
  const Visit python;
  if (!python || !late_callback().is_valid()) return;
  try {
    late_callback()(wait.group, wait.places, wait.rank, wait.ranks, wait.call.sequence,
                    wait.call.what, wait.call.count, wait.missing, wait.seconds, wait.site,
                    wait.message);
  } catch (nb::python_error& error) {
    error.discard_as_unraisable("the report of a long wait");
  }
}

}  // namespace

std::shared_ptr<const Site> capture_site() {
  leftovers().free();
  return std::make_shared<CapturedSite>(present_line());
}

void bind_site(nb::module_& module) {
  site_hook = site_of_this_thread;
  late_hook = tell_late;
  module.def(
      "set_own_folders", [](std::vector<nb::str> folders) { own_folders() = std::move(folders); },
      nb::arg("folders"));
  module.def("present_site", [] { return describe(present_line()); });
  module.def(
      "tell_of_long_waits",
      [](double after_s, nb::object callback) {
        late_callback() = std::move(callback);
        late_after_ns = after_s < 1e9 ? static_cast<std::int64_t>(after_s * 1e9) : 0;
      },
      nb::arg("after_s"), nb::arg("callback"));
}

}  // namespace gradsync
