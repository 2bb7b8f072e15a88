// What the core asks of Python while it waits: whether a signal came, and to be let run unlocked.
#include "bindings/gil.h"

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "bindings/bindings.h"
#include "common/background.h"
#include "common/deadline.h"
#include "common/interrupt.h"

namespace nb = nanobind;

namespace gradsync {
namespace {

// Threads of the core that are in Python or on their way, and whether more may come.
std::atomic<int> visitors{0};
std::atomic<bool> is_closed{false};

void keep_threads_out(double timeout_s) {
  const Unlocked unlocked;  // whoever is inside needs it
  const Deadline deadline = Deadline::after(timeout_s);
  // seq_cst with Visit::begin: either it sees this, or we see it.
  is_closed.store(true, std::memory_order_seq_cst);
  while (visitors.load(std::memory_order_seq_cst) != 0 && !deadline.expired()) {
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
}

// Python runs signal handlers in the main thread only, so only that one has to ask.
bool check_signals() {
  if (::gettid() != ::getpid() || is_finalizing()) return false;
  const PyGILState_STATE state = PyGILState_Ensure();
  const bool raised = PyErr_CheckSignals() != 0;
  PyGILState_Release(state);
  return raised;
}

void run_without_lock(void (*function)(void*), void* argument) {
  if (PyGILState_Check() == 0) return function(argument);
  const Unlocked unlocked;
  function(argument);
}

}  // namespace

bool Visit::begin() {
  if (!is_background) return !is_finalizing();
  visitors.fetch_add(1, std::memory_order_seq_cst);
  if (!is_closed.load(std::memory_order_seq_cst) && !is_finalizing()) return true;
  end();
  return false;
}

void Visit::end() {
  if (is_background) visitors.fetch_sub(1, std::memory_order_seq_cst);
}

void bind_gil(nb::module_& module) {
  interrupt_hook = check_signals;
  unlocked_hook = run_without_lock;
  // A forked child has none of the threads.
  pthread_atfork(nullptr, nullptr, [] { visitors.store(0, std::memory_order_relaxed); });
  module.def("keep_threads_out", &keep_threads_out, nb::arg("timeout_s"));
}

}  // namespace gradsync
