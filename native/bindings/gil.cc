// What the core asks of Python while it waits: whether a signal came, and to be let run unlocked.
#include "bindings/gil.h"

#include "bindings/bindings.h"
#include "common/interrupt.h"

namespace gradsync {
namespace {

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

void bind_gil() {
  interrupt_hook = check_signals;
  unlocked_hook = run_without_lock;
}

}  // namespace gradsync
