// The extension module. Bindings convert and release the GIL; they compute nothing.
#include "bindings/bindings.h"
#include "bindings/site.h"

NB_MODULE(_native, module) {
  // A daemon thread that waits in a store when the interpreter ends keeps its objects: no leak.
  nanobind::set_leak_warnings(false);
  gradsync::bind_gil(module);
  gradsync::bind_environment(module);
  gradsync::bind_status(module);
  gradsync::bind_site(module);
  gradsync::bind_session(module);
  gradsync::bind_founding(module);
  gradsync::bind_answering(module);
  gradsync::bind_lane(module);
  gradsync::bind_store(module);
}
