// The extension module. Bindings convert and release the GIL; they compute nothing.
#include "bindings/bindings.h"

NB_MODULE(_native, module) {
  gradsync::bind_status(module);
  gradsync::bind_session(module);
  gradsync::bind_store(module);
}
